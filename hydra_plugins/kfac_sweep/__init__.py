"""Hydra's launcher of all sweeps: a thin front of ``slurm.launcher``."""
