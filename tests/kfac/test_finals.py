"""Plans that take turns in a run: the quickest stays on all ranks, and a stopped run starts over with its own."""

from __future__ import annotations

import copy
from itertools import islice

import torch

from kfac import KFACConfig
from kfac.communication import LocalCommunicator
from kfac.finals import ALONE, COUNTED, MOST, Finals, combined, longest
from tests.kfac.ranks import run_ranks
from tests.kfac.replanning_runs import Run


def plans_by_turns(rank, world_size):
    run = Run(rank, world_size, turns=2).train(5)
    seen = [run.kfac.plan.fingerprint]
    decided = None
    for step in range(6, 6 + longest(2)):
        run.train(1)
        seen.append(run.kfac.plan.fingerprint)
        if run.replanner.done:
            decided = step
            break
    found = run.replanner.result
    state = copy.deepcopy(run.state())
    uninterrupted = run.train(3).parameters()
    other = Run(rank, world_size, turns=2)
    next(islice(other.batches, decided - 1, decided))
    continued = other.load(state).train(3)
    fixed = Run(rank, world_size, schedule="dkfac", turns=2)
    fixed.kfac.load_state_dict(fixed.kfac.state_dict())
    return {
        "seen": seen,
        "decided": decided,
        "kept": found.kept.fingerprint,
        "own": run.kfac.plan.fingerprint,
        "tried": dict(found.tried_s),
        "said": str(found),
        "facts": found.to_dict()["replanned"],
        "same": torch.equal(uninterrupted, continued.parameters()),
        "parameters": uninterrupted,
    }


def test_finalists_take_turns_and_the_quickest_stays():
    first, second = run_ranks(plans_by_turns, 2)
    assert first["seen"] == second["seen"]
    assert first["tried"] == second["tried"], "what the slowest rank took, everywhere"
    finalists = len(first["tried"])
    assert 2 <= finalists <= MOST
    assert first["decided"] == 5 + ALONE + finalists * 2 * (COUNTED + 1)
    assert len(set(first["seen"])) >= finalists
    quickest, *others = first["tried"].items()
    assert all(quickest[1] <= seconds for _, seconds in others)
    assert first["kept"] == first["own"] == first["seen"][-1]
    assert f"{quickest[0]} stays" in first["said"]
    assert first["facts"]["tried_s"] == first["tried"]
    assert first["same"]
    assert second["same"]
    assert torch.equal(first["parameters"], second["parameters"])


def stopped_in_the_middle_of_turns(rank, world_size):
    found = {}
    for name, count in {"without overlap": 7, "turns": 5 + ALONE + 8}.items():
        run = Run(rank, world_size, turns=2)
        own = run.kfac.plan.fingerprint
        run.train(count)
        assert not run.replanner.done
        state = copy.deepcopy(run.state())
        continued = Run(rank, world_size, turns=1)
        next(islice(continued.batches, count - 1, count))
        continued.load(state)
        found[name] = own, continued.kfac.plan.fingerprint, run.kfac.plan.fingerprint
        while not continued.replanner.done:
            continued.train(1)
            assert continued.kfac.steps < count + 10 + longest(1)
        found[name] += (continued.replanner.result.before.fingerprint, len(continued.replanner.result.tried_s))
    return found


def test_a_run_that_is_stopped_while_others_are_tried_starts_over_with_its_own_plan():
    first, second = run_ranks(stopped_in_the_middle_of_turns, 2)
    assert first == second
    for own, continued, tried, before, finalists in first.values():
        assert own == continued == before != tried
        assert finalists >= 2


def turns_where_inversions_are_rare(rank, world_size):
    config = KFACConfig(factor_interval=2, inverse_interval=4, kl_clip=1e-2)
    run = Run(rank, world_size, config=config, turns=1, after=10)
    while not run.replanner.done:
        run.train(1)
        assert run.kfac.steps < 12 + 4 * longest(1)
    return dict(run.replanner.result.tried_s), run.kfac.plan.fingerprint, str(run.replanner.result.choice)


def test_turns_include_steps_without_inversions():
    first, second = run_ranks(turns_where_inversions_are_rare, 2)
    assert first == second
    tried, _, said = first
    assert len(tried) >= 2
    assert min(tried.values()) > 0
    assert "in the mean (statistics every 2, inverses every 4 steps)" in said


def test_what_does_not_overlap_is_measured_before_planning_anew():
    run = run_ranks(without_overlap, 2)[0]
    assert run["during"] == ("none", False)
    assert run["before"] == run["so far"]


def without_overlap(rank, world_size):
    run = Run(rank, world_size, schedule={"name": "auto", "pipelining": "layerwise"}, turns=1)
    assert run.replanner._without_overlap() is None, "a fixed switch forbids it"
    run = Run(rank, world_size, turns=1).train(5)
    during = run.kfac.plan.schedule
    first = Run(rank, world_size).kfac.plan.fingerprint
    run.train(ALONE)
    few = Run(rank, world_size, turns=1, iterations=1).train(10 + longest(1))
    assert few.replanner.done, "fewer iterations to plan from than are measured without overlap"
    back = Run(rank, world_size, turns=1).train(5)
    back.replanner.load_state_dict({"done": False})
    assert back.replanner._overlapped is None, "what was measured before a state was loaded says nothing of it"
    return {
        "during": (during.pipelining, during.gradient_pipelining),
        "before": run.replanner.result.before.fingerprint,
        "so far": first,
    }


def test_the_plan_with_the_quickest_iteration_of_the_slowest_rank_wins():
    of_ranks = [{"a": [1.0, 9.0, 4.0], "b": [2.0, 2.0, 2.0]}, {"a": [5.0, 1.0, 4.0], "b": [3.5, 9.0, 3.0]}]
    assert combined(of_ranks) == {"b": 3.0, "a": 4.0}
    assert list(combined(of_ranks)) == ["b", "a"]
    assert list(combined([{"first": [1.0], "second": [1.0]}])) == ["first", "second"]


def test_the_first_iteration_of_a_turn_does_not_count():
    finals = Finals({"a": None, "b": None}, turns=2, counted=1)
    ended = []
    for seconds in (9.0, 1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0):
        assert not finals.over
        ended.append(finals.note(seconds))
    assert ended == [False, True] * 4
    assert finals.over
    assert finals.seconds(LocalCommunicator()) == {"a": 1.0, "b": 2.0}
