"""Convergence figure: metric against steps of K-FAC and its rivals, measured, with the range of three seeds."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from paper_figures.item import Context, Made, Provenance
from paper_figures.style import PAGE_IN, note, paper_style, save

NAME = "convergence"
PATH = Path(__file__).parents[1] / "docs" / "optimisation.json"
COMMAND = "python -m benchmarks optimisation"
LOOKS: Mapping[str, tuple[str, str, str]] = {
    "sgd": ("#595959", "-", "o"),
    "adamw": ("#e69f00", "--", "s"),
    "soap-1": ("#56b4e9", "-", "^"),
    "soap-10": ("#56b4e9", ":", "v"),
    "kfac-1": ("#d55e00", "-", "D"),
    "kfac-10": ("#d55e00", ":", "P"),
}
"""Colour, dashes and marks, by contender: told apart in grey by the last two."""
LABELS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "soap-1": "SOAP, every step",
    "soap-10": "SOAP, every 10",
    "kfac-1": "K-FAC, every step",
    "kfac-10": "K-FAC, every 10",
}
LOG_FROM = 10.0
"""The greatest value over the least, from which on the vertical axis is logarithmic."""
MARKS = 4
"""On a curve, besides its ends."""


@cache
def load() -> Mapping[str, Any]:
    """The comparison's data."""
    data: Mapping[str, Any] = json.loads(PATH.read_text())
    return data


def curve(evaluations: list[Mapping[str, Any]]) -> list[tuple[int, float, float, float]]:
    """Step, least, median and greatest value over the seeds, where all of them still ran: each ends at the target."""
    of_seeds = [dict(map(tuple, e["curve"])) for e in evaluations if e["curve"]]
    steps = sorted(set.intersection(*(set(c) for c in of_seeds))) if of_seeds else []
    return [(s, min(v), median(v), max(v)) for s in steps for v in [[c[s] for c in of_seeds]]]


def draw(workloads: Mapping[str, Any], seeds: int) -> Figure:
    """One panel per workload; call it inside :func:`~paper_figures.style.paper_style`."""
    figure = Figure(figsize=(PAGE_IN, 2.9), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads.values(), strict=True):
        for number, (contender, of_contender) in enumerate(workload["contenders"].items()):
            points = curve(of_contender["evaluations"])
            if not points:
                continue
            steps, low, middle, high = zip(*points, strict=True)
            color, dashes, mark = LOOKS[contender]
            marks: dict[str, Any] = {"marker": mark, "ms": 3.2, "markevery": marked(steps, number / len(LOOKS))}
            axes.plot(steps, middle, dashes, color=color, linewidth=1.0, label=LABELS[contender], **marks)
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(workload["target"], color="#262626", linewidth=0.6, linestyle=(0, (1, 2)), label="target")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        _scale(axes)
        what, metric = workload["title"].rsplit(": ", 1)
        axes.set_title(textwrap.fill(what, 36), fontsize=7)
        axes.set_xlabel("steps")
        axes.set_ylabel(metric)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    note(
        figure,
        f"Measured: median of {seeds} seeds, shaded from the least to the greatest. A curve ends where its first seed "
        "meets the target, or with the budget.",
    )
    return figure


def _scale(axes: Axes) -> None:
    """A logarithmic axis where most of what there is to see is near the target."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    if 0 < LOG_FROM * values.min() < values.max():
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [t for t in (10.0**k * m for k in range(-3, 4) for m in (1, 2, 5)) if low <= t <= high]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()


def marked(steps: Sequence[int], offset: float) -> list[int]:
    """Which steps are marked: the first, the last and, between them, some at equal distances on a logarithmic axis.

    Args:
        steps: rising.
        offset: share of a distance by which the marks of this curve are moved, so that those of others stay visible.
    """
    last = len(steps) - 1
    wanted = (steps[0] * (steps[last] / steps[0]) ** ((k + offset) / MARKS) for k in range(MARKS))
    return sorted({0, last, *(min(range(last + 1), key=lambda i: abs(steps[i] - step)) for step in wanted)})


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    data = load()
    provenance.inputs["comparison"] = {
        "file": f"docs/{PATH.name}",
        "made_by": COMMAND,
        "code": data["code"],
        "environment": data["environment"],
        "seeds": data["seeds"]["evaluation"],
        "lines": "the median of the seeds, shaded from the least to the greatest; up to where the first met the target",
    }
    for name, workload in data["workloads"].items():
        for contender, of_contender in workload["contenders"].items():
            for step, *values in curve(of_contender["evaluations"]):
                for statistic, value in zip(("min", "median", "max"), values, strict=True):
                    path = f"{name}/measured/{contender}/{step}/{statistic}"
                    provenance.add(path, value, "measured", input="comparison")
    with paper_style():
        files = save(draw(data["workloads"], len(data["seeds"]["evaluation"])), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
