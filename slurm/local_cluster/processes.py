"""Daemons that outlive the command that started them, found again and ended by process id and start time.

A process id alone is not enough: it may have been given to another process since, and where nobody reaps zombies (the
first process of a container often does not) a dead daemon still answers to its id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def _stat(process: int) -> tuple[str, int, str] | None:
    """State letter, parent and start time of a process, None when it is gone (proc(5), /proc/pid/stat)."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold spaces and parentheses
    return fields[0], int(fields[1]), fields[19]


def start_time(process: int) -> str | None:
    """When a living process started, in the kernel's ticks; None for one that is gone or a zombie."""
    stat = _stat(process)
    return None if stat is None or stat[0] in "ZX" else stat[2]


class Daemons:
    """The daemons recorded under one directory, as files ``run/NAME`` that hold "process-id start-time"."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._run = directory / "run"
        self._log = directory / "log"
        self._environment = dict(environment)

    def start(self, name: str, command: Sequence[str], **variables: str) -> None:
        """Start a daemon in a session of its own, with more environment variables, its output in ``log/NAME.out``."""
        with (self._log / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environment, **variables},
                start_new_session=True,
            ).pid
        (self._run / name).write_text(f"{process} {start_time(process) or 'gone'}\n")

    def names(self) -> list[str]:
        """Every recorded daemon, alive or not."""
        return sorted(path.name for path in self._run.glob("*")) if self._run.is_dir() else []

    def process(self, name: str) -> int | None:
        """The process id of a daemon that is alive, else None."""
        try:
            process, started = (self._run / name).read_text().split()
        except (OSError, ValueError):
            return None
        return int(process) if start_time(int(process)) == started else None

    def stop(self, names: Sequence[str], patience_s: float = 5.0) -> None:
        """Ask daemons to end together, then kill those that have not within ``patience_s``; forget them all."""
        for how, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 1.0)):
            for name in names:
                kill(self.process(name), how)
            deadline = time.monotonic() + wait_s
            while any(self.process(name) for name in names) and time.monotonic() < deadline:
                time.sleep(0.02)
        for name in names:
            (self._run / name).unlink(missing_ok=True)


def kill(process: int | None, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal, and accept that the process may have gone meanwhile."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, how)


def descendants(process: int) -> list[int]:
    """A process's children, their children and so on, leaves first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(stat[1], []).append(int(entry.name))

    def below(parent: int) -> list[int]:
        return [p for child in children.get(parent, []) for p in (*below(child), child)]

    return below(process)


def orphaned_steps(log_directory: Path) -> list[int]:
    """Job steps (slurmstepd) of a cluster whose slurmd is gone: they hold one of its logs open."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "comm").read_text().strip() != "slurmstepd":
                continue
            targets = [os.readlink(link) for link in (entry / "fd").iterdir()]
        except OSError:  # ended meanwhile, or another user's
            continue
        if any(target.startswith(f"{log_directory}/slurmd-") for target in targets):
            found.append(int(entry.name))
    return found
