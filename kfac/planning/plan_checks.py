"""What must hold within a Plan: whatever does not becomes a ValueError that names it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from kfac.planning.checks import whole

if TYPE_CHECKING:
    from kfac.planning.plan import FactorSpec, Message, Plan


def check_order(factors: Sequence[FactorSpec], layers: Sequence[str]) -> None:
    """Whether the factors are pairs in the order of the layers.

    Raises:
        ValueError: naming the first that is not.
    """
    covered = {factor.layer for factor in factors}
    expected = [(name, side) for name in layers if name in covered for side in ("A", "G")]
    for i, (factor, place) in enumerate(zip_longest(factors, expected)):
        found = factor and (factor.layer, factor.side)
        if found != place:
            raise ValueError(f"factors must be A0 G0 A1 G1 ... in the order of the layers: at {i} {found}, not {place}")
        for key in ("dim", "blocks"):
            whole(f"{key} of factor {factor.side} of layer {factor.layer!r}", getattr(factor, key), 1)


def check_message(what: str, message: Message) -> None:
    """Whether a message can be one.

    Raises:
        ValueError: naming the key that is wrong.
    """
    for key, choices in (("kind", ("A", "G", "gradient")), ("release", ("ready", "step"))):
        if getattr(message, key) not in choices:
            raise ValueError(f"{what}: {key} {getattr(message, key)!r} is not one of: {', '.join(choices)}")
    whole(f"{what}: elements", message.elements)
    if message.root is not None:
        whole(f"{what}: root", message.root)
    if not message.items:
        raise ValueError(f"{what} carries nothing")
    for i in message.items:
        whole(f"{what}: item", i)


def check_owners(plan: Plan) -> None:
    """Whether every rank has what it needs of factors, inverses and gradients.

    Raises:
        ValueError: naming the factor or layer of which it has not.
    """

    def name(i: int) -> str:
        return f"{plan.factors[i].side} of layer {plan.factors[i].layer!r}"

    for message in plan.messages:
        if message.root is not None:
            if plan.schedule.inverse_start == "as_ready":
                raise ValueError(
                    "inversions start as sums arrive (inverse_start=as_ready) only where no message has a root"
                )
            if message.kind == "gradient":
                raise ValueError("a gradient message has no root: every rank needs all gradients")
            wrong = [i for i in message.items if plan.inverse_owner[i] != message.root]
            if wrong:
                raise ValueError(
                    f"{name(wrong[0])} is reduced to rank {message.root}, which is not the one to invert it"
                )
    for k, owner in enumerate(plan.gradient_owner):
        if owner is not None and plan.inverse_owner[2 * k : 2 * k + 2] != (owner, owner):
            raise ValueError(f"rank {owner} preconditions layer {plan.factors[2 * k].layer!r}, but lacks its inverses")
    local = plan.schedule.factor_collective == "none" and plan.world_size > 1
    if local and None in plan.gradient_owner:
        layer = plan.factors[2 * plan.gradient_owner.index(None)].layer
        raise ValueError(f"factors that do not travel need one rank that preconditions layer {layer!r}")
    sent = [i for i in range(len(plan.factors)) if plan.travels(i)]
    owned = [k for k, owner in enumerate(plan.gradient_owner) if owner is not None]
    for what, groups, of, owners in (
        ("inverse", plan.inverse_messages, sent, plan.inverse_owner),
        ("gradient", plan.gradient_messages, owned, plan.gradient_owner),
    ):
        if sorted(whole(f"an item of {what}_messages", i) for group in groups for i in group) != of:
            raise ValueError(f"{what}_messages must hold every owned {what} that travels exactly once")
        if any(len({owners[i] for i in group}) != 1 for group in groups):
            raise ValueError(f"a group of {what}_messages has one owner")
