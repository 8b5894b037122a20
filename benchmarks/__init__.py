"""Measured speed, side by side in one run; not part of the installed package."""
