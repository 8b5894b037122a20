"""The Plan: a value that says who sends, inverts and broadcasts what, and in which order.

The engine (:mod:`kfac.preconditioner`) executes a Plan on real ranks, the simulator (:mod:`kfac.simulation`) on cost
models. Every rank holds the same Plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kfac.planning.schedule_config import ScheduleConfig

MessageKind = Literal["A", "G", "gradient"]
Release = Literal["ready", "step"]


@dataclass(frozen=True)
class FactorSpec:
    """One Kronecker factor: a symmetric ``dim x dim`` matrix of a layer's A (inputs) or G (outputs) side."""

    layer: str
    side: Literal["A", "G"]
    dim: int

    @property
    def elements(self) -> int:
        """Elements of the packed triangle that travels: ``dim (dim + 1) / 2``."""
        return self.dim * (self.dim + 1) // 2


@dataclass(frozen=True)
class Message:
    """One fused all-reduce.

    Args:
        kind: what it carries.
        items: indices into :attr:`Plan.factors` for A and G, into :attr:`Plan.layers` for gradients, in packing order.
        elements: elements it carries.
        release: ``ready``: it leaves as soon as its last item is there and the messages before it have left;
            ``step``: it leaves when the backward pass has ended (in ``KFAC.step``).
    """

    kind: MessageKind
    items: tuple[int, ...]
    elements: int
    release: Release


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank does in one iteration.

    Args:
        schedule: the switches it was made from.
        world_size: number of ranks.
        layers: names of the model's layers in execution order (the units of gradient messages).
        factors: all factors, ``A0 G0 A1 G1 ...`` over the layers that have them.
        messages: all all-reduces in the order in which they leave, the same on every rank.
        inverse_owner: per factor the rank that inverts it and broadcasts the inverse, or None: every rank inverts it.
        inverse_sequence: the order in which factors are inverted and broadcast. Every rank walks the whole sequence:
            it inverts what it owns or what every rank inverts, and takes part in every broadcast.

    Raises:
        ValueError: if the messages do not carry every factor and layer exactly once, or an owner is no rank.
    """

    schedule: ScheduleConfig
    world_size: int
    layers: tuple[str, ...]
    factors: tuple[FactorSpec, ...]
    messages: tuple[Message, ...]
    inverse_owner: tuple[int | None, ...]
    inverse_sequence: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.factors)
        carried = [i for m in self.messages if m.kind != "gradient" for i in m.items]
        grads = [i for m in self.messages if m.kind == "gradient" for i in m.items]
        if sorted(carried) != list(range(count)):
            raise ValueError("the messages of a plan must carry every factor exactly once")
        if sorted(grads) != list(range(len(self.layers))):
            raise ValueError("the messages of a plan must carry every layer's gradient exactly once")
        for message in self.messages:
            if message.kind != "gradient" and any(self.factors[i].side != message.kind for i in message.items):
                raise ValueError("a message carries factors of one side only")
        if len(self.inverse_owner) != count or sorted(self.inverse_sequence) != list(range(count)):
            raise ValueError("a plan needs an owner and one place in the inverse sequence for every factor")
        if any(owner is not None and not 0 <= owner < self.world_size for owner in self.inverse_owner):
            raise ValueError(f"an inverse owner is not a rank below {self.world_size}")

    def inverted_by(self, rank: int) -> tuple[int, ...]:
        """Factors that ``rank`` inverts, in its order."""
        return tuple(i for i in self.inverse_sequence if self.inverse_owner[i] in (None, rank))

    @property
    def fingerprint(self) -> str:
        """First 12 hex digits of the SHA-256 of the JSON form: equal plans have equal fingerprints."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "schedule": self.schedule.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The value of a JSON form."""
        return cls(
            schedule=ScheduleConfig.from_dict(data["schedule"]),
            world_size=data["world_size"],
            layers=tuple(data["layers"]),
            factors=tuple(FactorSpec(**f) for f in data["factors"]),
            messages=tuple(Message(**{**m, "items": tuple(m["items"])}) for m in data["messages"]),
            inverse_owner=tuple(data["inverse_owner"]),
            inverse_sequence=tuple(data["inverse_sequence"]),
        )

    def __str__(self) -> str:
        def count(kind: str) -> int:
            return sum(m.kind == kind for m in self.messages)

        everywhere = sum(owner is None for owner in self.inverse_owner)
        return (
            f"Plan {self.fingerprint} for {self.world_size} rank(s): {len(self.factors)} factors in {count('A')} A and "
            f"{count('G')} G messages, {count('gradient')} gradient messages; {everywhere} factors inverted on every "
            f"rank, {len(self.factors) - everywhere} on one"
        )
