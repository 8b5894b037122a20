"""T14: a race finder. Whatever the order in which messages arrive and hooks are called, the result is the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any, get_args

import pytest
import torch

from kfac.planning.plan import Message, MessageKind, Plan
from tests.kfac.recipes.cells import SAMPLES, SCHEDULES, Run, WithSwappedOwners, WithWrongRoots
from tests.kfac.recipes.delays import Deadlock, World
from tests.kfac.test_other_sums import local_reference

RACE = {"factor_interval": 1, "inverse_interval": 1, "exclude": ("conv", "norm")}
"""Statistics and inverses in both of two steps, of which the second is pipelined."""
EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
LAYERS = ("left", "right", "head")
LOCAL_SAMPLES = 12
"""For all ranks alike: DP-KFAC depends on who has which."""


@functools.cache
def one_process() -> tuple[Plan, list[int], torch.Tensor]:
    """The plan of one process, the layers' gradient elements, and the parameters after two steps."""
    run = Run(0, 1, "spdkfac", **RACE).steps(2)
    return run.kfac.plan, [size.gradient_elements for size in run.kfac.layer_sizes], run.parameters()


def test_the_truth_is_the_sequential_reference():
    assert (
        one_process()[2] - local_reference(dict.fromkeys(LAYERS, 0), 1, 2, SAMPLES, **EVERY_STEP)
    ).abs().max() <= 1e-12


@functools.cache
def rounded(world_size: int) -> torch.Tensor:
    """The parameters where sums travel in bfloat16, one by one after the backward pass."""
    schedule = {"name": "mpdkfac", "message_dtype": "bfloat16"}
    return World(world_size, 0).run(lambda rank, c: Run(rank, world_size, schedule, c, **RACE).steps(2).parameters())[0]


def truth(plan: Plan) -> torch.Tensor:
    """The parameters that a plan must come to."""
    if plan.schedule.factor_collective == "none":
        owner = {plan.factors[2 * k].layer: rank for k, rank in enumerate(plan.gradient_owner)}
        return local_reference(owner, plan.world_size, 2, LOCAL_SAMPLES, **EVERY_STEP)
    return one_process()[2] if plan.schedule.message_dtype == "full" else rounded(plan.world_size)


def divided(draw: random.Random, items: list[int]) -> list[tuple[int, ...]]:
    """The items in any groups, in any order."""
    if draw.random() < 0.5:
        draw.shuffle(items)
    cuts = [0, *(k for k in range(1, len(items)) if draw.random() < 0.5), len(items)]
    return [tuple(items[low:high]) for low, high in itertools.pairwise(cuts) if low < high]


def by_owner(owners: list[int | None], items: Iterable[int]) -> list[list[int]]:
    """The items of each owner; those without one come first."""
    items = list(items)
    return [[i for i in items if owners[i] == rank] for rank in (None, *range(10))]


def random_plan(draw: random.Random, world_size: int, sums: str = "any") -> Plan:
    """Any fusion, order, root and release of the messages, any owners, groups and order of the inversions, any layers
    that one rank preconditions.

    ``sums``: ``owned``, every inverse has an owner, and every sum goes to it alone; ``bfloat16``, rounded; ``early``,
    every rank gets them, and inversions begin as they arrive; ``local``, statistics do not travel.
    """
    plan, gradients, _ = one_process()
    factors, layers = range(len(plan.factors)), range(len(plan.factors) // 2)
    ranks = [*range(world_size), *([] if sums in ("owned", "local") else [None])]
    owner = [draw.choice(ranks) for _ in factors]
    kept = (lambda rank: rank) if sums == "local" else (lambda rank: draw.choice((None, None, rank)))
    gradient_owner = [kept(rank) for rank in draw.choices(ranks, k=len(layers))]
    for k, rank in enumerate(gradient_owner):
        if rank is not None:
            owner[2 * k] = owner[2 * k + 1] = rank
    likely = {"owned": 1.0, "early": 0.0}.get(sums, draw.choice((0.0, 0.6, 0.6)))
    roots = [rank if draw.random() < likely else None for rank in owner]
    messages: list[Message] = []
    for kind in ("gradient",) if sums == "local" else get_args(MessageKind):
        items = [i for message in plan.messages if message.kind == kind for i in message.items]
        root_of = [None] * len(plan.layers) if kind == "gradient" else roots
        for root, family in zip((None, *range(10)), by_owner(root_of, items), strict=True):
            for own in divided(draw, family):
                elements = sum(gradients[i] if kind == "gradient" else plan.factors[i].elements for i in own)
                messages.append(Message(kind, own, elements, draw.choice(("ready", "ready", "step")), root))
    if draw.random() < 0.5:
        draw.shuffle(messages)
    sent = [rank if gradient_owner[i // 2] is None else None for i, rank in enumerate(owner)]
    inverses = [group for family in by_owner(sent, factors)[1:] for group in divided(draw, family)]
    results = [group for family in by_owner(gradient_owner, layers)[1:] for group in divided(draw, family)]
    switches = {
        "local": {"factor_collective": "none", "placement": "optimized", "gradient_worker_fraction": 0.0},
        "bfloat16": {"message_dtype": "bfloat16"},
        "early": {"inverse_start": "as_ready"},
    }.get(sums, {})
    broadcast = draw.choice(("after_all", "as_ready"))
    if sums == "any" and all(message.root is None for message in messages):
        switches = {"inverse_start": draw.choice(("after_all", "as_ready"))}
    return dataclasses.replace(
        plan,
        schedule=dataclasses.replace(plan.schedule, inverse_broadcast=broadcast, **switches),
        world_size=world_size,
        messages=tuple(messages),
        inverse_owner=tuple(owner),
        inverse_sequence=tuple(draw.sample(factors, len(factors))),
        inverse_messages=tuple(inverses),
        gradient_owner=tuple(gradient_owner),
        gradient_messages=tuple(draw.sample(results, len(results))),
    )


def race(
    seed: int,
    schedule: Any = None,
    *,
    sums: str = "any",
    skipped: str | None = None,
    wrapper: Callable[[Any], Any] = lambda communicator: communicator,
) -> float:
    """How far the parameters of the ranks are from the truth; ranks, delays, the order of the branches, and the plan
    where no schedule is given, are drawn.

    Raises:
        AssertionError: if two ranks differ at all.
    """
    draw = random.Random(seed)
    world_size = draw.choice((2, 2, 3, 4))
    schedule = schedule or random_plan(draw, world_size, sums)
    crossed = [draw.random() < 0.5 for _ in range(2 * world_size)]
    samples = LOCAL_SAMPLES if sums == "local" else SAMPLES

    def train(rank, communicator):
        run = Run(rank, world_size, schedule, wrapper(communicator), samples=samples, **RACE)
        for step in range(2):
            run.model.right_first = crossed[2 * rank + step]
            run.steps(1)
        return run.parameters(), run.kfac.plan

    (first, plan), *others = World(world_size, seed, skipped=skipped).run(train)
    assert all(torch.equal(parameters, first) for parameters, _ in others), "ranks differ"
    return (first - truth(plan)).abs().max().item()


def test_late_and_reordered_messages_change_nothing():
    for seed in range(200):
        assert race(seed) <= 1e-12, f"seed {seed}"


@pytest.mark.parametrize(
    ("sums", "tolerance"), [("owned", 1e-12), ("early", 1e-12), ("bfloat16", 0.0), ("local", 1e-12)]
)
def test_nor_where_sums_are_reduced_used_early_rounded_or_do_not_travel(sums, tolerance):
    """Rounded sums are the same to the last bit whatever the fusion: the ranks are added in one order."""
    for seed in range(40):
        assert race(seed, sums=sums) <= tolerance, f"seed {seed}"


def test_nor_under_any_schedule_that_is_planned():
    """Fusion with gradients' messages, planned broadcasts, gradient worker fractions as the planner makes them."""
    for seed, (name, schedule) in enumerate(SCHEDULES.items()):
        assert race(seed, schedule) <= 1e-12, f"{name}, seed {seed}"
    for seed in range(5):
        assert race(seed, "dp_kfac", sums="local") <= 1e-12, f"seed {seed}"


def fails(seed: int, **broken: Any) -> bool:
    try:
        return not race(seed, **broken) <= 1e-12
    except (AssertionError, RuntimeError):
        return True


@pytest.mark.parametrize(
    "broken",
    [{"skipped": ""}, {"wrapper": WithSwappedOwners, "sums": "owned"}, {"wrapper": WithWrongRoots, "sums": "owned"}],
    ids=["no waiting", "swapped owners", "wrong roots"],
)
def test_control_every_seed_finds_what_is_broken(broken):
    assert all(fails(seed, **broken) for seed in range(10))


@pytest.mark.parametrize("kind", ["FactorComm", "GradComm", "InverseComm"])
@pytest.mark.parametrize("sums", ["any", "early", "bfloat16"])
def test_control_a_runtime_that_does_not_wait_for_one_kind_of_message_is_found(sums, kind):
    """Not by every seed: what has arrived by chance was not missed."""
    assert sum(fails(seed, sums=sums, skipped=kind) for seed in range(10)) >= 7


def test_control_statistics_of_other_ranks_are_found():
    wrong = local_reference(dict.fromkeys(LAYERS, 0), 2, 2, LOCAL_SAMPLES, **EVERY_STEP)
    other = local_reference(dict.fromkeys(LAYERS, 1), 2, 2, LOCAL_SAMPLES, **EVERY_STEP)
    assert (wrong - other).abs().max() > 1e-4
    assert (rounded(2) - one_process()[2]).abs().max() > 1e-6, "nor is what is rounded exact"


def test_control_the_order_of_the_hooks_differs():
    orders = []
    for right_first in (False, True):
        run, order = Run(0, 1, "spdkfac", **RACE), []
        run.model.right_first = right_first
        for name in ("left", "right"):
            getattr(run.model, name).register_full_backward_hook(lambda *_, name=name, order=order: order.append(name))
        run.steps(1)
        orders.append(order)
    assert orders == [["right", "left"], ["left", "right"]]


def test_control_collectives_in_another_order_are_noticed():
    def disordered(rank, communicator):
        works = [communicator.all_reduce(torch.ones(size), "kfac_FactorComm") for size in ((3, 5), (5, 3))[rank]]
        for work in works:
            work.wait()

    with pytest.raises(AssertionError, match="another rank"):
        World(2, 0).run(disordered)
    with pytest.raises(Deadlock):
        World(2, 0).run(lambda rank, communicator: communicator.barrier() if rank == 0 else None)
