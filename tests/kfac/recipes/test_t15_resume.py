"""T15: a checkpoint at any step continues to the same bits; on another number of ranks to rounding."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kfac.recipes.cells import FURTHER_STEPS, Run, on_ranks

WORLD_SIZES = [1, 2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_under_every_schedule_and_option_to_the_last_bit(world_size):
    """Stopped after one, two or three steps, in turn; one of them lies between a factor and an inverse update."""
    for rank in on_ranks(world_size):
        for name, cell in (*rank["cells"].items(), *rank["variants"].items()):
            assert torch.equal(cell["resumed"], cell["parameters"]), name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_fifty_steps_later_to_the_last_bit(world_size):
    for rank in on_ranks(world_size):
        assert torch.equal(rank["long, resumed"], rank["long"])


@pytest.mark.parametrize("stop", range(8))
def test_fifty_steps_later_from_any_step(stop):
    run = Run(0, 1, "spdkfac").steps(stop)
    state = run.save()
    whole, resumed = run.steps(FURTHER_STEPS), Run(0, 1, "spdkfac").load(state).steps(FURTHER_STEPS)
    assert torch.equal(resumed.parameters(), whole.parameters())
    assert resumed.kfac.steps == stop + FURTHER_STEPS


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_on_more_and_on_fewer_ranks_to_rounding(world_size):
    """One process's checkpoint on several ranks, and theirs on one process."""
    alone = on_ranks(1)[0]["long"]
    for rank in on_ranks(world_size):
        assert (rank["moved"] - alone).abs().max() <= 1e-10
        back = Run(0, 1, "spdkfac").load(rank["state"]).steps(FURTHER_STEPS)
        assert (back.parameters() - rank["long"]).abs().max() <= 1e-10


@pytest.fixture(scope="module")
def state() -> dict:
    """After two steps: the next one updates factors, and is preconditioned by inverses of the first one's."""
    return Run(0, 1, "spdkfac").steps(2).save()


def continued(state: dict) -> torch.Tensor:
    return Run(0, 1, "spdkfac").load(state).steps(FURTHER_STEPS).parameters()


@pytest.mark.parametrize("factor", ["conv/A", "left/G", "head/A"])
def test_control_a_lost_factor_is_noticed(state, factor):
    whole = continued(state)
    without = copy.deepcopy(state)
    del without["kfac"]["factors"][factor]
    with pytest.raises(ValueError, match=factor.split("/")[0]):
        continued(without)
    for lost in ("average", "inverse"):
        emptied = copy.deepcopy(state)
        emptied["kfac"]["factors"][factor][lost] = None
        assert not torch.equal(continued(emptied), whole), lost


@pytest.mark.parametrize("key", ["steps", "average", "inverse", "weight"])
def test_control_every_part_of_the_state_counts(state, key):
    """Steps decide what is due; a factor off in the last digits, or of another weight, ends elsewhere."""
    changed = copy.deepcopy(state)
    if key == "steps":
        changed["kfac"]["steps"] += 1
    else:
        changed["kfac"]["factors"]["left/A"][key] *= 1 + 1e-12
    assert not torch.equal(continued(changed), continued(state))
