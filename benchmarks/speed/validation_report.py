"""What predictions of the speed benchmark's results are worth: goals, tables and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
from scipy.stats import kendalltau

from benchmarks.pages import table
from benchmarks.speed.parts import UNLIMITED
from benchmarks.speed.validation import COMPONENTS, FITTED, WORKERS, Prediction, Result, calibrate, predictions
from benchmarks.speed.variants import TITLES
from benchmarks.workloads import WORKLOADS
from kfac.timeline import KIND_COLORS

LEAST_SHARE = 0.05
"""Of an iteration that a component must have to be compared."""

GOAL_MEDIAN, GOAL_95, GOAL_COMPONENT, GOAL_SHARED = 0.03, 0.06, 0.10, 0.15
"""Relative errors that the project set itself: median (or twice the noise), 95th percentile (or thrice), of components,
and where workers share cores."""
GOAL_TAU, GOAL_WINNERS = 0.9, 0.95
"""Kendall's rank correlation of the variants of a part, and the share of pairs that differ by more than twice the noise
of which the right one is predicted to be faster."""


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
        axes.grid(True, axis="both")
        axes.legend(loc="upper left", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata={"Software": None})
