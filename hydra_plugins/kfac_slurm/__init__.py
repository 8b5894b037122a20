"""Hydra's launcher ``hydra/launcher=slurm``: a thin front of ``slurm.launcher``."""
