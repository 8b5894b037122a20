"""How Perfetto takes in a Chrome trace, as far as our traces use it: what is wrong with one, and what is seen of it.

A strict reading of the format and of the importer: version 52 lets some of what is an error here pass, and then draws
an arrow from or to a slice beside the one that is meant. Events are sorted by time and keep the file's order where that
is equal; a slice is open from its start to before its end; slices of a thread nest; a flow's beginning, and its end
with ``bp: e``, belongs to the innermost slice that is open on its thread, and a flow that ends must have begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass
class Import:
    """What has become of a trace."""

    errors: list[str] = field(default_factory=list)
    flows: list[tuple[Event, Event]] = field(default_factory=list)
    """The slices that each arrow leads from and to."""


def imported(events: Iterable[Event]) -> Import:
    """Take in a trace's events."""
    result = Import()
    open_slices: dict[Any, list[tuple[int, Event]]] = defaultdict(list)
    begun: dict[Any, Event] = {}
    threads: dict[int, int] = {}
    for event in sorted((e for e in events if e["ph"] != "M"), key=lambda e: _ns(e["ts"])):
        at, thread = _ns(event["ts"]), (event["pid"], event["tid"])
        if min(thread) < 1 or threads.setdefault(event["tid"], event["pid"]) != event["pid"]:
            result.errors.append(f"thread {thread} is not one of its own")
        stack = open_slices[thread]
        while stack and stack[-1][0] <= at:
            stack.pop()
        if event["ph"] == "X":
            end = at + _ns(event["dur"])
            if stack and end > stack[-1][0]:
                result.errors.append(f"{event['name']} overlaps {stack[-1][1]['name']}")
            stack.append((end, event))
            continue
        flow = event["cat"], event["name"], event["id"]
        if not stack:
            result.errors.append(f"flow {flow} outside of all slices")
        elif event["ph"] == "s":
            if flow in begun:
                result.errors.append(f"flow {flow} begins again")
            begun[flow] = stack[-1][1]
        elif event["ph"] != "f" or event.get("bp") != "e":
            result.errors.append(f"flow {flow}: the end binds to the next slice")
        elif flow not in begun:
            result.errors.append(f"flow {flow} ends before it begins")
        else:
            result.flows.append((begun[flow], stack[-1][1]))
    return result


def _ns(microseconds: float) -> int:
    return round(microseconds * 1e3)
