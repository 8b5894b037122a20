"""Profiles from a run's own recorded iterations, with a few collectives timed beside them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from kfac.communication import Communicator
from kfac.config import KFACConfig
from kfac.planning import ClusterProfile, LinearCost, Message, ModelProfile, Plan, PolynomialCost
from kfac.planning.costs import inverse_dim
from kfac.profiling import (
    COLLECTIVES,
    MESSAGE_ELEMENTS,
    fit_cost,
    fit_inverse,
    model_profile_from,
    provenance,
    time_collectives,
    time_inverses,
)
from kfac.setup import LayerSizes
from kfac.timeline import COMMUNICATION_LANE, Timeline

PRIOR_WEIGHT = 0.1
"""How much the start-up and bandwidth of idle ranks count beside a message of the run: they decide what the run's own
messages leave open, as where all have one size."""

IDLE_SIZES = 5
"""Sizes at which collectives are timed beside the run."""


@dataclass(frozen=True)
class RankTimes:
    """What a rank's recorded iterations tell.

    Args:
        sums_s: by message of the Plan whose sum every rank gets, per iteration the seconds for which it was at the head
            of the channel.
        inversions_s: by factor, median seconds; only of those that the rank inverts.
        precondition_s: median seconds, of the layers that the rank preconditions.
        multiplications: ``2 g a (g + a)`` over these layers.
        iterations_s: the iterations' seconds, of those with all curvature work.
        model: the model's profile.
    """

    sums_s: Mapping[int, tuple[float, ...]]
    inversions_s: Mapping[int, float]
    precondition_s: float
    multiplications: float
    iterations_s: tuple[float, ...]
    model: ModelProfile


@dataclass(frozen=True)
class RunProfile:
    """What a run's own iterations say.

    Args:
        model, cluster: the profiles.
        iteration_s: median seconds of the recorded iterations with all curvature work; None: there was none.
    """

    model: ModelProfile
    cluster: ClusterProfile
    iteration_s: float | None


def has_statistics(timeline: Timeline) -> bool:
    """Whether statistics were computed in a recorded iteration."""
    return any(span.kind == "FactorComp" and span.name.startswith(("A ", "G ")) for span in timeline.spans)


def measure_run(
    timelines: Sequence[Timeline],
    plan: Plan,
    sizes: LayerSizes,
    communicator: Communicator,
    device: torch.device | str,
    *,
    name: str,
    repeats: int,
    config: KFACConfig,
) -> RunProfile:
    """Profiles of the model and of the ranks, the same on every rank; collective.

    Args:
        timelines: this rank's iterations with statistics; of the same iterations on every rank.
        plan: under which they ran.
        sizes: of all layers.
        communicator, device: the ranks, and where tensors live.
        name: of the model.
        repeats: of each collective, and of inverses where no recorded iteration has inverted.
        config: how these are made.

    Raises:
        ValueError: on every rank, if a rank's timelines lack statistics, or the passes.
    """
    outcome: RankTimes | ValueError
    try:
        outcome = rank_times(timelines, plan, sizes, communicator.rank, name)
    except ValueError as error:
        outcome = error
    ranks: list[RankTimes] = []
    for found in communicator.all_gather_object(outcome):
        if isinstance(found, ValueError):
            raise found
        ranks.append(found)
    idle: dict[str, list[float]] = {}
    elements = idle_sizes(plan, sizes)
    if communicator.world_size > 1:
        idle = time_collectives(communicator, device, elements, repeats)
    dims = [inverse_dim(factor.size) for factor in plan.factors if factor.dim > 1]
    alone = None if any(rank.inversions_s for rank in ranks) else time_inverses(dims, repeats, device, config)
    result: RunProfile = communicator.broadcast_object(profiles_of(ranks, plan, elements, idle, alone, device))
    return result


def idle_sizes(plan: Plan, sizes: LayerSizes) -> tuple[int, ...]:
    """From the smallest size of interest to all gradients or all factors in one message."""
    most = max(sum(layer.gradient_elements for layer in sizes), sum(factor.elements for factor in plan.factors))
    low, high = MESSAGE_ELEMENTS[0], min(max(most, 4 * MESSAGE_ELEMENTS[0]), MESSAGE_ELEMENTS[-1])
    return tuple(round(low * (high / low) ** (k / (IDLE_SIZES - 1))) for k in range(IDLE_SIZES))


# ---------------------------------------------------------------------- one rank


def rank_times(timelines: Sequence[Timeline], plan: Plan, sizes: LayerSizes, rank: int, name: str) -> RankTimes:
    """What ``rank``'s timelines tell, under ``plan``.

    Raises:
        ValueError: if they lack statistics, or the passes.
    """
    if not all(any(span.kind == kind for span in t.spans) for t in timelines for kind in ("FF", "BP")):
        raise ValueError(
            "the recorded iterations have no forward or no backward pass: put each into its span, "
            'with recorder.span("FF", "forward") and with recorder.span("BP", "backward")'
        )
    model = model_profile_from(timelines, sizes, name)
    precondition: list[float] = []
    inverted: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        by_name: dict[str, float] = defaultdict(float)
        for span in timeline.spans:
            if span.kind == "InverseComp":
                by_name[span.name] += span.duration_s
        solving_s = sum(seconds for key, seconds in by_name.items() if key.startswith("invert "))
        packing_s = sum(seconds for key, seconds in by_name.items() if key.startswith("pack "))
        for i, factor in enumerate(plan.factors):
            seconds = by_name.get(f"invert {factor.side} of {factor.layer}", 0.0)
            if seconds > 0:
                inverted[i].append(seconds * (1 + packing_s / solving_s))
        precondition.append(timeline.busy_s()["Precondition"])
    own = {
        plan.factors[2 * k].layer for k in range(len(plan.factors) // 2) if plan.solution_holder(2 * k) in (None, rank)
    }
    return RankTimes(
        sums_s=_sums(timelines, plan),
        inversions_s={i: statistics.median(seconds) for i, seconds in inverted.items()},
        precondition_s=statistics.median(precondition),
        multiplications=sum(_multiplications(model)[layer] for layer in own),
        iterations_s=tuple(t.iteration_s for t in timelines if any(s.kind == "InverseComp" for s in t.spans)),
        model=model,
    )


def _multiplications(model: ModelProfile) -> dict[str, float]:
    return {layer.name: float(layer.gradient_elements * (layer.a_dim + layer.g_dim)) for layer in model.layers}


def _sums(timelines: Sequence[Timeline], plan: Plan) -> dict[int, tuple[float, ...]]:
    """By message that every rank gets the sum of, the seconds that it took in each iteration."""
    found = [{s.name: s.duration_s for s in t.spans if s.lane == COMMUNICATION_LANE} for t in timelines]
    # Gradients that are averaged elsewhere are not numbered either.
    gradients = any(name.startswith("gradient message ") for name in found[0])
    sent = [k for k, message in enumerate(plan.messages) if gradients or message.kind != "gradient"]
    sums = {}
    for number, k in enumerate(sent):
        message = plan.messages[k]
        name = f"{message.kind} message {number} ({len(message.items)} items)"
        if message.root is None and all(name in spans for spans in found):
            sums[k] = tuple(spans[name] for spans in found)
    return sums


# ---------------------------------------------------------------------- all ranks


def profiles_of(
    ranks: Sequence[RankTimes],
    plan: Plan,
    elements: Sequence[int],
    idle: Mapping[str, Sequence[float]],
    alone: tuple[list[int], list[float]] | None,
    device: torch.device | str,
) -> RunProfile:
    """The profiles from what all ranks' iterations tell.

    The passes and statistics are rank 0's. An all-reduce takes as long as on the rank on which it takes least: the last
    one to join waits for nobody. Inversions are those of whichever rank did them.

    Args:
        ranks: of every rank, in order.
        plan: under which they ran.
        elements, idle: sizes and seconds of collectives on idle ranks.
        alone: dimensions and seconds of inverses, where no rank has inverted.
        device: for the provenance.
    """
    iterations = ranks[0].model.provenance["iterations"]
    origin = {**provenance(device), "how": "the run's own iterations", "iterations": iterations}
    per_multiplication_s = sum(r.precondition_s for r in ranks) / max(1.0, sum(r.multiplications for r in ranks))
    work = _multiplications(ranks[0].model)
    model = replace(
        ranks[0].model,
        layers=tuple(
            replace(layer, precondition_s=per_multiplication_s * work[layer.name] if layer.has_factors else 0.0)
            for layer in ranks[0].model.layers
        ),
        provenance=origin,
    )
    inverse, inverse_points = _inverse(ranks, plan, alone)
    costs, points = _collectives(ranks, plan, elements, idle)
    cluster = ClusterProfile(
        world_size=plan.world_size, inverse=inverse, provenance={**origin, **points, "inverse": inverse_points}, **costs
    )
    seconds = [max(of_ranks) for of_ranks in zip(*(rank.iterations_s for rank in ranks), strict=False)]
    return RunProfile(model, cluster, statistics.median(seconds) if seconds else None)


def _inverse(
    ranks: Sequence[RankTimes], plan: Plan, alone: tuple[list[int], list[float]] | None
) -> tuple[PolynomialCost, dict[str, Any]]:
    if alone is not None:
        return fit_inverse(*alone)
    by_dim: dict[int, list[float]] = defaultdict(list)
    for rank in ranks:
        for i, seconds in rank.inversions_s.items():
            by_dim[inverse_dim(plan.factors[i].size)].append(seconds)
    dims = sorted(by_dim)
    return fit_inverse(dims, [statistics.median(by_dim[dim]) for dim in dims])


def _collectives(
    ranks: Sequence[RankTimes], plan: Plan, elements: Sequence[int], idle: Mapping[str, Sequence[float]]
) -> tuple[dict[str, LinearCost], dict[str, Any]]:
    if not idle:
        return dict.fromkeys(COLLECTIVES, LinearCost(0.0, 0.0)), {}
    costs, points = {}, {}
    for name in COLLECTIVES:
        (alpha, beta), error = fit_cost(elements, idle[name], (0, 1))
        costs[name] = LinearCost(alpha, beta)
        points[name] = {"elements": list(elements), "seconds": list(idle[name]), "fit_error": error}
    sizes, seconds = _own_sums(ranks, plan)
    if not sizes:
        return costs, points
    before = costs["all_reduce"]
    after, error = fit_with_prior(sizes, seconds, before)
    points["all_reduce"] |= {"of_the_run": {"elements": sizes, "seconds": seconds, "fit_error": error}}
    start_up = after.alpha_s / before.alpha_s if before.alpha_s else 1.0
    bandwidth = after.beta_s_per_element / before.beta_s_per_element if before.beta_s_per_element else 1.0
    scaled = {
        name: LinearCost(cost.alpha_s * start_up, cost.beta_s_per_element * bandwidth) for name, cost in costs.items()
    }
    return {**scaled, "all_reduce": after}, points


def _own_sums(ranks: Sequence[RankTimes], plan: Plan) -> tuple[list[float], list[float]]:
    """Elements and seconds of the run's own all-reduces."""
    sizes, found = [], []
    for k, of_first in ranks[0].sums_s.items():
        of_ranks = [rank.sums_s.get(k, of_first) for rank in ranks]
        seconds = statistics.median(min(of_iteration) for of_iteration in zip(*of_ranks, strict=True))
        if seconds > 0:
            sizes.append(message_elements(plan.messages[k], plan))
            found.append(seconds)
    return sizes, found


def message_elements(message: Message, plan: Plan) -> float:
    """Elements of full precision that take the bytes of a message, with the counts behind its factors."""
    if message.kind == "gradient":
        return float(message.elements)
    counts = 0 if plan.summarised else len(message.items)
    return (message.elements + counts) / (1 if plan.schedule.message_dtype == "full" else 2)


def fit_with_prior(elements: Sequence[float], seconds: Sequence[float], prior: LinearCost) -> tuple[LinearCost, float]:
    """The non-negative start-up and bandwidth terms with the least relative errors, those of the terms against
    ``prior`` counted as :data:`PRIOR_WEIGHT` of a message's.

    Returns:
        the cost, and the median absolute relative error of the messages.
    """
    n, y = np.asarray(elements, float), np.asarray(seconds, float)
    design = [*np.stack([np.ones_like(n), n], 1) / y[:, None]]
    known = np.array([prior.alpha_s, prior.beta_s_per_element])
    design += [PRIOR_WEIGHT * np.eye(2)[k] / known[k] for k in range(2) if known[k] > 0]
    target = [1.0] * len(n) + [PRIOR_WEIGHT] * (len(design) - len(n))
    matrix = np.stack(design)
    scale = np.abs(matrix).max(0)
    scale[scale == 0.0] = 1.0
    alpha, beta = nnls(matrix / scale, np.array(target))[0] / scale
    error = float(np.median(np.abs((alpha + beta * n) / y - 1.0)))
    if not math.isfinite(alpha + beta):
        return prior, error
    if alpha < prior.alpha_s:  # no start-up is shorter than on ranks that do nothing else
        alpha = prior.alpha_s
        beta = max(0.0, float(np.median((y - alpha) / np.maximum(n, 1.0))))
        error = float(np.median(np.abs((alpha + beta * n) / y - 1.0)))
    return LinearCost(float(alpha), float(beta)), error
