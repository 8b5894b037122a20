"""The Plan: a value that says who sends, inverts and broadcasts what, and in which order.

The engine (:mod:`kfac.preconditioner`) executes a Plan on real ranks, the simulator (:mod:`kfac.simulation`) on cost
models. Every rank holds the same Plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal, get_args

from kfac.planning.checks import keys_of, sequence, text, whole
from kfac.planning.costs import Size, packed_elements
from kfac.planning.profiles import LayerProfile, ModelProfile
from kfac.planning.schedule_config import ScheduleConfig

MessageKind = Literal["A", "G", "gradient"]
Release = Literal["ready", "step"]


@dataclass(frozen=True)
class FactorSpec:
    """One Kronecker factor of a layer's A (inputs) or G (outputs) side: ``blocks`` symmetric ``dim x dim`` matrices on
    the diagonal, mostly one.
    """

    layer: str
    side: Literal["A", "G"]
    dim: int
    blocks: int = 1

    @property
    def elements(self) -> int:
        """Elements of the packed triangles that travel: ``blocks dim (dim + 1) / 2``."""
        return packed_elements(self.size)

    @property
    def size(self) -> Size:
        """As placements take it."""
        return self.dim if self.blocks == 1 else (self.blocks, self.dim)


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
        ValueError: if the factors are not pairs in the order of the layers, the messages do not carry every factor and
            layer exactly once, or an owner is no rank.
    """

    schedule: ScheduleConfig
    world_size: int
    layers: tuple[str, ...]
    factors: tuple[FactorSpec, ...]
    messages: tuple[Message, ...]
    inverse_owner: tuple[int | None, ...]
    inverse_sequence: tuple[int, ...]

    def __post_init__(self) -> None:
        whole("world_size", self.world_size, 1)
        if len({text("a layer name", name) for name in self.layers}) != len(self.layers):
            raise ValueError("layer names of a plan repeat")
        _check_order(self.factors, self.layers)
        count = len(self.factors)
        for number, message in enumerate(self.messages):
            _check_message(f"message {number}", message)
        carried = [i for m in self.messages if m.kind != "gradient" for i in m.items]
        grads = [i for m in self.messages if m.kind == "gradient" for i in m.items]
        if sorted(carried) != list(range(count)):
            raise ValueError("the messages of a plan must carry every factor exactly once")
        if sorted(grads) != list(range(len(self.layers))):
            raise ValueError("the messages of a plan must carry every layer's gradient exactly once")
        for message in self.messages:
            if message.kind == "gradient":
                continue
            if any(self.factors[i].side != message.kind for i in message.items):
                raise ValueError("a message carries factors of one side only")
            elements = sum(self.factors[i].elements for i in message.items)
            if message.elements != elements:
                raise ValueError(f"a message has {message.elements} elements, but its factors have {elements}")
        for i in self.inverse_sequence:
            whole("a place in the inverse sequence", i)
        if len(self.inverse_owner) != count or sorted(self.inverse_sequence) != list(range(count)):
            raise ValueError("a plan needs an owner and one place in the inverse sequence for every factor")
        if any(owner is not None and not whole("an owner", owner) < self.world_size for owner in self.inverse_owner):
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
        """The value of a JSON form.

        Raises:
            ValueError: for missing, unknown or wrongly typed keys, naming them.
        """
        found = keys_of(cls, "plan", data)
        found["schedule"] = ScheduleConfig.from_dict(found["schedule"])
        for key in ("layers", "factors", "messages", "inverse_owner", "inverse_sequence"):
            found[key] = sequence(key, found[key])
        found["factors"] = tuple(
            FactorSpec(**keys_of(FactorSpec, f"factor {i}", factor)) for i, factor in enumerate(found["factors"])
        )
        messages = [keys_of(Message, f"message {i}", message) for i, message in enumerate(found["messages"])]
        found["messages"] = tuple(Message(**{**m, "items": sequence("items", m["items"])}) for m in messages)
        return cls(**found)

    def check_model(self, model: ModelProfile) -> None:
        """Refuse a model that this plan is not for.

        Raises:
            ValueError: naming the first layer, factor or gradient message that differs.
        """

        def compare(what: str, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
            for k, (a, b) in enumerate(zip_longest(mine, theirs)):
                if a != b:
                    raise ValueError(
                        f"the plan is not for model {model.name!r}: {what} {k} is {_named(a)} in the plan, "
                        f"{_named(b)} in the model"
                    )

        compare("layer", self.layers, [layer.name for layer in model.layers])
        compare("factor", self.factors, factors_of(model.layers) if self.schedule.curvature else ())
        for number, message in enumerate(self.messages):
            if message.kind == "gradient":
                elements = sum(model.layers[i].gradient_elements for i in message.items)
                if message.elements != elements:
                    raise ValueError(
                        f"the plan is not for model {model.name!r}: gradient message {number} has {message.elements} "
                        f"elements in the plan, {elements} in the model"
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


def factors_of(layers: Iterable[LayerProfile]) -> tuple[FactorSpec, ...]:
    """The factors of layers, ``A0 G0 A1 G1 ...`` over those that have them."""
    return tuple(
        factor
        for layer in layers
        if layer.has_factors
        for factor in (
            FactorSpec(layer.name, "A", layer.a_dim, layer.a_blocks),
            FactorSpec(layer.name, "G", layer.g_dim, layer.g_blocks),
        )
    )


def _named(item: str | FactorSpec | None) -> str:
    if isinstance(item, FactorSpec):
        times = "" if item.blocks == 1 else f"{item.blocks} x "
        return f"{item.side} of layer {item.layer!r} with dimension {times}{item.dim}"
    return "missing" if item is None else repr(item)


def _check_order(factors: Sequence[FactorSpec], layers: Sequence[str]) -> None:
    covered = {factor.layer for factor in factors}
    expected = [(name, side) for name in layers if name in covered for side in ("A", "G")]
    for i, (factor, place) in enumerate(zip_longest(factors, expected)):
        found = factor and (factor.layer, factor.side)
        if found != place:
            raise ValueError(f"factors must be A0 G0 A1 G1 ... in the order of the layers: at {i} {found}, not {place}")
        for key in ("dim", "blocks"):
            whole(f"{key} of factor {factor.side} of layer {factor.layer!r}", getattr(factor, key), 1)


def _check_message(what: str, message: Message) -> None:
    for key, choices in (("kind", MessageKind), ("release", Release)):
        if getattr(message, key) not in get_args(choices):
            raise ValueError(f"{what}: {key} {getattr(message, key)!r} is not one of: {', '.join(get_args(choices))}")
    whole(f"{what}: elements", message.elements)
    if not message.items:
        raise ValueError(f"{what} carries nothing")
    for i in message.items:
        whole(f"{what}: item", i)
