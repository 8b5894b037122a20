"""T14: a schedule changes when things happen, never the result; whatever the order in which messages arrive."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kfac.recipes.cells import (
    COMMON,
    SCHEDULES,
    SEQUENTIAL,
    VARIANTS,
    Run,
    on_ranks,
    reference,
)

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
