"""How the ranks of a job that something else started find each other: rank 0 says in a file where it listens.

The port is one that the system gave, the address is one that the others could connect to, and whoever is missing is
named on every rank when the time is up. torch.distributed calls this for addresses that begin with ``spdkfac://``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlparse

from experiments.records import write_json

SCHEME = "spdkfac"
START_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S, CONNECT_PATIENCE_S = 5.0, 30.0
POLL_S = 0.1
LAST_WORDS_S = 1.0
"""How long rank 0 stays so that the others can read who is missing."""
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RendezvousError(RuntimeError):
    """The ranks did not find each other in time; the message says who is missing and what to do."""


def meeting_address(file: Path, timeout_s: float = START_TIMEOUT_S, interface: str | None = None) -> str:
    """The ``init_method`` of ranks that meet through a file that all of them see and that is new for each start."""
    options = {"timeout_s": f"{timeout_s:g}"} | ({"interface": interface} if interface else {})
    return f"{SCHEME}://{quote(str(file))}?{urlencode(options)}"


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(packed[20:24])
    return found


def candidates(environ: Mapping[str, str], known: Mapping[str, str], interface: str | None = None) -> list[str]:
    """The addresses under which other nodes may reach this one, the likeliest first.

    Args:
        environ: SLURM's variables: where the job was launched is rank 0's node, for a batch job.
        known: addresses of the interfaces.
        interface: only this one's.

    Raises:
        RendezvousError: if there is no such interface.
    """
    if interface:
        if interface not in known:
            raise RendezvousError(
                f"site.interface={interface}: {socket.gethostname()} has no such network interface with an address; "
                f"it has {', '.join(sorted(known))}"
            )
        return [known[interface]]
    own = [address for address in known.values() if not address.startswith("127.")]
    launched = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    first = [launched] if launched in own else []
    rest = [address for address in own if address not in first]
    return [*first, *rest, *(address for address in known.values() if address.startswith("127."))]


class Meeting:
    """One rank's part in it.

    Args:
        file: where rank 0 says how it can be reached.
        rank, world_size: of this process.
        timeout_s: how long to wait for the others.
        interface: the network to use; None: one on which rank 0 can be reached.
    """

    def __init__(self, file: Path, rank: int, world_size: int, timeout_s: float, interface: str | None) -> None:
        self.file, self.rank, self.world_size, self.interface = file, rank, world_size, interface
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.known = interfaces()

    def store(self) -> Any:
        """The store (of torch.distributed) that all ranks share, once all are there; collective.

        Raises:
            RendezvousError: if some are not within the time, or cannot be reached.
        """
        store, address = self._listen() if self.rank == 0 else self._connect()
        me = {"host": socket.gethostname(), "address": address, "own": self.own_address(address)}
        store.set(f"here/{self.rank}", json.dumps(me))
        self._wait_for_all(store)
        if self.rank == 0:
            self.file.unlink(missing_ok=True)
        self._choose_interface([json.loads(store.get(f"here/{rank}")) for rank in range(self.world_size)])
        return store

    def own_address(self, address: str) -> str:
        """The address of this machine on the way to another one; no packet is sent for it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                return address
            return str(probe.getsockname()[0])

    def _listen(self) -> tuple[Any, str]:
        from torch._C._distributed_c10d import TCPStore

        addresses = candidates(os.environ, self.known, self.interface)
        limit = timedelta(seconds=self.timeout_s)
        store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=limit, wait_for_workers=False)
        write_json(self.file, {"host": socket.gethostname(), "addresses": addresses, "port": store.port})
        return store, addresses[0] if addresses else "127.0.0.1"

    def _connect(self) -> tuple[Any, str]:
        from torch._C._distributed_c10d import TCPStore

        candidates(os.environ, self.known, self.interface)  # the interface must be there on every node
        give_up_s: float | None = None
        while True:
            place = self._read()
            give_up_s = give_up_s or time.monotonic() + CONNECT_PATIENCE_S
            failures = []
            for address in place["addresses"]:
                if address.startswith("127.") and place["host"] != socket.gethostname():
                    continue  # that would be somebody else
                try:
                    socket.create_connection((address, place["port"]), timeout=CONNECT_TIMEOUT_S).close()
                except OSError as error:
                    failures.append(f"{address}: {error}")
                    continue
                limit = timedelta(seconds=self.timeout_s)
                return TCPStore(address, place["port"], None, is_master=False, timeout=limit), address
            if time.monotonic() > min(give_up_s, self.deadline_s):
                raise RendezvousError(
                    f"rank {self.rank} on {socket.gethostname()} cannot reach rank 0 on {place['host']}, port "
                    f"{place['port']} ({'; '.join(failures) or 'it has no address but its own'}): does a firewall "
                    "stand between the nodes, or is another network to be used (site.interface=NAME)?"
                )
            time.sleep(POLL_S)  # and read again: the file may be of an earlier start

    def _read(self) -> dict[str, Any]:
        while True:
            try:
                os.listdir(self.file.parent)  # has NFS look again
                place = json.loads(self.file.read_text())
            except (OSError, ValueError):
                place = None
            if isinstance(place, dict):
                return place
            if time.monotonic() > self.deadline_s:
                raise RendezvousError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for rank 0, which left no word in {self.file}: it "
                    "never started (see its log), or this node does not see that folder"
                )
            time.sleep(POLL_S)

    def _wait_for_all(self, store: Any) -> None:
        """Rank 0, which has the store, decides when it has taken too long, and says who is missing."""
        waiting = [f"here/{rank}" for rank in range(self.world_size)]
        while True:
            try:
                waiting = [key for key in waiting if not store.check([key])]
                verdict = store.get("missing").decode() if self.rank and store.check(["missing"]) else ""
            except RuntimeError as error:
                raise RendezvousError(
                    f"rank {self.rank} lost rank 0 before all ranks were there: see its log"
                ) from error
            if not waiting:
                return
            late_s = time.monotonic() - self.deadline_s
            if self.rank == 0 and late_s > 0:
                who = ", ".join(key.removeprefix("here/") for key in waiting)
                verdict = (
                    f"of {self.world_size} ranks these did not come within {self.timeout_s:g} s: {who}. See their "
                    "logs, or raise site.start_timeout_s if they start slowly"
                )
                store.set("missing", verdict)
                time.sleep(LAST_WORDS_S)
            if verdict or late_s > self.timeout_s:
                raise RendezvousError(verdict or "rank 0 does not answer")
            time.sleep(POLL_S)

    def _choose_interface(self, ranks: list[dict[str, str]]) -> None:
        """Have the backends use the network on which the ranks have met; what the user set stays."""
        name = self.interface or chosen_interface(self.rank, ranks, self.known)
        for variable in SOCKET_INTERFACES if name else ():
            if variable.startswith("NCCL") and name == "lo":
                continue  # NCCL finds its way on one machine
            os.environ.setdefault(variable, str(name))


def chosen_interface(rank: int, ranks: list[dict[str, str]], known: Mapping[str, str]) -> str | None:
    """The interface on which a rank has met the others; None if it has no IPv4 address.

    Args:
        rank: whose.
        ranks: of each rank ``host``, the ``address`` of rank 0 it used, and its ``own`` address on the way there.
        known: the addresses of this machine's interfaces.
    """
    names = {address: name for name, address in known.items()}
    home = ranks[0]["host"]
    away = [entry for entry in ranks if entry["host"] != home]
    if not away:
        return "lo" if "lo" in known else None
    # On rank 0's node: the address that the other nodes have reached.
    address = away[0]["address"] if ranks[rank]["host"] == home else ranks[rank]["own"]
    return names.get(address)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))
    rank, world_size = int(query["rank"]), int(query["world_size"])
    limit_s, interface = float(query["timeout_s"]), query.get("interface")
    meeting = Meeting(Path(unquote(parts.path)), rank, world_size, limit_s, interface)
    yield meeting.store(), rank, world_size
    raise RuntimeError("the ranks of a job meet once")


@cache
def register() -> None:
    """Let torch.distributed know of the scheme; again does no harm."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(SCHEME, _rendezvous)
