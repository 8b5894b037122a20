"""Placement figure: how far above a proven lower bound each placement rule finishes, on all instances."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from paper_figures.item import Context, Made, Provenance
from paper_figures.scheduling import load, origin
from paper_figures.style import PAGE_IN, paper_style, save

NAME = "placement_bounds"
MARKS = ("o", "s", "^", "D", "v", "P")
"""Of the inverse costs, in the order of the data."""
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7")
FLOOR_PERCENT = 0.01
"""What is nearer to the bound is drawn here: the axis is logarithmic."""


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """One column of points per rule, a colour per model, a mark per inverse cost, a bar at the median."""
    figure = Figure(figsize=(PAGE_IN, 2.7))
    axes = figure.subplots()
    rules, models = list(rows[0]["finish_s"]), list(dict.fromkeys(row["model"] for row in rows))
    marks = dict(zip(dict.fromkeys(row["inverse"] for row in rows), itertools.cycle(MARKS), strict=False))
    for at, rule in enumerate(rules):
        gaps = [max(FLOOR_PERCENT, 100 * (row["finish_s"][rule] / row["bound_s"] - 1)) for row in rows]
        for number, (row, percent) in enumerate(zip(rows, gaps, strict=True)):
            x = at - 0.38 + 0.76 * number / (len(rows) - 1)
            color = COLORS[models.index(row["model"])]
            axes.plot(x, percent, marks[row["inverse"]], color=color, markersize=2.4, markeredgewidth=0)
        axes.hlines(median(gaps), at - 0.42, at + 0.42, color="#262626", linewidth=1.0)
    axes.set_yscale("log")
    axes.axhline(10, color="#595959", linewidth=0.7, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(rules)), rules)
    axes.set_ylabel("above the bound [%]")
    for number, model in enumerate(models):
        axes.plot([], [], "o", color=COLORS[number], markersize=3.5, label=model)
    for inverse, mark in marks.items():
        axes.plot([], [], mark, color="#595959", markersize=3.5, label=inverse)
    figure.legend(loc="upper center", ncols=5, frameon=False, bbox_to_anchor=(0.53, 1.0), columnspacing=1.2)
    figure.subplots_adjust(left=0.075, right=0.995, top=0.83, bottom=0.09)
    return figure


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    provenance.inputs["placement"] = origin("placement")
    rows = load()["placement"]
    for row in rows:
        instance = f"{row['model']}/{row['inverse']}/{row['world_size']}"
        for rule, finish_s in row["finish_s"].items():
            path = f"{instance}/simulated/{rule}"
            provenance.add(path, finish_s / row["bound_s"] - 1, "simulated", input="placement")
    with paper_style():
        files = save(draw(rows), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
