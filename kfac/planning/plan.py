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
from typing import Any, Literal

from kfac.planning.checks import keys_of, sequence, text, whole
from kfac.planning.costs import Size, packed_elements
from kfac.planning.plan_checks import check_message, check_order, check_owners
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
    """One fused sum over the ranks.

    Args:
        kind: what it carries.
        items: indices into :attr:`Plan.factors` for A and G, into :attr:`Plan.layers` for gradients, in packing order.
        elements: elements it carries.
        release: ``ready``: it leaves as soon as its last item is there and the messages before it have left;
            ``step``: it leaves when the backward pass has ended (in ``KFAC.step``).
        root: the rank that alone gets the sum, or None: every rank does.
    """

    kind: MessageKind
    items: tuple[int, ...]
    elements: int
    release: Release
    root: int | None = None

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors that it carries."""
        return () if self.kind == "gradient" else self.items


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank does in one iteration.

    Args:
        schedule: the switches it was made from.
        world_size: number of ranks.
        layers: names of the model's layers in execution order (the units of gradient messages).
        factors: all factors, ``A0 G0 A1 G1 ...`` over the layers that have them.
        messages: all sums over the ranks in the order in which they leave, the same on every rank.
        inverse_owner: per factor the rank that inverts it and broadcasts the inverse, or None: every rank inverts it.
        inverse_sequence: the order in which factors are inverted and broadcast. Every rank walks the whole sequence:
            it inverts what it owns or what every rank inverts, and takes part in every broadcast.
        inverse_messages: which inverses of one owner share a broadcast, which leaves when the last of them in the
            sequence is there; by default each travels alone.
        gradient_owner: per layer with factors the rank that alone holds both inverses, preconditions the layer's
            gradient and broadcasts the result, or None: every rank does. By default every rank does.
        gradient_messages: which of these results of one rank (indices of layers with factors) share a broadcast, in the
            order in which they leave; by default all of a rank's do.

    Raises:
        ValueError: if the factors are not pairs in the order of the layers, the messages do not carry every factor and
            layer exactly once, an owner is no rank, or a rank would lack what it needs.
    """

    schedule: ScheduleConfig
    world_size: int
    layers: tuple[str, ...]
    factors: tuple[FactorSpec, ...]
    messages: tuple[Message, ...]
    inverse_owner: tuple[int | None, ...]
    inverse_sequence: tuple[int, ...]
    inverse_messages: tuple[tuple[int, ...], ...] = ()
    gradient_owner: tuple[int | None, ...] = ()
    gradient_messages: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        whole("world_size", self.world_size, 1)
        if len({text("a layer name", name) for name in self.layers}) != len(self.layers):
            raise ValueError("layer names of a plan repeat")
        check_order(self.factors, self.layers)
        count = len(self.factors)
        for number, message in enumerate(self.messages):
            check_message(f"message {number}", message)
        carried = self.carried
        grads = [i for m in self.messages if m.kind == "gradient" for i in m.items]
        local = self.schedule.factor_collective == "none"
        if sorted(carried) != ([] if local else list(range(count))):
            raise ValueError(
                f"the messages of a plan must carry {'no factor' if local else 'every factor exactly once'}"
            )
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
        self._fill_in()
        check_owners(self)

    def _fill_in(self) -> None:
        """The defaults of what older plans have not."""
        if not self.gradient_owner:
            object.__setattr__(self, "gradient_owner", (None,) * (len(self.factors) // 2))
        if len(self.gradient_owner) != len(self.factors) // 2:
            raise ValueError("a plan needs a gradient owner, or none, for every layer with factors")
        if not self.inverse_messages:
            alone = tuple((i,) for i in self.inverse_sequence if self.travels(i))
            object.__setattr__(self, "inverse_messages", alone)
        if not self.gradient_messages:
            owned: dict[int, list[int]] = {}
            for k, owner in enumerate(self.gradient_owner):
                if owner is not None:
                    owned.setdefault(owner, []).append(k)
            object.__setattr__(self, "gradient_messages", tuple(tuple(layers) for layers in owned.values()))

    @property
    def carried(self) -> list[int]:
        """The factors whose sums over the ranks travel, in the order of the messages."""
        return [i for m in self.messages if m.kind != "gradient" for i in m.items]

    @property
    def summarised(self) -> bool:
        """Whether counts and traces travel in one message of their own, because not every rank has all sums in full."""
        rooted = any(message.root is not None for message in self.messages)
        switches = self.schedule
        special = rooted or switches.factor_collective == "none" or switches.message_dtype != "full"
        return special and self.world_size > 1 and bool(self.factors)

    @property
    def summary_elements(self) -> int:
        """Elements of that message."""
        return 2 * len(self.factors) if self.summarised else 0

    def travels(self, i: int) -> bool:
        """Whether the inverse of factor ``i`` is broadcast."""
        return self.inverse_owner[i] is not None and self.gradient_owner[i // 2] is None

    def broadcast_name(self, group: Sequence[int]) -> str:
        """What timelines call the broadcast of these inverses."""
        last = self.factors[group[-1]]
        if len(group) == 1:
            return f"inverse of {last.side} of {last.layer}"
        return f"{len(group)} inverses up to {last.side} of {last.layer}"

    def gradient_name(self, group: Sequence[int]) -> str:
        """What timelines call the broadcast of these layers' preconditioned gradients."""
        return f"{len(group)} preconditioned gradients of rank {self.gradient_owner[group[0]]}"

    @property
    def factor_holder(self) -> tuple[int | None, ...]:
        """Per factor the rank that alone has its running average, or None: every rank has it."""
        if self.world_size == 1:
            return (None,) * len(self.factors)
        root = dict.fromkeys(range(len(self.factors))) | {i: m.root for m in self.messages for i in m.factors}
        local = self.schedule.factor_collective == "none"
        return self.inverse_owner if local else tuple(root.values())

    def statistics_of(self, rank: int) -> tuple[int, ...]:
        """The layers with factors (indices) whose statistics ``rank`` computes: all, unless factors do not travel."""
        local = self.schedule.factor_collective == "none" and self.world_size > 1
        return tuple(k for k, owner in enumerate(self.gradient_owner) if owner == rank or not local)

    def solution_holder(self, i: int) -> int | None:
        """The rank that alone has the inverse of factor ``i``, or None: every rank has it."""
        return None if self.world_size == 1 else self.gradient_owner[i // 2]

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
        for key in ("layers", "factors", "messages", "inverse_owner", "inverse_sequence", "gradient_owner"):
            found[key] = sequence(key, found.get(key, ()))
        for key in ("inverse_messages", "gradient_messages"):
            found[key] = tuple(sequence(f"a group of {key}", group) for group in sequence(key, found.get(key, ())))
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
        owned = sum(owner is not None for owner in self.gradient_owner)
        said = (
            f"Plan {self.fingerprint} for {self.world_size} rank(s): {len(self.factors)} factors in {count('A')} A and "
            f"{count('G')} G messages, {count('gradient')} gradient messages; {everywhere} factors inverted on every "
            f"rank, {len(self.factors) - everywhere} on one"
        )
        return f"{said}; {owned} layers preconditioned on one rank" if owned else said


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
