"""How well simulations predict what they were not calibrated on, by the results of the speed benchmark's parts.

A model is profiled once: by D-KFAC's iterations on two workers, on the links that give ResNet-50's ratio. Collectives
are those that each part timed before its rounds. How fast the machine is in a part, minutes or workers later, S-SGD's
passes tell. How much communication slows computing down is fitted to up to three more variants on the links of the
profile. All other configurations are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import kendalltau

from benchmarks.pages import quartiles, table
from benchmarks.speed.parts import UNLIMITED
from benchmarks.speed.variants import BASELINE, PAPER, SGD, TITLES
from benchmarks.workloads import WORKLOADS
from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.planning.costs import Cost
from kfac.planning.profiles import NO_INTERFERENCE, DisturbedCluster, Interference
from kfac.simulation import simulate, simulated_iteration_s
from kfac.timeline import COMMUNICATION_KINDS, KIND_COLORS, Timeline

Result = Mapping[str, Any]

LINK, WORKERS = "ResNet-50", 2
"""Of the part of each model that calibrates it."""
FITTED = (PAPER, "layerwise", "threshold_fusion")
"""The variants that interference is fitted to, beside the baseline: some messages, many, few."""
SAMPLES_OF = {"resnet20_b16": "resnet20"}
"""Workloads of another batch size, and whose profile predicts them."""

COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "passes": ("FF", "BP"),
    "statistics": ("FactorComp",),
    "exposed messages": COMMUNICATION_KINDS,
    "inversions": ("InverseComp",),
}
LEAST_SHARE = 0.05
"""Of an iteration that a component must have to be compared."""

GOAL_MEDIAN, GOAL_95, GOAL_COMPONENT, GOAL_SHARED = 0.03, 0.06, 0.10, 0.15
"""Relative errors that the project set itself: median (or twice the noise), 95th percentile (or thrice), of components,
and where workers share cores."""
GOAL_TAU, GOAL_WINNERS = 0.9, 0.95
"""Kendall's rank correlation of the variants of a part, and the share of pairs that differ by more than twice the noise
of which the right one is predicted to be faster."""


@dataclass(frozen=True)
class Prediction:
    """One configuration, measured and predicted.

    Args:
        workload, workers, link, variant: which.
        measured_s: median seconds of an iteration.
        noise: half the distance of its quartiles over its median.
        predicted_s: with what computing loses to messages; ``ideal_s``: without.
        components: seconds of each of :data:`COMPONENTS`, measured and predicted.
        calibrated: whether it was used to calibrate.
    """

    workload: str
    workers: int
    link: str
    variant: str
    measured_s: float
    noise: float
    predicted_s: float
    ideal_s: float
    components: Mapping[str, tuple[float, float]]
    calibrated: bool

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
        interference: by workload.
    """

    models: Mapping[str, ModelProfile]
    inverses: Mapping[str, Cost]
    waits_s: Mapping[str, float]
    passes_s: Mapping[str, float]
    interference: Mapping[str, Interference]


def calibrate(results: Sequence[Result]) -> Calibration:
    """The calibration by those results that it may use."""
    parts = {_part(result): result for result in results}
    models: dict[str, ModelProfile] = {}
    inverses: dict[str, Cost] = {}
    waits_s, passes_s, interference = {}, {}, {}
    for (workload, workers, link), result in parts.items():
        if (workers, link) == (WORKERS, LINK) and workload not in SAMPLES_OF:
            models[workload] = ModelProfile.from_dict(result["model_profile"])
            plan, cluster = Plan.from_dict(result["plans"][BASELINE]), _cluster(result)
            busy_s = simulate(plan, models[workload], cluster).busy_s()["InverseComp"]
            measured_s = result["variants"][BASELINE]["busy_s"]["InverseComp"]
            inverses[workload] = times(cluster.inverse, measured_s / busy_s)
            cluster = replace(cluster, inverse=inverses[workload])
            alone_s = simulated_iteration_s(plan, models[workload], cluster)
            waits_s[workload] = max(0.0, _measured(result, BASELINE) - alone_s)
            passes_s[workload] = _passes_s(result)
            if set(FITTED) & set(result["plans"]):
                interference[workload] = fit_interference(result, models[workload], cluster, waits_s[workload])
    return Calibration(models, inverses, waits_s, passes_s, interference)


def times(cost: Cost, factor: float) -> Cost:
    """A cost that is so many times as high."""
    return lambda size: factor * cost(size)


def fit_interference(result: Result, model: ModelProfile, cluster: ClusterProfile, wait_s: float) -> Interference:
    """The slowdown and the cost of a message with which simulations of :data:`FITTED` are nearest to what they took.

    Where only one of them was measured, messages cost nothing beside: one number cannot be parted in two.
    """
    fitted = [variant for variant in FITTED if variant in result["plans"]]
    plans = [Plan.from_dict(result["plans"][variant]) for variant in fitted]
    measured = [_measured(result, variant) for variant in fitted]

    def interference(x: Any) -> Interference:
        message_s = max(float(x[1]), 0.0) * 1e-3 if len(fitted) > 1 else 0.0
        return Interference(slowdown=min(max(float(x[0]), 0.0), 1.0), message_s=message_s, wait_s=wait_s)

    def distance(x: Any) -> float:
        disturbed = DisturbedCluster.disturbed(cluster, interference(x))
        outside = sum(min(value, 0.0) ** 2 for value in x) + max(x[0] - 1.0, 0.0) ** 2
        logs = [
            np.log(simulated_iteration_s(plan, model, disturbed) / seconds)
            for plan, seconds in zip(plans, measured, strict=True)
        ]
        return float(np.sum(np.square(logs)) + outside)

    starts = ((0.2, 0.5), (0.05, 1.0), (0.5, 0.1))
    tried = [minimize(distance, np.array(start), method="Nelder-Mead") for start in starts]
    return replace(interference(min(tried, key=lambda one: float(one.fun)).x), wait_s=0.0)


def predictions(results: Sequence[Result]) -> list[Prediction]:
    """Of every configuration whose model was profiled, where interference is known."""
    calibration = calibrate(results)
    found = []
    for result in results:
        workload, workers, link = _part(result)
        source = SAMPLES_OF.get(workload, workload)
        interference = calibration.interference.get(source)
        if interference is None:
            continue
        slower = _passes_s(result) / calibration.passes_s[source]
        rest = slower if source == workload else 1.0  # samples have no part in it
        model = scaled(calibration.models[source], slower, rest)
        cluster = replace(_cluster(result), inverse=times(calibration.inverses[source], rest))
        wait_s = calibration.waits_s[source] * rest
        of_part = (workload, workers, link)
        for variant, data in result["plans"].items():
            plan = Plan.from_dict(data)
            there = replace(interference, wait_s=wait_s if plan.schedule.curvature else 0.0)
            timeline = _simulated(plan, model, cluster, there)
            ideal = _simulated(plan, model, cluster, replace(NO_INTERFERENCE, wait_s=there.wait_s))
            measured = result["variants"][variant]
            low, middle, high = quartiles(measured["seconds"])
            found.append(
                Prediction(
                    *of_part,
                    variant,
                    measured_s=middle,
                    noise=(high - low) / 2 / middle,
                    predicted_s=timeline.iteration_s,
                    ideal_s=ideal.iteration_s,
                    components=_components(measured["exposed_s"], timeline.breakdown_s()),
                    calibrated=calibrates(*of_part, variant),
                )
            )
    return found


def calibrates(workload: str, workers: int, link: str, variant: str) -> bool:
    """Whether a configuration is used to calibrate, or tells how fast the machine is."""
    if variant == SGD:
        return True
    if (workers, link) != (WORKERS, LINK) or workload in SAMPLES_OF:
        return False
    return variant in (BASELINE, *FITTED)


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


def _cluster(result: Result) -> ClusterProfile:
    return ClusterProfile.from_dict(result["cluster_profile"])


def _simulated(plan: Plan, model: ModelProfile, cluster: ClusterProfile, interference: Interference) -> Timeline:
    return simulate(plan, model, DisturbedCluster.disturbed(cluster, interference))


def _components(measured: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {
        name: (sum(measured[kind] for kind in kinds), sum(predicted[kind] for kind in kinds))
        for name, kinds in COMPONENTS.items()
    }


# ---------------------------------------------------------------------- what they are worth


@dataclass(frozen=True)
class Quality:
    """Of predictions of configurations that calibrated nothing.

    Args:
        count: configurations.
        median, high: of the absolute relative errors, the median and the 95th percentile.
        ideal: the median where computing loses nothing to messages.
        noise: the median noise.
        components: by component the median absolute relative error, and of how many configurations.
        tau: the least of Kendall's rank correlations of the parts, and their median.
        winners: of pairs of one part that differ by more than twice their noise, how many are in the right order, and
            how many there are.
    """

    count: int
    median: float
    high: float
    ideal: float
    noise: float
    components: Mapping[str, tuple[float, int]]
    tau: tuple[float, float]
    winners: tuple[int, int]


def quality(found: Sequence[Prediction]) -> Quality:
    """Of the predictions among ``found`` that calibrated nothing.

    Raises:
        ValueError: if there is none.
    """
    tested = [one for one in found if not one.calibrated]
    if not tested:
        raise ValueError("no configuration was left to predict")
    errors = [abs(one.error) for one in tested]
    components = {}
    for name in COMPONENTS:
        pairs = [one.components[name] for one in tested if one.components[name][0] > LEAST_SHARE * one.measured_s]
        components[name] = (median(abs(p / m - 1) for m, p in pairs) if pairs else 0.0, len(pairs))
    parts: dict[tuple[str, int, str], list[Prediction]] = {}
    for one in tested:
        parts.setdefault(one.part, []).append(one)
    taus = [
        float(kendalltau([one.measured_s for one in part], [one.predicted_s for one in part]).statistic)
        for part in parts.values()
        if len(part) > 2
    ]
    clear = [
        (a, b)
        for part in parts.values()
        for a, b in combinations(part, 2)
        if abs(a.measured_s - b.measured_s) > 2 * (a.noise * a.measured_s + b.noise * b.measured_s)
    ]
    right = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in clear)
    return Quality(
        count=len(tested),
        median=median(errors),
        high=float(np.percentile(errors, 95)),
        ideal=median(abs(one.ideal_s / one.measured_s - 1) for one in tested),
        noise=median(one.noise for one in tested),
        components=components,
        tau=(min(taus, default=1.0), median(taus) if taus else 1.0),
        winners=(right, len(clear)),
    )


def report(results: Sequence[Result]) -> str:
    """The page: goals, and every configuration with its noise beside its error."""
    calibration, found = calibrate(results), predictions(results)
    if not found:
        return "Not measured."
    fits = [
        f"- {WORKLOADS[workload].title}: {fit.slowdown:.0%} of its speed, {1e3 * fit.message_s:.2f} ms."
        for workload, fit in calibration.interference.items()
    ]
    lines = [
        f"Fitted to {'; '.join(TITLES[variant] for variant in FITTED)}: what computing loses of its speed while a "
        "message is under way, and for each message beside.",
        "\n".join(fits),
        _goals([one for one in found if one.workers <= WORKERS], "On two workers, with a core each"),
    ]
    shared = [one for one in found if one.workers > WORKERS]
    if shared:
        lines.append(_goals(shared, "On four workers, which share two cores, from what two took"))
    return "\n\n".join([*lines, *_tables(found)])


def _goals(found: Sequence[Prediction], where: str) -> str:
    q = quality(found)
    right, clear = q.winners
    shared = any(one.workers > WORKERS for one in found)
    limit, high = max(GOAL_MEDIAN, 2 * q.noise), max(GOAL_95, 3 * q.noise)

    def met(good: bool) -> str:
        return "met" if good else "**not met**"

    errors = (
        f"median error {q.median:.1%} (goal {GOAL_SHARED:.0%}: {met(q.median <= GOAL_SHARED)})"
        if shared
        else f"median error {q.median:.1%} (goal {limit:.1%}: {met(q.median <= limit)}), 95th percentile {q.high:.1%} "
        f"(goal {high:.1%}: {met(q.high <= high)})"
    )
    parts = ", ".join(f"{name} {error:.0%} of {count}" for name, (error, count) in q.components.items() if count)
    worst = max((error for error, count in q.components.values() if count), default=0.0)
    rows = [
        f"{where}: {q.count} configurations that nothing was calibrated on, noise {q.noise:.1%} in the median.",
        f"- Iterations: {errors}. Without interference the median error would be {q.ideal:.1%}.",
        f"- Components that are at least {LEAST_SHARE:.0%} of an iteration, median error: {parts} "
        f"(goal {GOAL_COMPONENT:.0%}: {met(worst <= GOAL_COMPONENT)}).",
        f"- Order of the variants of a part: Kendall's tau {q.tau[1]:.2f} in the median, {q.tau[0]:.2f} at least "
        f"(goal {GOAL_TAU}: {met(q.tau[1] >= GOAL_TAU)}).",
        f"- Of {clear} pairs that differ by more than twice their noise {right} are in the right order "
        f"({right / max(1, clear):.0%}, goal {GOAL_WINNERS:.0%}: {met(right >= GOAL_WINNERS * clear)}).",
    ]
    return "\n".join([rows[0], "", *rows[1:]])


def _tables(found: Sequence[Prediction]) -> list[str]:
    header = ("", "measured, ms", "noise", "predicted, ms", "error", "without interference")
    blocks = []
    for part in dict.fromkeys(one.part for one in found):
        rows = [
            [
                TITLES.get(one.variant, one.variant) + (" (calibrates)" if one.calibrated else ""),
                f"{1e3 * one.measured_s:.0f}",
                f"{one.noise:.1%}",
                f"{1e3 * one.predicted_s:.0f}",
                f"{one.error:+.1%}",
                f"{one.ideal_s / one.measured_s - 1:+.1%}",
            ]
            for one in found
            if one.part == part
        ]
        workload, workers, link = part
        links = "unlimited links" if link == UNLIMITED else f"ratio of {link}"
        blocks.append(f"### {WORKLOADS[workload].title}, {workers} workers, {links}\n\n{table(header, rows)}")
    return blocks


MARKS = {"resnet20": "o", "resnet20_b16": "s", "gpt": "^", "resnet18": "D", "tiny": "v"}


def scatter(found: Sequence[Prediction], path: Path) -> None:
    """Measured against predicted, on logarithmic axes; noise as bars, filled where nothing was calibrated."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    from paper_figures.style import COLUMN_IN, paper_style

    with paper_style():
        figure = Figure(figsize=(1.4 * COLUMN_IN, 1.4 * COLUMN_IN), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", aspect="equal")
        seconds = [s for one in found for s in (one.measured_s, one.predicted_s)]
        ends = [1e3 * min(seconds) / 1.15, 1e3 * max(seconds) * 1.15]
        axes.plot(ends, ends, color="black", linewidth=0.7, zorder=1)
        axes.fill_between(
            ends, [e * 0.95 for e in ends], [e * 1.05 for e in ends], color="#e6e6e6", zorder=0, label="within 5 %"
        )
        color = KIND_COLORS["FactorComp"]
        for workload in dict.fromkeys(one.workload for one in found):
            for calibrated in (False, True):
                some = [one for one in found if one.workload == workload and one.calibrated == calibrated]
                axes.errorbar(
                    [1e3 * one.measured_s for one in some],
                    [1e3 * one.predicted_s for one in some],
                    xerr=[1e3 * one.measured_s * one.noise for one in some],
                    fmt=MARKS[workload],
                    markersize=3.5,
                    markerfacecolor="white" if calibrated else color,
                    markeredgecolor=color,
                    markeredgewidth=0.7,
                    ecolor="#595959",
                    elinewidth=0.5,
                    label="_" if calibrated else WORKLOADS[workload].title,
                    zorder=3,
                )
        axes.plot([], [], "o", markersize=3.5, markerfacecolor="white", markeredgecolor="black", label="calibrates")
        axes.set(xlabel="measured, ms per iteration", ylabel="predicted, ms per iteration", xlim=ends, ylim=ends)
        ticks = [t for t in (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000) if ends[0] < t < ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.set_minor_locator(NullLocator())
        axes.grid(axis="both")
        axes.legend(loc="upper left", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata={"Software": None})
