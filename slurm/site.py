"""Where a sweep's runs go and what each asks for: the configuration group ``site``."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from experiments.nodes import Nodes
from experiments.redaction import gives_secret
from experiments.settings import ConfigError, at_least, one_of, read

KEY = "site"
HERE, LOCAL, SLURM = "here", "local", "slurm"
SCHEDULERS = (HERE, LOCAL, SLURM)
REQUEUE = """\
code=$?
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# Only if this start is still the job's own: it may have been cancelled, or started again elsewhere.
current() { scontrol -o show job "$job" | grep -q "JobState=RUNNING .* Restarts=${SLURM_RESTART_COUNT:-0} "; }
%(python)s -m slurm.aftermath %(sweep)s "$job" $code
verdict=$?
if [ $verdict -eq 0 ] && current; then
  scontrol requeue "$job" && sleep 120
fi
[ $code -eq 0 ] && [ $verdict -eq 75 ] && code=75
exit $code"""
"""What follows srun in the batch script: a run that stopped with a checkpoint, or crashed, is queued again."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """See ``experiments/conf/site``; None leaves a choice to the cluster's defaults.

    ``tasks_per_node`` and ``gpus_per_node`` are what fits on a node, one rank per GPU; a job with fewer ranks asks for
    less, one with more for more nodes, unless ``nodes`` says how many.
    """

    scheduler: str = HERE
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int = 1
    mem_gb: float | None = None
    exclusive: bool = False
    time_min: int = 60
    after: str | None = None
    array_parallelism: int = 256
    signal_s: int = 120
    retries: int = 2
    interface: str | None = None
    start_timeout_s: float = 300.0
    python: str | None = None
    container: str | None = None
    setup: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    extra: dict[str, Any] | None = None
    parallel: int = 1
    wait: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        one_of(f"{KEY}.scheduler", self.scheduler, SCHEDULERS)
        for name in (
            "cpus_per_task", "time_min", "array_parallelism", "signal_s", "parallel", "start_timeout_s",
        ):  # fmt: skip
            at_least(f"{KEY}.{name}", getattr(self, name), 1)
        at_least(f"{KEY}.retries", self.retries, 0, high=1000)
        at_least(f"{KEY}.mem_gb", self.mem_gb, 0, open_=True)
        Nodes.of(self.__dict__)
        for line in map(str, (*self.setup, *self.srun, *(f"{k}={v}" for k, v in (self.extra or {}).items()))):
            if gives_secret(line):  # it would stand in scripts, records and the manifest
                raise ConfigError(
                    f"{KEY}: {line.partition('=')[0]}=...: no secrets in scripts; a job has the variables of the shell "
                    "that submits it, or let the line read a file (export NAME=$(cat ~/FILE))"
                )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Site:
        """The value of plain data, None for a run in this process.

        Raises:
            ConfigError: for an unknown key or an impossible value.
        """
        return read(cls, data or {}, KEY)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Site:
        """The site of a plain configuration, with the nodes that the configuration's own keys ask for.

        Raises:
            ConfigError: as :meth:`from_dict`.
        """
        site = data.get(KEY)
        return cls.from_dict(site and {**site, **asdict(Nodes.of(data))})

    def layout(self, world_size: int) -> tuple[int, int]:
        """Nodes and ranks per node whose product is ``world_size``.

        Raises:
            ConfigError: if the ranks cannot be spread evenly.
        """
        return Nodes.of(self.__dict__).layout(world_size)

    def gpus(self, world_size: int) -> int:
        """How many GPUs a job of ``world_size`` ranks occupies: whole nodes' if they are exclusive."""
        nodes, per_node = self.layout(world_size)
        most = self.gpus_per_node or 0
        return nodes * (most if self.exclusive else min(most, per_node))

    @property
    def command(self) -> str:
        """What starts Python on a node, as the shell reads it."""
        return " ".join(filter(None, [self.container, self.python or shlex.quote(sys.executable)]))

    def submitit_parameters(self, world_size: int, *, sweep: str, code: str, dependency: str | None) -> dict[str, Any]:
        """The parameters of submitit's SlurmExecutor for a job of ``world_size`` ranks.

        Args:
            world_size: of the run.
            sweep: the sweep's folder.
            code: the folder of the code that is to run.
            dependency: what must have ended before, as sbatch wants it.
        """
        nodes, per_node = self.layout(world_size)
        extra = {"requeue": True, **({"kill-on-invalid-dep": "yes"} if dependency else {}), **(self.extra or {})}
        environment = {
            # From 22.05 on srun no longer reads --cpus-per-task from the job.
            "SRUN_CPUS_PER_TASK": "${SLURM_CPUS_PER_TASK:-1}",
            # The snapshot comes before the folder where the job was submitted.
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": f"{shlex.quote(code)}${{PYTHONPATH:+:$PYTHONPATH}}",
        }
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
            "exclusive": self.exclusive or None,
            "time": self.time_min,
            "dependency": dependency,
            "array_parallelism": self.array_parallelism,
            "signal_delay_s": self.signal_s,
            "setup": [*self.setup, *(f"export {name}={value}" for name, value in environment.items())],
            "teardown": [REQUEUE % {"python": self.command, "sweep": shlex.quote(sweep)}],
            "additional_parameters": extra,
            # A crashed rank ends the others instead of leaving them in a collective until the time limit.
            "srun_args": ["--kill-on-bad-exit=1", *self.srun],
        }
        return {name: value for name, value in asked.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """The plain form, which :meth:`from_dict` reads back; only what is not the default."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(Site, name, None)
        }
