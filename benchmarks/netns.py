"""An emulated cluster on one machine: a network namespace per rank, all on one bridge, each link limited to a rate.

Bridge and links live in namespaces of their own, so that nothing of the machine's network is touched and addresses and
ports cannot collide with anything. Needs root and iproute2 (``ip``, ``tc``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "spdkfac-"
INTERFACE = "eth0"
PACKET_BYTES, BURST_BYTES = 32_768, 36_000
"""The largest packet, and the bucket: what passes unlimited after a pause, and with it a small message, so the less the
better. It must hold more than a packet, or the kernel cuts each to the link's MTU, and receiving those takes up to half
a core. Packets half as large as the usual 64 kB cost a third more processor time, those of 16 kB twice as much (both
measured). Connections keep the packet size that a link has when they are made.
"""
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""Nothing is lost here, so a connection sends as fast as the link allows, from the first byte after a pause. Others
(BBR, which some machines prefer) send less now and then to find out: iterations took up to 17 % longer by chance."""
PORT = 29_500  # the namespaces have their ports to themselves
_numbers = itertools.count()


class NetworkError(RuntimeError):
    """The kernel, or the lack of rights, does not let us build the network; or a rank failed in it."""


@dataclass(frozen=True)
class Host:
    """One rank's place in the network: a namespace with one interface."""

    namespace: str
    address: str
    rank: int
    world_size: int
    first_address: str

    @property
    def environment(self) -> dict[str, str]:
        """What a rank needs to know to meet the others: torchrun's variables, and the interface for Gloo and NCCL."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.first_address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def command(self, command: Sequence[str], *, pinned: bool = True) -> list[str]:
        """``command`` as run on this host, on a core of its own as far as there are enough (``pinned``)."""
        cores = sorted(os.sched_getaffinity(0))
        pin = ["taskset", "--cpu-list", str(cores[self.rank % len(cores)])] if pinned else []
        return ["ip", "netns", "exec", self.namespace, *pin, *command]


@dataclass(frozen=True)
class Network:
    """Hosts in rank order."""

    hosts: tuple[Host, ...]

    def limit(self, rate_mbit_s: float | None) -> None:
        """Let each host send at most ``rate_mbit_s`` from now on (a token bucket); None lifts the limit."""
        for host in self.hosts:
            device = ["dev", INTERFACE, "root"]
            if rate_mbit_s is None:
                subprocess.run(
                    ["tc", "-n", host.namespace, "qdisc", "delete", *device], capture_output=True, check=False
                )
            else:
                rate = f"{rate_mbit_s * 1000:.0f}kbit"
                shape = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "100ms"]
                _call("tc", "-n", host.namespace, "qdisc", "replace", *device, *shape)


@contextlib.contextmanager
def emulated_network(world_size: int, rate_mbit_s: float | None = None) -> Iterator[Network]:
    """A network of ``world_size`` hosts, each sending at most ``rate_mbit_s`` megabits a second; removed at the end.

    Raises NetworkError when namespaces cannot be made here (no root, or a sandbox that forbids them).
    """
    if world_size < 1 or world_size > 250:
        raise ValueError(f"world_size must be between 1 and 250, got {world_size}")
    _remove_leftovers()
    base = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    hub, names = f"{base}-hub", [f"{base}-{rank}" for rank in range(world_size)]
    addresses = [f"10.77.0.{rank + 1}" for rank in range(world_size)]
    try:
        _call("ip", "netns", "add", hub)
        _call("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{rank}"
            _call("ip", "netns", "add", name)
            _call("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _call("ip", "-n", name, "link", "set", "dev", INTERFACE, "gso_max_size", str(PACKET_BYTES))
            _call("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            for key, value in _TCP.items():
                _call("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}")
        hosts = (Host(n, a, r, world_size, addresses[0]) for r, (n, a) in enumerate(zip(names, addresses, strict=True)))
        network = Network(tuple(hosts))
        if rate_mbit_s is not None:
            network.limit(rate_mbit_s)
        yield network
    finally:
        for name in (*names, hub):
            _remove(name)


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NetworkError(f"{command[0]} is not installed (Debian: apt-get install iproute2)") from error
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def _remove(namespace: str) -> None:
    """End what still runs in a namespace, then delete it with its interfaces."""
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for process in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that were killed before they could."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{PREFIX}*") if folder.is_dir() else ():
        owner = path.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            _remove(path.name)
