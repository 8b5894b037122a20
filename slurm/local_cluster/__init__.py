"""A real SLURM of virtual nodes with fake GPUs on one machine, for tests and for a first sweep."""

from slurm.local_cluster.cluster import LocalCluster, LocalClusterError, default_directory
from slurm.local_cluster.settings import ClusterShape

__all__ = ["ClusterShape", "LocalCluster", "LocalClusterError", "default_directory"]
