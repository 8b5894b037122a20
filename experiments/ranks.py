"""Who this process is among the ranks of a run, from our own launcher, torchrun or SLURM."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.rendezvous import START_TIMEOUT_S, meeting_address
from experiments.settings import ConfigError

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a run.

    Args:
        rank, world_size: of the run.
        local_rank: on this machine.
        init_method: how the ranks find each other: ``file:///path``, ``tcp://host:port`` or ``spdkfac:///path``.
        local_size: how many ranks see the same devices as this one; 1 where a launcher may have split them.
    """

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    local_size: int = 1


def rank_from_environment(
    environ: Mapping[str, str],
    world_size: int,
    folder: Path,
    *,
    timeout_s: float = START_TIMEOUT_S,
    interface: str | None = None,
) -> Rank | None:
    """The rank that torchrun (``RANK``) or SLURM (``SLURM_PROCID``) gave this process; None if neither did.

    The ranks of a SLURM job meet through a file in the run's folder, which all of them must see anyway (or at
    ``MASTER_ADDR:MASTER_PORT``, where these are set): see :mod:`experiments.rendezvous`.

    Args:
        environ: environment variables.
        world_size: the configured number of ranks.
        folder: the run's directory, or another that all ranks see.
        timeout_s: how long ranks of a SLURM job wait for each other.
        interface: the network interface that they use; None: one on which rank 0 can be reached.

    Raises:
        ConfigError: if the launcher started another number of ranks than configured, or gave half of what is needed.
    """
    if "RANK" in environ:
        names, launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "torchrun"
    elif "SLURM_PROCID" in environ:
        names, launcher = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), "SLURM"
    else:
        return None
    rank, started, local_rank = (_number(environ, name, launcher) for name in names)
    if started != world_size:
        raise ConfigError(f"world_size={world_size}, but {launcher} started {started} ({names[1]}): make them the same")
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        method = f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    elif launcher == "SLURM":
        job = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
        folder.mkdir(parents=True, exist_ok=True)
        method = meeting_address(folder.resolve() / f".rendezvous.{'.'.join(job)}", timeout_s, interface)
    else:
        raise ConfigError("RANK is set, but MASTER_ADDR and MASTER_PORT are not: start with torchrun, or unset RANK")
    return Rank(rank=rank, world_size=started, local_rank=local_rank, init_method=method)


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(f"{launcher} did not set {name} to a number: {environ.get(name)!r}") from None


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent ends, and end now if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class StopRequest:
    """Whether someone asked this process to stop at the next opportunity (SIGTERM or SIGUSR2)."""

    def __init__(self) -> None:
        self.asked = False
        self._pid = os.getpid()

    def listen(self) -> StopRequest:
        """Take over the two signals, and leave Ctrl-C to the launcher."""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR2, self._note)
        return self

    def _note(self, *_: Any) -> None:
        if os.getpid() == self._pid:  # a forked reader of images inherits the handler
            self.asked = True
