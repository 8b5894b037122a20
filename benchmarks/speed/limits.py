"""What no run of a plan can beat, by the seconds that its parts take alone."""

from __future__ import annotations

from collections import defaultdict

from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.planning.iteration_bound import iteration_lower_bound_s
from kfac.simulation import simulate
from kfac.timeline import COMPUTE_LANE

BOUND_TIME_LIMIT_S = 10.0


def limits(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> dict[str, float]:
    """Of a plan: computing alone (of the busiest rank), channel alone, and the iteration as simulated, in seconds.

    The greater of the first two is what hiding all of the lesser would leave.
    """
    timeline = simulate(plan, model, cluster)
    computing: dict[int, float] = defaultdict(float)
    channel: dict[int, float] = defaultdict(float)
    for span in timeline.spans:
        (computing if span.lane == COMPUTE_LANE else channel)[span.rank] += span.duration_s
    return {
        "computing_alone_s": max(computing.values(), default=0.0) + model.update_s,
        "channel_alone_s": max(channel.values(), default=0.0),
        "simulated_s": timeline.iteration_s,
    }


def part_bound_s(model: ModelProfile, cluster: ClusterProfile) -> float:
    """Seconds that no plan with all-reduced messages can beat, messages' ready times respected."""
    return iteration_lower_bound_s(model, cluster, time_limit_s=BOUND_TIME_LIMIT_S)
