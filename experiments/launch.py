"""Starting the ranks of a run on this machine and watching them: nothing hangs, nothing stays behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.settings import ConfigError
from experiments.worker import JOB_FILE, error_file, result_file

POLL_S = 0.05
FOLDER_PREFIX, LOCK_FILE = "spdkfac-launch-", "lock"
STALE_S = 60.0
LAST_WORDS_S = 0.5
"""How long the other ranks may go on after the first failure, so that the one that failed first can be told."""
STOP_GRACE_S = 10.0
"""How long the ranks may take to stop by themselves (with a checkpoint) when the user interrupts."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RankFailure:
    """Why a run failed: the rank that failed first, with its own traceback or the signal that killed it."""

    rank: int
    message: str
    traceback: str = ""
    mistake: str = ""
    """What the user must change (one line), where that was the reason; the traceback is of no use then."""
    type: str = ""
    """Of the exception, where it was one."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.message}" + (f"\n{self.traceback.rstrip()}" if self.traceback else "")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"rank": self.rank, "type": self.type, "message": self.message, "traceback": self.traceback}


class LaunchError(RuntimeError):
    """A rank failed; ``failure`` tells which and how."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def launch(
    target: str,
    payload: Mapping[str, Any],
    world_size: int,
    *,
    threads: int = 1,
    log_folder: Path | None = None,
    stop_grace_s: float = STOP_GRACE_S,
    stopping: str = "stopping",
) -> Any:
    """Run ``target(payload, rank)`` in ``world_size`` new processes and wait for all of them.

    Rank 0 writes to this process's output; the others, and every rank's errors, to ``log_folder/rankN.log``. When one
    rank fails, the others are killed at once: they may be waiting for it in a collective. SIGINT, SIGTERM or SIGHUP
    ask the ranks to stop (SIGUSR2); those that have not after ``stop_grace_s``, or at a second signal, are killed. The
    ranks do not outlive this process, even if it is killed.

    Args:
        target: ``module:function``, called with ``payload`` and a :class:`experiments.ranks.Rank`.
        payload: plain data.
        world_size: number of ranks.
        threads: of each rank's numeric libraries.
        log_folder: where the ranks' logs go; None: this process's standard error.
        stop_grace_s: seconds.
        stopping: what is said (on standard error) as soon as a signal asks to stop.

    Returns:
        What ``target`` returned on rank 0 (plain data).

    Raises:
        LaunchError: if a rank failed.
        KeyboardInterrupt: if a signal asked to stop and the ranks had to be killed.
    """
    _remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    lock = (folder / LOCK_FILE).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    job = {"target": target, "payload": dict(payload), "world_size": world_size}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        (folder / JOB_FILE).write_text(json.dumps(job))
        with _signals() as pending:
            for rank in range(world_size):
                processes.append(_start(folder, rank, threads, log_folder))
            _watch(processes, folder, log_folder, pending, stop_grace_s, stopping)
        return json.loads(result_file(folder).read_text())
    finally:
        _kill(processes)
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _remove_stale() -> None:
    """Remove the folders of launchers that were killed: nobody holds their locks any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError), path.open("a") as lock:  # of another user, or removed at this moment
            if time.time() - path.stat().st_mtime > STALE_S:  # a new one may not be locked yet
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)


def _start(folder: Path, rank: int, threads: int, log_folder: Path | None) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environ |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    log = None
    if log_folder is not None:
        log_folder.mkdir(parents=True, exist_ok=True)
        log = (log_folder / f"rank{rank}.log").open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.worker", str(folder), str(rank), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else log,
            stderr=log,
            env=environ,
            start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
        )
    finally:
        if log is not None:
            log.close()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect stop signals in a list instead of dying of them (in the main thread; elsewhere they stay as they are)."""
    pending: list[int] = []

    def note(received: int, _: FrameType | None) -> None:
        pending.append(received)

    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # not in the main thread
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, note)
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    processes: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    log_folder: Path | None,
    pending: list[int],
    stop_grace_s: float,
    stopping: str,
) -> None:
    deadline_s: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if any(code not in (None, 0) for code in codes):
            if not pending:
                raise LaunchError(_first_failure(processes, folder, log_folder))
            raise KeyboardInterrupt
        if all(code == 0 for code in codes):
            return
        if pending and deadline_s is None:
            deadline_s = time.monotonic() + stop_grace_s
            text = f"\n{stopping} ... (killed after {stop_grace_s:g} s, or at once at a second signal)"
            print(text, file=sys.stderr, flush=True)  # noqa: T201
            _signal(processes, signal.SIGUSR2)
        if len(pending) > 1 or (deadline_s is not None and time.monotonic() > deadline_s):
            raise KeyboardInterrupt
        time.sleep(POLL_S)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], folder: Path, log_folder: Path | None) -> RankFailure:
    """The rank that failed first: killed by a signal, or with the earliest error of its own.

    The other ranks usually fail a moment later, because the connection to the first one is gone.
    """
    stopped = _stopped(processes)
    end_s = time.monotonic() + LAST_WORDS_S
    while time.monotonic() < end_s and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    codes = [process.returncode for process in processes]
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return RankFailure(rank, f"was killed by {signal.Signals(-code).name}", _tail(log_folder, rank))
    errors = [json.loads(path.read_text()) for r in range(len(codes)) if (path := error_file(folder, r)).exists()]
    if errors:
        first = min(errors, key=lambda error: error["time"])
        message = f"failed: {first['type']}: {first['message']}{stopped}"
        mistake = " ".join(first["message"].split()) if first["type"] == ConfigError.__name__ else ""
        return RankFailure(first["rank"], message, first["traceback"], mistake, first["type"])
    rank = next(r for r, code in enumerate(codes) if code)
    return RankFailure(rank, f"ended with exit code {codes[rank]}", _tail(log_folder, rank))


def _stopped(processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """Which ranks do not run because a signal has stopped them, where that is so: the others wait for them in vain."""
    ranks = []
    for rank, process in enumerate(processes):
        with suppress(OSError, IndexError):
            if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                ranks.append(f"rank {rank} (process {process.pid})")
    return f"\nStopped by a signal (SIGSTOP; kill -CONT lets it go on): {', '.join(ranks)}" if ranks else ""


def _tail(log_folder: Path | None, rank: int, lines: int = 20) -> str:
    path = log_folder / f"rank{rank}.log" if log_folder else None
    if path is None or not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, with the processes of their groups."""
    for process in processes:
        # A rank that was waited for is left alone: its number may belong to somebody else by now.
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
