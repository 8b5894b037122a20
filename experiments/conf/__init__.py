"""Hydra configurations, shipped as package data."""
