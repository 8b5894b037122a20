"""T13: ranks with different data hold the factors, inverses and steps of one process on the concatenated batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kfac.oracle import D
from tests.kfac.recipes.cells import SCHEDULES, STEPS, Run, on_ranks, reference, results
from tests.kfac.recipes.delays import World

EPSILON = torch.finfo(D).eps
WORLD_SIZES = [1, 2, 4]


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def condition(factors: dict[str, Tensor], damping: float = 0.01) -> float:
    """The largest condition number of a factor damped by pi."""
    found = []
    for name in {key.rpartition("/")[0] for key in factors}:
        a, g = factors[f"{name}/A"], factors[f"{name}/G"]
        pi = math.sqrt(a.trace() / len(a) / (g.trace() / len(g)))
        for matrix, shift in ((a, math.sqrt(damping) * pi), (g, math.sqrt(damping) / pi)):
            found.append(torch.linalg.cond(matrix + shift * torch.eye(len(matrix), dtype=D)).item())
    return max(found)


def check_against_one_process(found: dict, alone: dict) -> None:
    assert difference(found["factors"], alone["factors"]) <= 1e-12
    bound = 10 * EPSILON * condition(alone["factors"])
    assert difference(found["made"], alone["made"]) <= bound
    assert difference({"": found["gradients"]}, {"": alone["gradients"]}) <= bound


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_unequal_shards_under_every_schedule(world_size):
    _, truth = reference()
    for name in SCHEDULES:
        found = on_ranks(world_size)[0]["cells"][name]
        assert difference(found["factors"], truth) <= 1e-12, name
        check_against_one_process(found, on_ranks(1)[0]["cells"][name])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equal_shards(world_size):
    found = on_ranks(world_size)[0]["equal shards"]
    assert difference(found["factors"], reference(samples=12)[1]) <= 1e-12
    check_against_one_process(found, on_ranks(1)[0]["equal shards"])


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_every_rank_holds_the_same_bits(world_size):
    first, *others = on_ranks(world_size)
    for kind in ("cells", "variants"):
        for name, cell in first[kind].items():
            for other in (rank[kind][name] for rank in others):
                for what in ("parameters", "gradients"):
                    assert torch.equal(other[what], cell[what]), name
                for what in ("factors", "made"):
                    assert all(torch.equal(other[what][key], cell[what][key]) for key in cell[what]), name


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_control_without_the_all_reduce_of_the_factors(world_size):
    ranks = on_ranks(world_size)
    for rank in ranks:
        assert difference(rank["without factor traffic"]["factors"], reference()[1]) > 0.1
    assert not torch.equal(
        ranks[0]["without factor traffic"]["parameters"], ranks[1]["without factor traffic"]["parameters"]
    )


@pytest.mark.parametrize("schedule", ["mpdkfac", "spdkfac"])
def test_eight_ranks(schedule):
    """As threads that take turns: eight processes would take longer to start than to train."""
    ranks = World(8, seed=0).run(lambda rank, c: results(Run(rank, 8, schedule, c).steps(STEPS)))
    assert difference(ranks[0]["factors"], reference()[1]) <= 1e-12
    check_against_one_process(ranks[0], results(Run(0, 1, schedule).steps(STEPS)))
    assert all(torch.equal(rank["parameters"], ranks[0]["parameters"]) for rank in ranks)
