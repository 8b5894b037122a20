"""What predictions of the speed benchmark's results are worth: goals, tables and the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks.pages import quartiles, table
from benchmarks.speed.parts import NEW, UNLIMITED, UNSEEN
from benchmarks.speed.report import seconds
from benchmarks.speed.twins import same_plans, spreads
from benchmarks.speed.validation import (
    COMPONENTS,
    FITTED,
    WORKERS,
    Prediction,
    Result,
    calibrate,
    configurations,
    predictions,
)
from benchmarks.speed.variants import BASELINE, PAPER, SGD, TITLES
from benchmarks.workloads import WORKLOADS
from kfac.timeline import KIND_COLORS

LEAST_SHARE = 0.05
"""Of an iteration that a component must have to be compared."""

GOAL_MEDIAN, GOAL_95, GOAL_COMPONENT, GOAL_SHARED = 0.03, 0.06, 0.10, 0.15
"""Relative errors that the project set itself: median (or twice the noise), 95th percentile (or thrice), of components,
and where workers share cores."""
GOAL_BIAS = 0.02
"""The median error with its sign, either way."""
GOAL_RATIO = 0.03
"""How far a predicted ratio of SPD-KFAC's time to D-KFAC's may be off."""
GOAL_TAU, GOAL_WINNERS = 0.9, 0.95
"""Kendall's rank correlation of the variants of a part, and the share of pairs that differ by more than twice the noise
of which the right one is predicted to be faster."""


@dataclass(frozen=True)
class Quality:
    """Of predictions of configurations that calibrated nothing.

    Args:
        count: configurations.
        median, high: of the absolute relative errors, the median and the 95th percentile.
        bias: the median of the errors with their signs.
        with_sgd: the median of the absolute errors if S-SGD's, which tells the machine's speed, is counted too.
        simple: by name the median where something simpler predicts: computing that loses nothing to messages, nothing
            that overlaps, everything that does.
        noise: the median noise.
        components: by component the median absolute relative error, the 95th percentile, and of how many.
        tau: the least of Kendall's rank correlations of the parts, and their median.
        halves: the same of the two halves of each part's rounds (every other one), as far as they are known.
        pairs: of pairs of one part that differ by more than so many times the sum of both noises, how many are in the
            right order, and how many there are.
    """

    count: int
    median: float
    high: float
    bias: float
    with_sgd: float
    simple: Mapping[str, float]
    noise: float
    components: Mapping[str, tuple[float, float, int]]
    tau: tuple[float, float]
    halves: tuple[float, float] | None
    pairs: Mapping[int, tuple[int, int]]


def quality(found: Sequence[Prediction]) -> Quality:
    """Of the predictions among ``found`` that calibrated nothing; variants with one plan count once.

    Raises:
        ValueError: if there is none.
    """
    found = configurations(found)
    tested = [one for one in found if not one.calibrated]
    if not tested:
        raise ValueError("no configuration was left to predict")
    errors = [abs(one.error) for one in tested]
    components = {}
    for name in COMPONENTS:
        pairs = [one.components[name] for one in tested if one.components[name][0] > LEAST_SHARE * one.measured_s]
        off = [abs(p / m - 1) for m, p in pairs] or [0.0]
        components[name] = (median(off), float(np.percentile(off, 95)), len(pairs))
    parts: dict[tuple[str, int, str], list[Prediction]] = {}
    for one in tested:
        parts.setdefault(one.part, []).append(one)
    several = [part for part in parts.values() if len(part) > 2]
    taus = [_tau([one.measured_s for one in part], [one.predicted_s for one in part]) for part in several]
    rounds = [part for part in several if all(len(one.rounds_s) > 1 for one in part)]
    agree = [_tau(*([_half(one, half) for one in part] for half in (0, 1))) for part in rounds]

    def median_error(seconds: Callable[[Prediction], float]) -> float:
        return median(abs(seconds(one) / one.measured_s - 1) for one in tested)

    return Quality(
        count=len(tested),
        median=median(errors),
        high=float(np.percentile(errors, 95)),
        bias=median(one.error for one in tested),
        with_sgd=median(abs(one.error) for one in found if one.variant == SGD or not one.calibrated),
        simple={
            "without interference": median_error(attrgetter("ideal_s")),
            "nothing overlaps": median_error(attrgetter("parts_s")),
            "everything overlaps": median_error(attrgetter("overlap_s")),
        },
        noise=median(one.noise for one in tested),
        components=components,
        tau=(min(taus, default=1.0), median(taus) if taus else 1.0),
        halves=(min(agree), median(agree)) if agree else None,
        pairs={times: _in_order(list(parts.values()), times) for times in (2, 1, 0)},
    )


def _half(one: Prediction, half: int) -> float:
    """The median of every other measurement."""
    return median(one.rounds_s[half::2])


def _tau(a: Sequence[float], b: Sequence[float]) -> float:
    return float(kendalltau(a, b).statistic)


def _in_order(parts: Sequence[Sequence[Prediction]], times: int) -> tuple[int, int]:
    """Pairs in the right order, and all: those that differ by more than so many times the sum of their noises."""
    clear = [
        (a, b)
        for part in parts
        for a, b in combinations(part, 2)
        if abs(a.measured_s - b.measured_s) > times * (a.noise * a.measured_s + b.noise * b.measured_s)
    ]
    return sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in clear), len(clear)


def report(results: Sequence[Result]) -> str:
    """The page: goals, and every configuration with its noise beside its error."""
    calibration, found = calibrate(results), predictions(results)
    if not found:
        return "Not measured."
    fit = calibration.interference
    assert fit is not None, "or nothing would have been found"
    lines = [
        f"Fitted to {'; '.join(TITLES[variant] for variant in FITTED)}: a worker loses {fit.slowdown:.0%} of its speed "
        f"while a message is under way, and {1e3 * fit.message_s:.2f} ms for each message and "
        f"{1e3 * fit.element_s * 1e6 / 4:.2f} ms for each MB of it beside.",
    ]
    for where, late in (
        ("", False),
        ("Measured after the simulator's form was settled (a model that only D-KFAC profiled, another ratio): ", True),
    ):
        some = [one for one in found if (one.link in UNSEEN or one.workload == NEW) == late]
        for place, shared in (
            ("on two workers, with a core each", False),
            ("on four workers, which share two cores, from what two took", True),
        ):
            there = [one for one in some if (one.workers > WORKERS) == shared]
            if not all(one.calibrated for one in there):
                text = where + place
                lines.append(_goals(there, text[0].upper() + text[1:]))
    if apart := spreads(results):
        lines.append(
            f"{len(apart)} pairs of variants are one plan by two names, and count as one configuration above. Measured "
            f"apart in the same rounds, their medians differ by {median(apart):.1%} in the median, by "
            f"{np.percentile(apart, 95):.1%} at the 95th percentile, by {max(apart):.1%} at most."
        )
    if rows := paper_ratios(results, found):
        lines.append(_paper_table(rows))
    return "\n\n".join([*lines, *_tables(found)])


def _goals(found: Sequence[Prediction], where: str) -> str:
    q = quality(found)
    right, clear = q.pairs[2]
    shared = any(one.workers > WORKERS for one in found)
    limit, high = max(GOAL_MEDIAN, 2 * q.noise), max(GOAL_95, 3 * q.noise)

    def met(good: bool) -> str:
        return "met" if good else "**not met**"

    errors = (
        f"median error {q.median:.1%} (goal {GOAL_SHARED:.0%}: {met(q.median <= GOAL_SHARED)}), "
        f"95th percentile {q.high:.1%}"
        if shared
        else f"median error {q.median:.1%} (goal {limit:.1%}: {met(q.median <= limit)}), 95th percentile {q.high:.1%} "
        f"(goal {high:.1%}: {met(q.high <= high)})"
    )
    bias = f"with signs {q.bias:+.1%} in the median (goal {GOAL_BIAS:.0%} either way: {met(abs(q.bias) <= GOAL_BIAS)})"
    simple = ", ".join(f"{name} {error:.1%}" for name, error in q.simple.items())
    parts = ", ".join(
        f"{name} {error:.0%} ({worse:.0%}) of {count}" for name, (error, worse, count) in q.components.items() if count
    )
    worst = max((error for error, _, count in q.components.values() if count), default=0.0)
    halves = (
        f"; one half of the rounds against the other: {q.halves[1]:.2f}, {q.halves[0]:.2f} at least" if q.halves else ""
    )
    others = " and ".join(
        f"{100 * a / max(1, b):.3g}% of {b} {which}"
        for which, (a, b) in (("from the sum on", q.pairs[1]), ("in all", q.pairs[0]))
    )
    rows = [
        f"{where}: {q.count} configurations that nothing was calibrated on, noise {q.noise:.1%} in the median.",
        f"- Iterations: {errors}; {bias}. Counting S-SGD, whose passes tell the machine's speed: {q.with_sgd:.1%}.",
        f"- The median error of what is simpler: {simple}.",
        f"- Components that are at least {LEAST_SHARE:.0%} of an iteration, median error (95th percentile): {parts} "
        f"(goal {GOAL_COMPONENT:.0%} in the median: {met(worst <= GOAL_COMPONENT)}).",
        f"- Order of the variants of a part: Kendall's tau {q.tau[1]:.2f} in the median, {q.tau[0]:.2f} at least "
        f"(goal {GOAL_TAU}: {met(q.tau[1] >= GOAL_TAU)}){halves}.",
        f"- Of {clear} pairs that differ by more than twice the sum of their noises {right} are in the right order "
        f"({right / max(1, clear):.0%}, goal {GOAL_WINNERS:.0%}: {met(right >= GOAL_WINNERS * clear)}); {others}.",
    ]
    return "\n".join([rows[0], "", *rows[1:]])


@dataclass(frozen=True)
class Ratio:
    """SPD-KFAC's time over D-KFAC's on one part.

    Args:
        part: which.
        low, measured, high: quartiles over the rounds.
        predicted: by the simulations.
    """

    part: tuple[str, int, str]
    low: float
    measured: float
    high: float
    predicted: float

    @property
    def off(self) -> float:
        """Predicted less measured."""
        return self.predicted - self.measured

    @property
    def wrong(self) -> bool:
        """Whether the other one is predicted to be the faster one, where noise does not decide."""
        return (self.predicted < 1 < self.low) or (self.high < 1 < self.predicted)


def paper_ratios(results: Sequence[Result], found: Sequence[Prediction]) -> list[Ratio]:
    """Of the parts that did not calibrate."""
    of = {(*one.part, one.variant): one for one in found}
    ratios_of = []
    for result in results:
        part = (result["key"]["workload"], result["key"]["workers"], result["key"]["link"])
        mine, base = of.get((*part, PAPER)), of.get((*part, BASELINE))
        if mine and base and not (mine.calibrated and base.calibrated):
            rounds = [a / b for a, b in zip(_rounds(result, PAPER), _rounds(result, BASELINE), strict=True)]
            ratios_of.append(Ratio(part, *quartiles(rounds), mine.predicted_s / base.predicted_s))
    return ratios_of


def _rounds(result: Result, variant: str) -> list[float]:
    """Seconds of each round, in the mean over all variants with the same plan."""
    same = next((group for group in same_plans(result) if variant in group), (variant,))
    return [fmean(of_round) for of_round in zip(*(seconds(result, name) for name in same), strict=True)]


def _paper_table(rows: Sequence[Ratio]) -> str:
    """What a reader of the paper asks first."""
    near = sum(abs(row.off) <= GOAL_RATIO for row in rows)
    wrong = sum(row.wrong for row in rows)
    worst = max((abs(row.off) for row in rows), default=0.0)
    said = "met" if near == len(rows) else "**not met**"
    cells = [
        [_title(row.part), *(f"{x:.3f}" for x in (row.measured, row.low, row.high, row.predicted)), f"{row.off:+.3f}"]
        for row in rows
    ]
    return (
        f"SPD-KFAC's time over D-KFAC's, where neither calibrated: {near} of {len(rows)} are within {GOAL_RATIO} of "
        f"what was measured (goal all: {said}), the worst is {worst:.2f} off; in {wrong} the wrong one of both is said "
        "to be faster though the quartiles are on one side of 1.\n\n"
        + table(("", "measured", "first quartile", "third", "predicted", "off by"), cells)
    )


def _tables(found: Sequence[Prediction]) -> list[str]:
    header = ("", "measured, ms", "noise", "predicted, ms", "error", "without interference")
    blocks = []
    for part in dict.fromkeys(one.part for one in found):
        rows = [
            [
                TITLES.get(one.variant, one.variant) + (" (calibrates)" if one.calibrated else _same(one, found)),
                f"{1e3 * one.measured_s:.0f}",
                f"{one.noise:.1%}",
                f"{1e3 * one.predicted_s:.0f}",
                f"{one.error:+.1%}",
                f"{one.ideal_s / one.measured_s - 1:+.1%}",
            ]
            for one in found
            if one.part == part
        ]
        blocks.append(f"### {_title(part)}\n\n{table(header, rows)}")
    return blocks


def _same(one: Prediction, found: Sequence[Prediction]) -> str:
    """Which variant above has the same plan."""
    first = next(other for other in found if (other.part, other.work) == (one.part, one.work))
    return "" if first is one or not one.work else f" (the plan of: {TITLES.get(first.variant, first.variant)})"


def _title(part: tuple[str, int, str]) -> str:
    workload, workers, link = part
    links = "unlimited links" if link == UNLIMITED else f"ratio of {link}"
    return f"{WORKLOADS[workload].title}, {workers} workers, {links}"


MARKS = {"resnet20": "o", "resnet20_b16": "s", "gpt": "^", "resnet18": "D", "vit": "P", "tiny": "v"}
WORKER_COLORS = {2: KIND_COLORS["FactorComp"], 4: KIND_COLORS["InverseComp"]}


def scatter(found: Sequence[Prediction], path: Path) -> None:
    """Measured against predicted on logarithmic axes, and the errors below; hollow where something was calibrated."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullLocator, PercentFormatter

    from paper_figures.style import COLUMN_IN, paper_style

    with paper_style():
        figure = Figure(figsize=(1.5 * COLUMN_IN, 2.1 * COLUMN_IN), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
        seconds = [s for one in found for s in (one.measured_s, one.predicted_s)]
        ends = [1e3 * min(seconds) / 1.15, 1e3 * max(seconds) * 1.15]
        above.plot(ends, ends, color="black", linewidth=0.7, zorder=1)
        below.axhline(0, color="black", linewidth=0.7, zorder=1)
        for axes, band in ((above, [e * 0.95 for e in ends]), (below, [-0.05, -0.05])):
            top = [e * 1.05 for e in ends] if axes is above else [0.05, 0.05]
            axes.fill_between(ends, band, top, color="#e6e6e6", zorder=0)
        for one in found:
            color = WORKER_COLORS.get(one.workers, "black")
            style: dict[str, Any] = {
                "fmt": MARKS[one.workload],
                "markersize": 3.2,
                "markerfacecolor": "white" if one.calibrated else color,
                "markeredgecolor": color,
                "markeredgewidth": 0.7,
                "ecolor": "#595959",
                "elinewidth": 0.5,
                "zorder": 3,
            }
            x = 1e3 * one.measured_s
            above.errorbar([x], [1e3 * one.predicted_s], xerr=[x * one.noise], **style)
            below.errorbar([x], [one.error], yerr=[one.noise], **style)
        above.set(yscale="log", ylabel="predicted, ms per iteration", ylim=ends)
        below.set(xscale="log", ylabel="predicted / measured - 1", xlabel="measured, ms per iteration", xlim=ends)
        ticks = [t for t in (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000) if ends[0] < t < ends[1]]
        for axis in (above.xaxis, above.yaxis):
            axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.set_minor_locator(NullLocator())
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        above.grid(True, axis="both")
        below.grid(True, axis="both")
        workloads, workers = (dict.fromkeys(getattr(one, key) for one in found) for key in ("workload", "workers"))
        plain: dict[str, Any] = {"linestyle": "", "markersize": 3.5, "markeredgecolor": "black"}
        handles = [
            *(Line2D([], [], marker=MARKS[w], color="white", label=WORKLOADS[w].title, **plain) for w in workloads),
            *(
                Line2D([], [], linewidth=4, color=WORKER_COLORS.get(count, "black"), label=f"{count} workers")
                for count in workers
            ),
            Line2D([], [], marker="o", color="white", label="hollow: calibrates", **plain),
            Line2D([], [], linewidth=4, color="#e6e6e6", label="within 5 %; bars: noise"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata={"Software": None})
