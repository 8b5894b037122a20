"""One writer per run record: a lock that names its holder, and that a restarted job takes from its dead first copy."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

LOCK = ".lock"
TAKE_OVER_S = 10.0
"""How long a restarted job waits for its first copy to end by itself."""
_HOLDER = re.compile(r", job (\S+) restart (\d+)$")


class RecordInUseError(RuntimeError):
    """Another process is writing this record."""


def job_facts() -> dict[str, Any]:
    """Which SLURM job this process belongs to (``ARRAY_TASK`` for one of an array), and how often it was restarted."""
    environ = os.environ
    job = environ.get("SLURM_JOB_ID")
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return {"job": job, "restart": int(environ.get("SLURM_RESTART_COUNT", "0"))} if job else {}


def take_lock(path: Path) -> IO[str]:
    """An exclusive lock that the kernel releases when its process ends, however that comes about.

    A restarted job takes the lock from an earlier start of its own: SLURM has called that dead.

    Raises:
        RecordInUseError: if a live process has it.
    """
    me = job_facts()
    end_s = time.monotonic() + TAKE_OVER_S
    while True:
        file = (path / LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            found = _HOLDER.search(holder)
            if not (found and me and found[1] == me["job"] and int(found[2]) < me["restart"]):
                raise RecordInUseError(f"{path} is being written by {holder or 'another process'}") from None
            if time.monotonic() > end_s:
                logger.warning("%s: taken over from %s, which SLURM took for dead", path, holder)
                (path / LOCK).unlink(missing_ok=True)
            else:
                time.sleep(0.2)
            continue
        except OSError:  # a file system without locks
            return file
        if not is_at(file, path / LOCK):  # taken over at this moment
            file.close()
            continue
        file.truncate(0)
        job = f", job {me['job']} restart {me['restart']}" if me else ""
        file.write(f"process {os.getpid()} on {socket.gethostname()}{job}\n")
        file.flush()
        return file


def is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one at a path; also where the path cannot be looked at."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return True
