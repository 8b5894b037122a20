"""Measured speed of every schedule over rate-limited links: ``python -m benchmarks speed``."""
