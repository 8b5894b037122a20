"""T14: a schedule changes when things happen, never the result; whatever the order in which messages arrive."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable
from typing import get_args

import pytest
import torch

from kfac.planning.plan import Message, MessageKind, Plan
from tests.kfac.recipes.cells import (
    COMMON,
    SCHEDULES,
    SEQUENTIAL,
    VARIANTS,
    Run,
    WithSwappedOwners,
    WithWrongRoots,
    on_ranks,
    reference,
)
from tests.kfac.recipes.delays import Deadlock, World

WORLD_SIZES = [1, 2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_schedule_is_the_sequential_algorithm(world_size):
    """Pipelining x fusion x placement x broadcast of inverses; a reordered sum is all that may differ."""
    truth, _ = reference()
    for name in SCHEDULES:
        parameters = on_ranks(world_size)[0]["cells"][name]["parameters"]
        assert (parameters - truth).abs().max() <= 1e-12, name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("variant", SEQUENTIAL)
def test_other_options_under_named_schedules(variant, world_size):
    truth, _ = reference(**VARIANTS[variant])
    for (other, schedule), cell in on_ranks(world_size)[0]["variants"].items():
        if other == variant:
            assert (cell["parameters"] - truth).abs().max() <= 1e-12, schedule


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_exact_fisher_is_that_of_one_process(world_size):
    (truth, *_), *others = (
        [c["parameters"] for (v, _), c in on_ranks(size)[0]["variants"].items() if v == "exact Fisher"]
        for size in (1, world_size)
    )
    for parameters in (p for cells in others for p in cells):
        assert (parameters - truth).abs().max() <= 1e-12
        assert (parameters - reference()[0]).abs().max() > 1e-4, "the control: it is not the empirical one"


def test_schedules_with_the_same_sums_agree_to_the_last_bit():
    """On one process nothing is reordered, and two ranks sum in one order only."""
    for world_size in (1, 2):
        cells = [on_ranks(world_size)[0]["cells"][name]["parameters"] for name in COMMON]
        assert all(torch.equal(cell, cells[0]) for cell in cells)
        for variant in VARIANTS:
            cells = [c["parameters"] for (v, _), c in on_ranks(world_size)[0]["variants"].items() if v == variant]
            assert all(torch.equal(cell, cells[0]) for cell in cells), variant


def test_control_the_reference_moves_and_the_variants_differ():
    ends = [reference()[0], *(reference(**VARIANTS[name])[0] for name in SEQUENTIAL if name != "micro-batches")]
    start = torch.nn.utils.parameters_to_vector(Run(0, 1, "dkfac").model.parameters()).detach()
    assert all((end - start).abs().max() > 1e-2 for end in ends)
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.combinations(ends, 2))
    corrected = on_ranks(1)[0]["variants"]["ekfac", "spdkfac"]["parameters"]
    assert (corrected - reference(**VARIANTS["exact damping"])[0]).abs().max() > 1e-6


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_control_inverses_of_the_wrong_owner(world_size):
    for rank in on_ranks(world_size):
        assert (rank["swapped owners"] - reference()[0]).abs().max() > 1e-5


# ---------------------------------------------------------------------- the race finder

RACE = {"factor_interval": 1, "inverse_interval": 1, "exclude": ("conv", "norm")}
"""Statistics and inverses in both of two steps, of which the second is pipelined."""


@functools.cache
def one_process() -> tuple[Plan, list[int], torch.Tensor]:
    """The plan of one process, the layers' gradient elements, and the parameters after two steps."""
    run = Run(0, 1, "spdkfac", **RACE).steps(2)
    return run.kfac.plan, [size.gradient_elements for size in run.kfac.layer_sizes], run.parameters()


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


def random_plan(draw: random.Random, world_size: int, *, owned: bool) -> Plan:
    """Any fusion, order, root and release of the messages, any owners, groups and order of the inversions, any layers
    that one rank preconditions.

    ``owned``: every inverse has an owner, and every sum goes to it alone.
    """
    plan, gradients, _ = one_process()
    factors, layers = range(len(plan.factors)), range(len(plan.factors) // 2)
    ranks = [*range(world_size), *([] if owned else [None])]
    owner = [draw.choice(ranks) for _ in factors]
    gradient_owner = [draw.choice((None, None, rank)) for rank in draw.choices(ranks, k=len(layers))]
    for k, rank in enumerate(gradient_owner):
        if rank is not None:
            owner[2 * k] = owner[2 * k + 1] = rank
    likely = 1.0 if owned else draw.choice((0.0, 0.6, 0.6))
    roots = [rank if draw.random() < likely else None for rank in owner]
    messages: list[Message] = []
    for kind in get_args(MessageKind):
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
    return dataclasses.replace(
        plan,
        schedule=dataclasses.replace(plan.schedule, inverse_broadcast=draw.choice(("after_all", "as_ready"))),
        world_size=world_size,
        messages=tuple(messages),
        inverse_owner=tuple(owner),
        inverse_sequence=tuple(draw.sample(factors, len(factors))),
        inverse_messages=tuple(inverses),
        gradient_owner=tuple(gradient_owner),
        gradient_messages=tuple(draw.sample(results, len(results))),
    )


def race(seed: int, *, waits: bool = True, swapped: bool = False, misrouted: bool = False) -> float:
    """How far the parameters of the ranks are from those of one process; plan, ranks and delays are drawn.

    Raises:
        AssertionError: if two ranks differ at all.
    """
    draw = random.Random(seed)
    world_size = draw.choice((2, 2, 3, 4))
    plan = random_plan(draw, world_size, owned=swapped or misrouted)

    def train(rank, communicator):
        communicator = WithSwappedOwners(communicator) if swapped else communicator
        communicator = WithWrongRoots(communicator) if misrouted else communicator
        return Run(rank, world_size, plan, communicator, **RACE).steps(2).parameters()

    ranks = World(world_size, seed, waits=waits).run(train)
    assert all(torch.equal(parameters, ranks[0]) for parameters in ranks), "ranks differ"
    return (ranks[0] - one_process()[2]).abs().max().item()


def test_late_and_reordered_messages_change_nothing():
    for seed in range(200):
        assert race(seed) <= 1e-12, f"seed {seed}"


def fails(seed: int, **broken: bool) -> bool:
    try:
        return not race(seed, **broken) <= 1e-12
    except (AssertionError, RuntimeError):
        return True


@pytest.mark.parametrize(
    "broken",
    [{"waits": False}, {"swapped": True}, {"misrouted": True}],
    ids=["no waiting", "swapped owners", "wrong roots"],
)
def test_control_every_seed_finds_what_is_broken(broken):
    assert all(fails(seed, **broken) for seed in range(10))


def test_control_collectives_in_another_order_are_noticed():
    def disordered(rank, communicator):
        works = [communicator.all_reduce(torch.ones(size), "kfac_FactorComm") for size in ((3, 5), (5, 3))[rank]]
        for work in works:
            work.wait()

    with pytest.raises(AssertionError, match="another rank"):
        World(2, 0).run(disordered)
    with pytest.raises(Deadlock):
        World(2, 0).run(lambda rank, communicator: communicator.barrier() if rank == 0 else None)
