"""Bring a one-machine SLURM cluster up and down: one munged, one slurmctld and a slurmd per virtual node.

Works as root and as an ordinary user, without systemd. Everything (key, sockets, state, logs, configuration) lies under
one directory, so that several clusters can stand side by side.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from slurm.local_cluster import accounting, settings
from slurm.local_cluster.processes import Daemons, descendants, kill, orphaned_steps
from slurm.local_cluster.settings import ClusterShape

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
SOCKET_PATH_BYTES = 107  # unix(7): the longest path of a socket


class LocalClusterError(RuntimeError):
    """The cluster cannot be brought up; the message says what to do."""


def default_directory() -> Path:
    """Where the cluster lies unless told otherwise: the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "spdkfac" / "local-cluster"


def client_environment(slurm_conf: Path | None = None) -> dict[str, str]:
    """The environment for SLURM's programs: no variables of a surrounding job, system directories in PATH."""
    variables = {name: v for name, v in os.environ.items() if not re.match(r"SLURM_(JOB|STEP)|SBATCH_", name)}
    variables["PATH"] = os.pathsep.join([variables.get("PATH", ""), "/usr/sbin", "/sbin"])
    if slurm_conf is not None:
        variables["SLURM_CONF"] = str(slurm_conf)
    return variables


class LocalCluster:
    """The cluster in a directory, up or not."""

    def __init__(self, directory: Path | str | None = None) -> None:
        self.directory = Path(directory or default_directory()).expanduser().resolve()
        self.slurm_conf = self.directory / "etc" / "slurm.conf"
        self._environment = client_environment(self.slurm_conf)
        self._daemons = Daemons(self.directory, self._environment)

    def up(self, shape: ClusterShape | None = None, *, timeout_s: float = 60.0) -> bool:
        """Start the cluster with an empty job table and wait until every node is idle.

        Returns False when it was up already (``shape`` is then not looked at). Raises LocalClusterError when programs
        are missing, the directory's path is too long for a socket, or a daemon dies; no daemon is left behind then.
        """
        shape = shape or ClusterShape()
        self._check(shape)
        with self._locked():
            if self.is_up():
                return False
            self._end()  # what a half-dead cluster left
            try:
                self._configure(shape)
                self._start(shape, timeout_s)
            except BaseException:
                self._end()
                raise
        return True

    def down(self) -> bool:
        """Kill the cluster's jobs and end its daemons, and nothing else. Returns False when there were none."""
        if not self._daemons.names():
            return False
        with self._locked():
            self._end()
        return True

    def is_up(self) -> bool:
        """Whether every daemon of the cluster is alive."""
        names = self._daemons.names()
        return bool(names) and all(self._daemons.process(name) for name in names)

    def processes(self) -> dict[str, int | None]:
        """The recorded daemons and their process ids, None for one that died."""
        return {name: self._daemons.process(name) for name in self._daemons.names()}

    def nodes(self) -> dict[str, str]:
        """Each node's state as sinfo says; empty while nobody answers."""
        lines = self._ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def _check(self, shape: ClusterShape) -> None:
        path = self._environment["PATH"]
        missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
        packages = PACKAGES
        if shape.accounting:
            missing += accounting.missing(path)
            packages += f" {accounting.PACKAGES}"
        if missing:
            raise LocalClusterError(
                f"not installed: {', '.join(missing)}. On Debian and Ubuntu: "
                f"apt-get install {packages} (their services need not run)"
            )
        socket_path = f"{self.directory}/munge/socket"
        if len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES:
            raise LocalClusterError(
                f"{socket_path} is longer than a socket's path may be ({SOCKET_PATH_BYTES} bytes): "
                "choose another directory"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second `up` at the same time waits, then finds the first one's cluster
            yield

    def _configure(self, shape: ClusterShape) -> None:
        root = self.directory
        for name in ("state", "spool", "log", "run", "db"):  # a new job table each time
            shutil.rmtree(root / name, ignore_errors=True)
        for name in ("run", "log", "spool", "state", "etc", "munge", "dev", "db"):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o711 if name == "munge" else 0o755)  # munged and slurmd are particular about modes
        for name in shape.node_names:
            (root / "spool" / name).mkdir()
        for index in range(shape.gpus):
            device = root / "dev" / f"gpu{index}"
            device.unlink(missing_ok=True)
            device.symlink_to("/dev/null")
        key = root / "munge" / "key"
        key.unlink(missing_ok=True)
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))

        slurmd = subprocess.run(["slurmd", "-V"], env=self._environment, capture_output=True, text=True, check=True)
        version = re.search(r"\d+\.\d+", slurmd.stdout)
        if version is None:
            raise LocalClusterError(f"cannot read SLURM's version from {slurmd.stdout!r}")
        self._first_port = settings.free_port_block(shape.nodes + 2)
        texts = {
            "slurm.conf": settings.slurm_conf(root, shape, getpass.getuser(), self._first_port),
            "gres.conf": settings.gres_conf(root, shape),
            "cgroup.conf": settings.cgroup_conf(version[0]),
            "plugstack.conf": "",
        }
        for name, text in texts.items():
            (root / "etc" / name).write_text(text)

    def _start(self, shape: ClusterShape, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        munge, log, conf = self.directory / "munge", self.directory / "log", str(self.slurm_conf)
        self._daemons.start(
            "munged",
            ["munged", "--foreground", "--force", "--num-threads=2"]
            + [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "seed")]
            + [f"--socket={munge}/socket", f"--log-file={log}/munged.log"],
        )
        while not self._answers("munge", "-S", f"{munge}/socket", "-n"):
            self._wait_or_raise(deadline)
        if shape.accounting:
            port = self._first_port + 1 + shape.nodes
            accounting.start(
                self.directory, self._daemons, self._environment, port, lambda: self._wait_or_raise(deadline)
            )
        self._daemons.start("slurmctld", ["slurmctld", "-D", "-i", "-f", conf])
        for name in shape.node_names:
            self._daemons.start(f"slurmd-{name}", ["slurmd", "-D", "-N", name, "-f", conf])
        while sorted(name for name, state in self.nodes().items() if state == "idle") != sorted(shape.node_names):
            self._wait_or_raise(deadline)

    def _wait_or_raise(self, deadline: float) -> None:
        dead = [name for name, process in self.processes().items() if process is None]
        if dead or time.monotonic() > deadline:
            text = "\n".join(path.read_text() for path in sorted((self.directory / "log").glob("*.out")))
            said = [line for line in dict.fromkeys(text.splitlines()) if re.search("fatal|error", line, re.IGNORECASE)]
            what = f"{', '.join(dead)} died" if dead else "its nodes did not become idle in time"
            raise LocalClusterError("\n".join([f"the local cluster did not come up: {what}", *said[-10:]]))
        time.sleep(0.05)

    def _end(self) -> None:
        if self._daemons.process("slurmctld"):  # jobs first, so that no step outlives its slurmd
            self._ask("scancel", "--me", "--full", "--signal=KILL")
            self._ask("scancel", "--me")
            deadline = time.monotonic() + 6
            while self._ask("squeue", "-h", "-o", "%i") and time.monotonic() < deadline:
                time.sleep(0.1)
        names = self._daemons.names()
        last = (*accounting.DAEMONS, "munged")
        self._daemons.stop([name for name in names if name not in last])
        for name in last:
            self._daemons.stop([name] if name in names else [])
        for step in orphaned_steps(self.directory / "log"):
            for process in (*descendants(step), step):
                kill(process)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(
                command, env=self._environment, capture_output=True, text=True, timeout=5, check=False
            )
        except subprocess.TimeoutExpired:
            return None

    def _ask(self, *command: str) -> str:
        done = self._run(*command)
        return done.stdout.strip() if done else ""

    def _answers(self, *command: str) -> bool:
        done = self._run(*command)
        return done is not None and done.returncode == 0
