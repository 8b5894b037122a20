"""Timelines as Chakra execution traces, for other simulators (ASTRA-sim and those that read the same).

Written after MLCommons Chakra's ``et_def.proto`` as of schema version 0.0.4 (package ``ChakraProtoMsg``, in
github.com/mlcommons/chakra ``schema/protobuf/et_def.proto``): one file ``PREFIX.RANK.et`` per rank, a
``GlobalMetadata`` message and then one ``Node`` message per span, each after its length as a varint. Protobuf's wire
format needs so little here that it is written directly, without a library.

On a rank, spans of one lane follow each other. Across the lanes simulated timelines know who waits for whom
(:attr:`~kfac.timeline.Timeline.flows`). Measured ones know when spans ran, and not all that they waited for; there the
dependencies follow from what the engine does:

* a message leaves after the last span of computing that ended before it started;
* inverting waits for the sums (``FactorComm`` and ``GradComm``) that had arrived by then, preconditioning for every
  message that had: a step awaits them all, whether or not it had to.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path

from kfac.planning import Plan
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, Span, Timeline

VERSION = "0.0.4"
"""The schema's version, as its own generator writes it."""

# Numbers of fields, types and collectives in the schema.
_NODE = {"id": 1, "name": 2, "type": 3, "data_deps": 5, "start_time_micros": 6, "duration_micros": 7, "attr": 10}
_ATTRIBUTE = {"name": 1, "int64_val": 9, "bool_val": 27, "string_val": 29}
_METADATA = {"version": 1, "attr": 2}
COMP_NODE, COMM_COLL_NODE = 4, 7
ALL_REDUCE, REDUCE, BROADCAST = 0, 1, 5
BYTES_PER_ELEMENT = 4
"""Messages carry single precision, but for factors where the schedule halves it."""

_VARINT, _BYTES = 0, 2
Attribute = bool | int | str


@dataclass(frozen=True)
class Node:
    """One node of an execution trace.

    Args:
        id: unique on its rank.
        name: of the span.
        type: :data:`COMP_NODE` or :data:`COMM_COLL_NODE`.
        data_deps: ids of the nodes that must have ended.
        start_us, duration_us: whole microseconds, as the schema has them; both ends are rounded, so that they add up.
        attributes: by name.
    """

    id: int
    name: str
    type: int
    data_deps: tuple[int, ...]
    start_us: int
    duration_us: int
    attributes: Mapping[str, Attribute] = field(hash=False)


@dataclass(frozen=True)
class Carried:
    """What a message is.

    Args:
        collective: :data:`ALL_REDUCE`, :data:`REDUCE` or :data:`BROADCAST`.
        bytes: that it carries, where the plan says so.
    """

    collective: int
    bytes: int | None = None


def carried(plan: Plan) -> dict[str, Carried]:
    """What the messages of a plan are, by the names that timelines give them."""
    found = {}
    for number, message in enumerate(plan.messages):
        half = message.kind != "gradient" and plan.schedule.message_dtype == "bfloat16"
        size = message.elements * (BYTES_PER_ELEMENT // 2 if half else BYTES_PER_ELEMENT)
        name = f"{message.kind} message {number} ({len(message.items)} items)"
        found[name] = Carried(ALL_REDUCE if message.root is None else REDUCE, size)
    for group in plan.inverse_messages:
        size = sum(plan.factors[i].elements for i in group) * BYTES_PER_ELEMENT
        found[plan.broadcast_name(group)] = Carried(BROADCAST, size)
    for group in plan.gradient_messages:
        found[plan.gradient_name(group)] = Carried(BROADCAST)
    return found


def rank_nodes(timeline: Timeline, rank: int, messages: Mapping[str, Carried]) -> list[Node]:
    """The nodes of one rank in the order of their starts.

    Args:
        timeline: of one iteration.
        rank: one that appears in it.
        messages: what they are (:func:`carried`); those that are not there are broadcasts where they are InverseComm,
            else all-reduces, and get no ``comm_size``: a simulator can replay their durations, not work them out.
    """
    known = timeline.source == "simulated" and bool(timeline.flows)
    flows = _flows_of(timeline, rank) if known else {}
    order = _in_order(timeline, rank, flows)
    number_of = {i: number for number, i in enumerate(order)}
    ended = {cause: _Ended() for cause in (COMPUTE_LANE, COMMUNICATION_LANE, _SUMS)}
    before: dict[str, int] = {}
    nodes: list[Node] = []
    for number, i in enumerate(order):
        span = timeline.spans[i]
        moving = span.lane == COMMUNICATION_LANE
        awaited = COMPUTE_LANE if moving else _AWAITED.get(span.kind)
        guess = [ended[awaited].last(span.start_s) if awaited else None]
        causes = (before.get(span.lane), *(map(number_of.get, flows.get(i, ())) if known else guess))
        waits = tuple(sorted({cause for cause in causes if cause is not None}))
        before[span.lane] = number
        ended[span.lane].add(span.end_s, number)
        if span.kind in ("GradComm", "FactorComm"):
            ended[_SUMS].add(span.end_s, number)
        start, end = round(1e6 * span.start_s), round(1e6 * span.end_s)
        kind = COMM_COLL_NODE if moving else COMP_NODE
        nodes.append(Node(number, span.name, kind, waits, start, end - start, _attributes(span, messages)))
    return nodes


def _block(timeline: Timeline, rank: int) -> range:
    """The numbers of a rank's spans: they stand together, lane by lane."""
    return range(*(bisect_left(timeline.spans, r, key=lambda span: span.rank) for r in (rank, rank + 1)))


def _flows_of(timeline: Timeline, rank: int) -> dict[int, list[int]]:
    """By span those of its rank that it has waited for."""
    mine = _block(timeline, rank)
    found: dict[int, list[int]] = defaultdict(list)
    for a, b in timeline.flows[slice(*(bisect_left(timeline.flows, (i, 0)) for i in (mine.start, mine.stop)))]:
        if b in mine:
            found[b].append(a)
    return found


def _in_order(timeline: Timeline, rank: int, flows: Mapping[int, Iterable[int]]) -> list[int]:
    """The rank's spans by start and end, each behind all that it waits for, also where nothing lasts."""
    spans, mine = timeline.spans, _block(timeline, rank)
    waits = {i: set(flows.get(i, ())) for i in mine}
    for before, i in pairwise(mine):
        if spans[before].lane == spans[i].lane:
            waits[i].add(before)
    left = {i: len(of) for i, of in waits.items()}
    behind: dict[int, list[int]] = defaultdict(list)
    for i, of in waits.items():
        for before in of:
            behind[before].append(i)
    ready = [(spans[i].start_s, spans[i].end_s, i) for i in mine if not left[i]]
    heapify(ready)
    order = []
    while ready:
        order.append(heappop(ready)[2])
        for i in behind[order[-1]]:
            left[i] -= 1
            if not left[i]:
                heappush(ready, (spans[i].start_s, spans[i].end_s, i))
    return order


_SUMS = "sums"
_AWAITED = {"InverseComp": _SUMS, "Precondition": COMMUNICATION_LANE}
"""What computing of a kind waits for, beside the computing before it."""


class _Ended:
    """Spans of one lane in the order of their ends."""

    def __init__(self) -> None:
        self._ends_s: list[float] = []
        self._numbers: list[int] = []

    def add(self, end_s: float, number: int) -> None:
        self._ends_s.append(end_s)
        self._numbers.append(number)

    def last(self, moment_s: float) -> int | None:
        """The last that had ended by then."""
        place = bisect_right(self._ends_s, moment_s)
        return self._numbers[place - 1] if place else None


def _attributes(span: Span, messages: Mapping[str, Carried]) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {"is_cpu_op": False}  # ASTRA-sim lets nothing on the CPU take part in collectives
    if span.lane == COMMUNICATION_LANE:
        guess = Carried(BROADCAST if span.kind == "InverseComm" else ALL_REDUCE)
        message = messages.get(span.name, guess)
        found["comm_type"] = message.collective
        if message.bytes is not None:
            found["comm_size"] = message.bytes
    found["kind"] = span.kind
    return found


def write_chakra(timeline: Timeline, prefix: Path, messages: Mapping[str, Carried] | None = None) -> list[Path]:
    """Write ``PREFIX.RANK.et`` for every rank, also for those that another one stands for.

    Raises:
        ValueError: for a timeline without spans.
    """
    if not timeline.spans:
        raise ValueError("a timeline without spans gives no execution trace")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    texts = {rank: encode(rank_nodes(timeline, rank, messages or {})) for rank in timeline.ranks}
    written = []
    for rank, like in sorted(_models(timeline).items()):
        path = prefix.with_name(f"{prefix.name}.{rank}.et")
        path.write_bytes(texts[like])
        written.append(path)
    return written


def _models(timeline: Timeline) -> dict[int, int]:
    """For every rank the one in the timeline that it does the same as."""
    models = {rank: rank for rank in timeline.ranks}
    more = [r for r in timeline.ranks for _ in range(timeline.rank_counts.get(r, 1) - 1)]
    free = (n for n in range(len(models) + len(more) + max(models)) if n not in timeline.ranks)
    return {**models, **dict(zip(free, more, strict=False))}


def encode(nodes: Iterable[Node]) -> bytes:
    """The content of a file."""
    metadata = _text(_METADATA["version"], VERSION)
    return b"".join(_delimited(message) for message in (metadata, *map(_node, nodes)))


def _node(node: Node) -> bytes:
    return b"".join(
        (
            _number(_NODE["id"], node.id) if node.id else b"",  # proto3 leaves out what is zero
            _text(_NODE["name"], node.name),
            _number(_NODE["type"], node.type),
            # Repeated numbers are packed into one field.
            _field(_NODE["data_deps"], b"".join(map(_varint, node.data_deps))) if node.data_deps else b"",
            _number(_NODE["start_time_micros"], node.start_us) if node.start_us else b"",
            _number(_NODE["duration_micros"], node.duration_us) if node.duration_us else b"",
            *(_field(_NODE["attr"], attribute) for attribute in _encoded(node.attributes)),
        )
    )


def _encoded(attributes: Mapping[str, Attribute]) -> Iterator[bytes]:
    for name, value in attributes.items():
        if isinstance(value, bool):
            content = _number(_ATTRIBUTE["bool_val"], int(value))
        elif isinstance(value, int):
            content = _number(_ATTRIBUTE["int64_val"], value)
        else:
            content = _text(_ATTRIBUTE["string_val"], value)
        yield _text(_ATTRIBUTE["name"], name) + content


def _varint(value: int) -> bytes:
    """Base 128, the least significant group first, the top bit of a byte says that another follows."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _delimited(content)


def _delimited(content: bytes) -> bytes:
    return _varint(len(content)) + content
