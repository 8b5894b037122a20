"""How well simulations predict what they were not calibrated on, by the results of the speed benchmark's parts.

A model is profiled once: by D-KFAC's iterations on two workers, on the links that give ResNet-50's ratio. Collectives
are those that each part timed before its rounds. How fast the machine is in a part, minutes or workers later, S-SGD's
passes tell. How much communication slows computing down is one property of the machine: three numbers for all models,
fitted to three variants of each on the links of its profile, and to those of one model on a second kind of link, which
parts what goes by seconds from what goes by bytes. All other configurations are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.pages import quartiles
from benchmarks.speed.parts import NEW, UNLIMITED
from benchmarks.speed.twins import work_of
from benchmarks.speed.variants import BASELINE, PAPER, SGD
from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.planning.costs import Cost
from kfac.planning.profiles import NO_INTERFERENCE, DisturbedCluster, Interference
from kfac.simulation import simulate, simulated_iteration_s
from kfac.timeline import COMMUNICATION_KINDS

Result = Mapping[str, Any]

LINK, WORKERS = "ResNet-50", 2
"""Of the part of each model that calibrates it."""
FITTED = (PAPER, "layerwise", "threshold_fusion")
"""The variants that interference is fitted to, beside the baseline: some messages, many, few."""
SECOND = ("resnet20", WORKERS, UNLIMITED)
"""The part whose :data:`FITTED` it is fitted to as well."""
SAMPLES_OF = {"resnet20_b16": "resnet20"}
"""Workloads of another batch size, and whose profile predicts them."""

COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "passes": ("FF", "BP"),
    "statistics": ("FactorComp",),
    "exposed messages": COMMUNICATION_KINDS,
    "inversions": ("InverseComp",),
}


@dataclass(frozen=True)
class Prediction:
    """One configuration, measured and predicted.

    Args:
        workload, workers, link, variant: which.
        measured_s: median seconds of an iteration.
        noise: half the distance of its quartiles over its median.
        predicted_s: with what computing loses to messages; ``ideal_s``: without.
        parts_s, overlap_s: what simple arithmetic predicts: the sum of computing and messages, as if nothing
            overlapped, and the greater of both, as if everything did.
        components: seconds of each of :data:`COMPONENTS`, measured and predicted.
        calibrated: whether it, or another variant with the same plan, was used to calibrate.
        rounds_s: measured seconds of each round.
        work: what its plan does (:func:`benchmarks.speed.twins.work_of`).
    """

    workload: str
    workers: int
    link: str
    variant: str
    measured_s: float
    noise: float
    predicted_s: float
    ideal_s: float
    parts_s: float
    overlap_s: float
    components: Mapping[str, tuple[float, float]]
    calibrated: bool
    rounds_s: tuple[float, ...] = ()
    work: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def part(self) -> tuple[str, int, str]:
        """What was measured by turns with it."""
        return self.workload, self.workers, self.link


@dataclass(frozen=True)
class Calibration:
    """What predictions are made from.

    Args:
        models: by workload the profile.
        inverses: by workload seconds as a function of the dimension.
        waits_s: by workload the seconds of an iteration with second-order work that no span explains.
        passes_s: by workload the seconds of S-SGD's passes.
        interference: of two workers; None if nothing was measured that it could be fitted to.
    """

    models: Mapping[str, ModelProfile]
    inverses: Mapping[str, Cost]
    waits_s: Mapping[str, float]
    passes_s: Mapping[str, float]
    interference: Interference | None = None

    def of(self, result: Result) -> tuple[ModelProfile, ClusterProfile, float] | None:
        """Model and cluster as a part had them, and its seconds that no span explains; None without a profile."""
        workload = result["key"]["workload"]
        source = SAMPLES_OF.get(workload, workload)
        if source not in self.models:
            return None
        slower = _passes_s(result) / self.passes_s[source]
        rest = slower if source == workload else 1.0  # samples have no part in it
        model = scaled(self.models[source], slower, rest)
        cluster = ClusterProfile.from_dict(result["cluster_profile"])
        return model, replace(cluster, inverse=times(self.inverses[source], rest)), self.waits_s[source] * rest


def calibrate(results: Sequence[Result]) -> Calibration:
    """The calibration by those results that it may use."""
    models: dict[str, ModelProfile] = {}
    inverses: dict[str, Cost] = {}
    waits_s, passes_s = {}, {}
    for result in results:
        workload, workers, link = _part(result)
        if (workers, link) == (WORKERS, LINK) and workload not in SAMPLES_OF:
            models[workload] = ModelProfile.from_dict(result["model_profile"])
            plan, cluster = (
                Plan.from_dict(result["plans"][BASELINE]),
                ClusterProfile.from_dict(result["cluster_profile"]),
            )
            busy_s = simulate(plan, models[workload], cluster).busy_s()["InverseComp"]
            measured_s = result["variants"][BASELINE]["busy_s"]["InverseComp"]
            inverses[workload] = times(cluster.inverse, measured_s / busy_s)
            cluster = replace(cluster, inverse=inverses[workload])
            alone_s = simulated_iteration_s(plan, models[workload], cluster)
            waits_s[workload] = max(0.0, _measured(result, BASELINE) - alone_s)
            passes_s[workload] = _passes_s(result)
    alone = Calibration(models, inverses, waits_s, passes_s)
    return replace(alone, interference=fit_interference(results, alone))


def times(cost: Cost, factor: float) -> Cost:
    """A cost that is so many times as high."""
    return lambda size: factor * cost(size)


def fit_interference(results: Sequence[Result], calibration: Calibration) -> Interference | None:
    """The interference with which simulations of what it may be fitted to are nearest to what they took."""
    cases = []
    for result in results:
        if (found := calibration.of(result)) is None:
            continue
        model, cluster, wait_s = found
        for variant in FITTED:
            if variant in result["plans"] and calibrates(*_part(result), variant):
                plan = Plan.from_dict(result["plans"][variant])
                cases.append((plan, model, cluster, wait_s, _measured(result, variant)))
    if not cases:
        return None

    def interference(x: Any) -> Interference:
        slowdown, message_ms, element_ns = (max(float(value), 0.0) for value in x)
        return Interference(slowdown=min(slowdown, 1.0), message_s=1e-3 * message_ms, element_s=1e-9 * element_ns)

    def distance(x: Any) -> float:
        logs = [
            np.log(_simulated_s(plan, model, cluster, replace(interference(x), wait_s=wait_s)) / seconds)
            for plan, model, cluster, wait_s, seconds in cases
        ]
        outside = sum(min(value, 0.0) ** 2 for value in x) + max(x[0] - 1.0, 0.0) ** 2
        return float(np.sum(np.square(logs)) + outside)

    starts = ((0.1, 0.5, 10.0), (0.5, 0.1, 1.0))
    tried = [minimize(distance, np.array(start), method="Nelder-Mead") for start in starts]
    return interference(min(tried, key=lambda one: float(one.fun)).x)


def along_the_ring(interference: Interference, workers: int) -> Interference:
    """Of more workers than the two that it was fitted to: every step of a ring costs what a step of two does.

    A ring of N sends each message in 2 (N - 1) steps, 2 (N - 1) / N times its elements per rank.
    """
    return replace(
        interference,
        message_s=(workers - 1) * interference.message_s,
        element_s=2 * (workers - 1) / workers * interference.element_s,
    )


def predictions(results: Sequence[Result]) -> list[Prediction]:
    """Of every configuration whose model was profiled, where interference is known."""
    calibration = calibrate(results)
    found = []
    for result in results:
        if calibration.interference is None or (of := calibration.of(result)) is None:
            continue
        model, cluster, alone_s = of
        part = _part(result)
        interference = along_the_ring(calibration.interference, part[1])
        work = {variant: work_of(plan) for variant, plan in result["plans"].items()}
        used = {work[variant] for variant in work if calibrates(*part, variant)}
        for variant, data in result["plans"].items():
            plan = Plan.from_dict(data)
            there = replace(interference, wait_s=alone_s if plan.schedule.curvature else 0.0)
            timeline = simulate(plan, model, DisturbedCluster.disturbed(cluster, there))
            alone = DisturbedCluster.disturbed(cluster, replace(NO_INTERFERENCE, wait_s=there.wait_s))
            ideal = simulate(plan, model, alone)
            busy_s = ideal.busy_s()
            messages_s = sum(busy_s[kind] for kind in COMMUNICATION_KINDS)
            computing_s, rest_s = sum(busy_s.values()) - messages_s, there.wait_s + model.update_s
            measured = result["variants"][variant]
            low, middle, high = quartiles(measured["seconds"])
            found.append(
                Prediction(
                    *part,
                    variant,
                    measured_s=middle,
                    noise=(high - low) / 2 / middle,
                    predicted_s=timeline.iteration_s,
                    ideal_s=ideal.iteration_s,
                    parts_s=computing_s + messages_s + rest_s,
                    overlap_s=max(computing_s, messages_s) + rest_s,
                    components=_components(measured["exposed_s"], timeline.breakdown_s()),
                    calibrated=work[variant] in used,
                    rounds_s=tuple(measured["seconds"]),
                    work=work[variant],
                )
            )
    return found


def configurations(found: Sequence[Prediction]) -> list[Prediction]:
    """One for each plan of a part: variants that are the same plan are further measurements of one configuration."""
    groups: dict[tuple[object, ...], list[Prediction]] = {}
    for one in found:
        groups.setdefault((one.part, one.work or one.variant), []).append(one)
    return [group[0] if len(group) == 1 else _pooled(group) for group in groups.values()]


def _pooled(group: Sequence[Prediction]) -> Prediction:
    """Of all rounds of variants with one plan, those of a round side by side."""
    rounds_s = tuple(seconds for of_round in zip(*(one.rounds_s for one in group), strict=True) for seconds in of_round)
    low, middle, high = quartiles(rounds_s)
    components = {
        name: (fmean(one.components[name][0] for one in group), group[0].components[name][1]) for name in COMPONENTS
    }
    noise = (high - low) / 2 / middle
    return replace(group[0], measured_s=middle, noise=noise, components=components, rounds_s=rounds_s)


def calibrates(workload: str, workers: int, link: str, variant: str) -> bool:
    """Whether a configuration is used to calibrate, or tells how fast the machine is."""
    if (workers, link) == (WORKERS, LINK) and workload not in SAMPLES_OF:
        return variant in (SGD, BASELINE, *(() if workload == NEW else FITTED))
    return variant == SGD or ((workload, workers, link) == SECOND and variant in FITTED)


def scaled(model: ModelProfile, passes: float, rest: float) -> ModelProfile:
    """A profile whose passes and statistics take ``passes`` times as long, and the rest of computing ``rest`` times."""
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * passes,
            backward_s=layer.backward_s * passes,
            a_statistics_s=layer.a_statistics_s * passes,
            g_statistics_s=layer.g_statistics_s * passes,
            precondition_s=layer.precondition_s * rest,
        )
        for layer in model.layers
    )
    return replace(model, layers=layers, loss_s=model.loss_s * passes, update_s=model.update_s * rest)


def _part(result: Result) -> tuple[str, int, str]:
    return result["key"]["workload"], result["key"]["workers"], result["key"]["link"]


def _passes_s(result: Result) -> float:
    busy = result["variants"][SGD]["busy_s"]
    return float(busy["FF"] + busy["BP"])


def _measured(result: Result, variant: str) -> float:
    return float(median(result["variants"][variant]["seconds"]))


def _simulated_s(plan: Plan, model: ModelProfile, cluster: ClusterProfile, interference: Interference) -> float:
    return simulated_iteration_s(plan, model, DisturbedCluster.disturbed(cluster, interference))


def _components(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {
        name: (sum(measured[kind] for kind in kinds), sum(predicted[kind] for kind in kinds))
        for name, kinds in COMPONENTS.items()
    }
