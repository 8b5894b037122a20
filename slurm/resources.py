"""What one job of a sweep asks of SLURM, and how its ranks are laid out over nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from experiments.settings import ConfigError

KEY = "hydra.launcher"  # where users set these


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The options of sbatch that sweeps need; None leaves one to the cluster's default.

    ``tasks_per_node`` and ``gpus_per_node`` are what fits on a node, one rank per GPU; a job with fewer ranks asks for
    less, one with more for more nodes, unless ``nodes`` says how many. ``extra`` holds further sbatch options by their
    long name, ``setup`` shell lines that run before the ranks start.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int = 1
    mem_gb: float | None = None
    time_min: int = 60
    array_parallelism: int = 256
    setup: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "time_min", "array_parallelism"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{KEY}.{name}={value!r} must be a whole number from 1 on")
        if self.mem_gb is not None and not self.mem_gb > 0:
            raise ConfigError(f"{KEY}.mem_gb={self.mem_gb} must be above 0")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Resources:
        """The value of plain data.

        Raises:
            ConfigError: for an unknown key or an impossible value.
        """
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise ConfigError(f"unknown key {KEY}.{unknown[0]}; keys: {', '.join(known)}")
        return cls(**{**data, "setup": tuple(data.get("setup") or ()), "extra": dict(data.get("extra") or {})})

    def layout(self, world_size: int) -> tuple[int, int]:
        """Nodes and ranks per node whose product is ``world_size``.

        Raises:
            ConfigError: if the ranks cannot be spread evenly.
        """
        limits = [limit for limit in (self.tasks_per_node, self.gpus_per_node) if limit]
        most = min([*limits, world_size])
        nodes = self.nodes or math.ceil(world_size / most)
        per_node, rest = divmod(world_size, nodes)
        if rest or not 1 <= per_node <= most:
            names = ("nodes", "tasks_per_node", "gpus_per_node")
            asked = ", ".join(f"{KEY}.{name}={value}" for name in names if (value := getattr(self, name)))
            raise ConfigError(f"world_size={world_size} does not spread evenly over nodes with {asked}")
        return nodes, per_node

    def submitit_parameters(self, world_size: int) -> dict[str, Any]:
        """The parameters of submitit's SlurmExecutor for a job of ``world_size`` ranks."""
        nodes, per_node = self.layout(world_size)
        asked = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodes": nodes,
            "ntasks_per_node": per_node,
            "gpus_per_node": self.gpus_per_node and min(self.gpus_per_node, per_node),
            "cpus_per_task": self.cpus_per_task,
            "mem": self.mem_gb and f"{math.ceil(self.mem_gb * 1024)}M",
            "time": self.time_min,
            "array_parallelism": self.array_parallelism,
            # From 22.05 on srun no longer reads --cpus-per-task from the job.
            "setup": ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", *self.setup],
            "additional_parameters": dict(self.extra),
            # A crashed rank ends the others instead of leaving them in a collective until the time limit.
            "srun_args": ["--kill-on-bad-exit=1"],
        }
        return {name: value for name, value in asked.items() if value is not None}
