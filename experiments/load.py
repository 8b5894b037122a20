"""How busy a machine was with other things while a run was timed: two runs at once say little of either.

What Linux counts in ``/proc`` is read before the first iteration and after the last one. Busy is what cores spent in
processes or were refused by the host of a virtual machine (``steal``); the kernel's interrupts are left out, because
the run's own messages cause most of them.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.records import RunRecord, now

logger = logging.getLogger(__name__)

FILE = "load.json"
"""In the record: one entry per start of the run that came to an end of its own."""
SHORTEST_S = 1.0
"""Of what can be judged: the kernel counts in hundredths of a second."""
LEAST_SHARE, SPARE_SHARE = 0.1, 0.5
UNKNOWN = {"host": "?", "cores": 1, "run_cores": None, "other_cores": None, "doubtful": False}
"""Of a host, where nothing is told."""
_PROC = Path("/proc")


@dataclass(frozen=True)
class Reading:
    """What a rank reads at one moment.

    Args:
        moment_s: by a clock that only goes forward.
        average: the load averages of 1, 5 and 15 minutes; empty where there are none.
        busy_s: of each core that this process may use, since the machine has started; empty where that is not told.
        own_s: seconds of processors that this process and its descendants have used.
    """

    moment_s: float
    average: tuple[float, ...]
    busy_s: Mapping[int, float]
    own_s: float


def read_load() -> Reading:
    """What the machine says now; takes some milliseconds."""
    average: tuple[float, ...] = ()
    with suppress(OSError):
        average = os.getloadavg()
    return Reading(time.monotonic(), average, _busy(), _own())


def part_of_rank(rank: int, before: Reading, after: Reading) -> dict[str, Any]:
    """What a rank says of the time between two readings."""
    busy = {core: after.busy_s[core] - seconds for core, seconds in before.busy_s.items() if core in after.busy_s}
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "cores": sorted(busy) or list(range(os.cpu_count() or 1)),
        "loadavg_start": list(before.average),
        "loadavg_end": list(after.average),
        "seconds": after.moment_s - before.moment_s,
        "own_s": after.own_s - before.own_s,
        "busy_s": busy,
    }


def of_hosts(parts: Sequence[Mapping[str, Any]], threads: int) -> list[dict[str, Any]]:
    """What the ranks' parts come to, per host.

    Args:
        parts: of all ranks (:func:`part_of_rank`).
        threads: of each rank.

    Returns:
        ``host``; ``cores`` that the run's ranks there may use; ``run_cores`` and ``other_cores``, how many of them they
        and other processes kept busy in the mean (None: not told); ``doubtful``, whether that leaves too little.
    """
    hosts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for part in parts:
        hosts[part["host"]].append(part)
    found = []
    for host, ranks in hosts.items():
        cores = len({core for part in ranks for core in part["cores"]})
        seconds = max(part["seconds"] for part in ranks)
        busy = {core: s for part in ranks for core, s in part["busy_s"].items()}
        facts: dict[str, Any] = {**UNKNOWN, "host": host, "cores": cores}
        if busy and seconds > 0:
            run = sum(part["own_s"] for part in ranks) / seconds
            facts |= {"run_cores": run, "other_cores": max(0.0, sum(busy.values()) / seconds - run)}
        judged = facts["other_cores"] is not None and seconds >= SHORTEST_S
        needed = min(cores, threads * len(ranks))
        found.append({**facts, "doubtful": judged and facts["other_cores"] > most_of_others(cores, needed)})
    return found


def most_of_others(cores: int, needed: int) -> float:
    """How many cores others may keep busy before that counts: half of those to spare, at least a tenth of all."""
    return max(LEAST_SHARE * cores, SPARE_SHARE * (cores - needed))


def note_load(record: RunRecord, parts: Sequence[Mapping[str, Any]], threads: int) -> None:
    """Add what all ranks say of one start of a run to its record."""
    ranks = [{**{k: v for k, v in part.items() if k != "busy_s"}, "cores": len(part["cores"])} for part in parts]
    entry = {"end": now(), "hosts": of_hosts(parts, threads), "ranks": ranks}
    record.write(FILE, [*_entries(record), entry])


def worst_load(record: RunRecord) -> dict[str, Any] | None:
    """The host that others kept busiest in any start of a run; None if that is not recorded."""
    hosts = [host for entry in _entries(record) for host in entry["hosts"] if host["other_cores"] is not None]
    return max(hosts, key=lambda host: (host["doubtful"], host["other_cores"] / host["cores"]), default=None)


def _entries(record: RunRecord) -> list[dict[str, Any]]:
    """Those that can be read: a file that is damaged ends no run."""
    try:
        entries = record.read(FILE) or []
        return [{**entry, "hosts": [{**UNKNOWN, **host} for host in entry["hosts"]]} for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s: the load is left out: %r", record.path / FILE, error)
        return []


def doubt(host: Mapping[str, Any] | None) -> str:
    """What to tell people of a host's load; empty if nothing."""
    if not host or not host["doubtful"]:
        return ""
    return (
        f"these times are doubtful: on {host['host']} other processes kept {host['other_cores']:.1f} of "
        f"{host['cores']} cores busy meanwhile, this run {host['run_cores']:.1f}. Times compare only where every run "
        "has had the machine to itself: end what else runs there, run sweeps one run at a time (site.parallel=1, "
        "site.array_parallelism=1, site.exclusive=true), and measure again (rerun=true)"
    )


def _busy() -> dict[int, float]:
    """proc(5): per core user, nice, system, idle, iowait, irq, softirq and steal, in ticks."""
    found = {}
    with suppress(OSError, ValueError, IndexError):
        mine, tick_s = os.sched_getaffinity(0), 1 / os.sysconf("SC_CLK_TCK")
        for line in (_PROC / "stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in mine:
                user, nice, system, *_ = map(int, ticks)
                found[int(name[3:])] = tick_s * (user + nice + system + int(ticks[7]))
    return found


def _own() -> float:
    """Of this process, its descendants, and those of them that have ended and were waited for."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    parents, ticks = {}, {}
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            values = entry.read_text().rpartition(")")[2].split()
            number = int(entry.parent.name)
            parents[number], ticks[number] = int(values[1]), sum(map(int, values[11:15]))
    ours = {os.getpid()}
    while grown := {number for number, parent in parents.items() if parent in ours} - ours:
        ours |= grown
    return tick_s * sum(ticks.get(number, 0) for number in ours)
