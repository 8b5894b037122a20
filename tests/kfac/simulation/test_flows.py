"""Flows of simulated timelines: by the plan's own lists of what messages carry, and by what waiting means."""

from __future__ import annotations

import json
import random
from collections import defaultdict

import pytest

from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.simulation.events import Task, run_tasks
from kfac.simulation.flows import Place, flows
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE
from tests.kfac.perfetto import imported
from tests.kfac.simulation.cases import random_cluster, random_model, random_schedule

SEEDS = range(40)


def drawn(seed):
    """A plan at random, and its timeline."""
    dice = random.Random(seed)
    model, world_size = random_model(dice), dice.randint(2, 4)
    cluster = random_cluster(dice, world_size)
    plan = make_plan(random_schedule(dice), model, cluster, world_size)
    return plan, simulate(plan, model, cluster)


def sent_items(plan):
    """By message the layers and the kind of computing whose end makes it ready."""
    for number, message in enumerate(plan.messages):
        name = f"{message.kind} message {number} ({len(message.items)} items)"
        if message.kind == "gradient":
            yield name, {("BP", plan.layers[i]) for i in message.items}, message.release
        else:
            factors = [plan.factors[i] for i in message.items]
            yield name, {("FactorComp", f"{f.side} {f.layer}") for f in factors}, message.release


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sum_comes_from_the_last_of_what_it_carries(seed):
    plan, timeline = drawn(seed)
    sources = defaultdict(list)
    for a, b in timeline.flows:
        sources[timeline.spans[b].rank, timeline.spans[b].name].append(timeline.spans[a])
    for name, made_by, release in sent_items(plan):
        for rank in timeline.ranks:
            mine = [s for s in timeline.spans if s.rank == rank and s.lane == COMPUTE_LANE]
            passes = [s for s in mine if s.kind in ("FF", "BP", "FactorComp")]
            made = [s for s in passes if (s.kind, s.name) in made_by] if release == "ready" else passes
            found = [s for s in sources[rank, name] if s.lane == COMPUTE_LANE]
            assert len(found) == bool(made)
            if made:
                assert found[0] in made
                assert found[0].end_s == max(s.end_s for s in made)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_message_leads_to_is_the_first_that_waits_for_it_on_each_rank(seed):
    """Inverses are waited for by the first preconditioning that needs those of others; sums by the first inversion."""
    plan, timeline = drawn(seed)
    if not plan.schedule.curvature:
        return
    led = defaultdict(list)
    for a, b in timeline.flows:
        led[timeline.spans[a].rank, timeline.spans[a].kind, timeline.spans[a].name].append(timeline.spans[b])
    for span in (s for s in timeline.spans if s.lane == COMMUNICATION_LANE):
        mine = [s for s in timeline.spans if s.rank == span.rank and s.lane == COMPUTE_LANE]
        later = [s for s in mine if s.start_s >= span.end_s and s.kind in ("InverseComp", "Precondition")]
        found = led[span.rank, span.kind, span.name]
        assert len(found) <= 1
        assert all(s in later for s in found)
        sums = span.kind == "FactorComm" or span.name.startswith("gradient message")
        if sums and later and plan.schedule.inverse_start == "after_all":
            assert found[0].start_s == min(s.start_s for s in later)
        if span.kind == "InverseComm":
            assert [s.kind for s in found] == ["Precondition"][: len([s for s in later if s.kind == "Precondition"])]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_inverse_is_broadcast_by_the_rank_that_has_made_it(seed):
    plan, timeline = drawn(seed)
    last = {plan.broadcast_name(group): group[-1] for group in plan.inverse_messages}
    for a, b in timeline.flows:
        if timeline.spans[b].kind == "InverseComm" and len(timeline.ranks) > 1:
            factor, owner = plan.factors[last[timeline.spans[b].name]], plan.inverse_owner[last[timeline.spans[b].name]]
            if timeline.spans[b].rank == owner and plan.schedule.inverse_broadcast == "as_ready":
                assert timeline.spans[a].name.startswith("invert ")
                if timeline.spans[b].name.startswith("inverse of"):
                    assert timeline.spans[a].name == f"invert {factor.side} of {factor.layer}"


@pytest.mark.parametrize("seed", SEEDS)
def test_simulated_traces_follow_perfettos_rules(seed, tmp_path):
    _, timeline = drawn(seed)
    timeline.to_chrome_trace(path := tmp_path / "t.json")
    found = imported(json.loads(path.read_text())["traceEvents"])
    assert not found.errors
    long = [(a, b) for a, b in timeline.flows if min(timeline.spans[a].duration_s, timeline.spans[b].duration_s) > 0]
    assert len(found.flows) == len(long)
    assert type(timeline).from_chrome_trace(path) == timeline


def test_what_is_not_seen_passes_on_what_it_waits_for():
    everywhere, here = (0, 1), (0,)
    tasks = [
        Task("forward", 1.0, ("lane",)),
        Task("message", 2.0, ("channel",), after=(0,)),
        Task("a wait", 0.0, after=(0, 1)),
        Task("another", 0.0, after=(2,)),
        Task("invert", 1.0, ("lane 0",), after=(3,)),
        Task("invert more", 1.0, ("lane 0",), after=(3,)),
        Task("all", 1.0, ("lane",), after=(1, 3)),
    ]
    places = [
        Place(everywhere, False),
        Place(everywhere, True),
        None,
        None,
        Place(here, False),
        Place(here, False),
        Place(everywhere, False),
    ]
    found = list(flows(tasks, places, run_tasks(tasks, {"lane", "lane 0", "channel"})))
    assert sorted(found) == [(0, 1, 0), (0, 1, 1), (1, 4, 0), (1, 6, 1)]
