"""How far plans are from proven bounds, and how they scale on paper: ``python -m benchmarks.planning``."""
