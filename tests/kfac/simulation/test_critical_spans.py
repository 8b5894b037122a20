"""The spans that a simulation marks as critical are one unbroken chain from the start to the end of the work."""

from __future__ import annotations

import random
from dataclasses import replace

from kfac.planning import Plan
from kfac.schedules import make_plan
from kfac.simulation import simulate
from tests.kfac.simulation.cases import random_cluster, random_model, random_schedule


def random_case(dice):
    world_size = dice.choice((1, 2, 3))
    model, cluster = random_model(dice), random_cluster(dice, world_size)
    return make_plan(random_schedule(dice), model, cluster), model, cluster


def chain(timeline):
    """The critical spans that take time, those of all ranks once, in order."""
    spans = {(s.start_s, s.end_s, s.lane, s.name) for s in timeline.spans if s.critical and s.duration_s}
    return sorted(spans)


def test_they_follow_each_other_without_a_gap_until_the_end():
    """Each ends the moment that the next one starts: their seconds are those of the iteration, less the update."""
    dice = random.Random(8)
    waited = 0
    for _ in range(200):
        plan, model, cluster = random_case(dice)
        timeline = simulate(plan, model, cluster)
        path = chain(timeline)
        assert sum(end - start for start, end, *_ in path) == timeline.iteration_s - model.update_s
        now = 0
        for start, end, *_ in path:
            assert start == now
            now = end
        waited += len({lane for _, _, lane, _ in path}) == 2
    assert waited > 20, "in many the path changes between computing and the channel"


def test_what_is_not_on_the_path_may_be_dropped():
    """A layer whose every span is off the path: without its seconds nothing ends later, and mostly nothing earlier."""
    dice = random.Random(9)
    unmoved = 0
    for _ in range(100):
        plan, model, cluster = random_case(dice)
        assert isinstance(plan, Plan)
        timeline = simulate(plan, model, cluster)
        for k, layer in enumerate(model.layers):
            own = [s for s in timeline.spans if s.name == f"A {layer.name}" and s.kind == "FactorComp"]
            if not own or any(s.critical for s in own):
                continue
            layers = (*model.layers[:k], replace(layer, a_statistics_s=0), *model.layers[k + 1 :])
            quicker = simulate(plan, replace(model, layers=layers), cluster).iteration_s
            assert quicker == timeline.iteration_s
            unmoved += 1
    assert unmoved > 5
