"""Processes of an emulated network, one rank on each host, that do what they are told and wait in between."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.netns import PORT, Network, NetworkError

ROOT = Path(__file__).parent.parent


class Ranks:
    """The same command on each host; what it prints are lines of JSON, its answers. All end with the ``with`` block.

    A process that waits for a command takes no processor time, so that several ``Ranks`` can share the same hosts.

    Args:
        network: the hosts.
        command: what each of them runs.
        environment: variables beside those of its host.
        pinned: each on a core of its own, as far as there are enough.
        port: of the rendezvous; one for each of several ``Ranks`` on the same hosts.
    """

    def __init__(
        self,
        network: Network,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pinned: bool = True,
        port: int = PORT,
    ) -> None:
        self._network, self._command, self._pinned = network, command, pinned
        self._environment = {**os.environ, **(environment or {})}
        self._port = port
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def __enter__(self) -> Ranks:
        try:
            for host in self._network.hosts:
                self._errors.append(tempfile.TemporaryFile("w+", errors="replace"))
                process = subprocess.Popen(
                    host.command(self._command, pinned=self._pinned),
                    cwd=ROOT,
                    env={**self._environment, **host.environment, "MASTER_PORT": str(self._port)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    text=True,
                    start_new_session=True,
                )
                self._processes.append(process)
                threading.Thread(target=self._read, args=(host.rank, process.stdout), daemon=True).start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _read(self, rank: int, answers: IO[str]) -> None:
        for line in answers:
            self._lines.put((rank, line))
        self._lines.put((rank, ""))

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # what it was never told
                process.stdin.close()
        for errors in self._errors:
            errors.close()

    def answers(self, timeout_s: float = 600.0) -> list[Any]:
        """The next answer of every rank, in the order of ranks.

        Raises:
            NetworkError: if a rank ends instead, with the end of its error output, or ``timeout_s`` pass.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while len(found) < len(self._processes):
            try:
                rank, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(len(self._processes))) - set(found))
                raise NetworkError(f"no answer of rank(s) {missing} within {timeout_s:.0f} s") from None
            if not line:
                raise NetworkError(self._why(rank))
            found[rank] = json.loads(line)
        return [found[rank] for rank in sorted(found)]

    def ask(self, command: str, timeout_s: float = 600.0, **arguments: Any) -> list[Any]:
        """Let every rank obey a command (see :func:`obey`); their answers, as :meth:`answers`."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # the answer says why
        return self.answers(timeout_s)

    def _why(self, rank: int) -> str:
        try:
            status: int | None = self._processes[rank].wait(timeout=10)
        except subprocess.TimeoutExpired:
            status = None
        self._errors[rank].seek(0)
        tail = "".join(self._errors[rank].readlines()[-20:])
        return f"rank {rank} ended with exit status {status}:\n{tail}"


def obey(commands: Mapping[str, Callable[..., Any]]) -> None:
    """In a rank: answer each command that comes, until there are no more.

    Args:
        commands: by name what is called with the command's arguments; what it returns is the answer.
    """
    for request, answer in _requests():
        answer(commands[request.pop("command")](**request))


def _requests() -> Iterator[tuple[dict[str, Any], Callable[[Any], None]]]:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")

    for line in sys.stdin:
        yield json.loads(line), answer


class Usage:
    """What a rank uses from now on: bytes sent by its host, and processor time of the computing and other threads."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        own = time.thread_time()
        return float(sent_bytes()), own, time.process_time() - own

    def per(self, iterations: int) -> dict[str, float]:
        """Of each of so many iterations; the caller's thread is the one that computes."""
        used = [(now - before) / iterations for now, before in zip(self._now(), self._start, strict=True)]
        return dict(zip(("sent_bytes", "computing_cpu_s", "other_cpu_s"), used, strict=True))


def sent_bytes() -> int:
    """Bytes that this host has sent over the network since it was made, with all headers."""
    rows = (line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(row[9]) for row in rows if row[0] != "lo:")
