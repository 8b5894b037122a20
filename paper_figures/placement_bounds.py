"""Placement figure: how far above a proven lower bound each placement rule finishes, on all instances."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from paper_figures.item import Context, Made, Provenance
from paper_figures.scheduling import load, origin
from paper_figures.style import PAGE_IN, note, paper_style, save

NAME = "placement_bounds"
MARKS = ("o", "s", "^", "D", "v", "P")
"""Of the models, in the order of the data: in grey they are told apart by these."""
FILLS = ("full", "none", "bottom")
"""Of the inverse costs."""
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7")
FLOOR_PERCENT = 0.01
"""What is nearer to the bound is drawn here: the axis is logarithmic."""


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """One column of points per rule, a colour and mark per model, a filling per inverse cost, a bar at the median."""
    figure = Figure(figsize=(PAGE_IN, 3.2), layout="constrained")
    axes = figure.subplots()
    rules, models = list(rows[0]["finish_s"]), list(dict.fromkeys(row["model"] for row in rows))
    fills = dict(zip(dict.fromkeys(row["inverse"] for row in rows), itertools.cycle(FILLS), strict=False))
    look: dict[str, Any] = {"markersize": 2.8, "markeredgewidth": 0.5, "markerfacecoloralt": "white", "linestyle": ""}
    for at, rule in enumerate(rules):
        gaps = [max(FLOOR_PERCENT, 100 * (row["finish_s"][rule] / row["bound_s"] - 1)) for row in rows]
        points: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number, (row, percent) in enumerate(zip(rows, gaps, strict=True)):
            x = at - 0.38 + 0.76 * number / (len(rows) - 1)
            points.setdefault((row["model"], row["inverse"]), []).append((x, percent))
        for (model, inverse), of_both in points.items():
            k = models.index(model)
            axes.plot(*zip(*of_both, strict=True), MARKS[k], color=COLORS[k], fillstyle=fills[inverse], **look)
        axes.hlines(median(gaps), at - 0.42, at + 0.42, color="#262626", linewidth=1.0)
    axes.set_yscale("log")
    axes.axhline(10, color="#595959", linewidth=0.7, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(rules)), rules)
    decades = (0.01, 0.1, 1, 10, 100, 1000)
    axes.set_yticks(decades, [f"\N{LESS-THAN OR EQUAL TO} {FLOOR_PERCENT:g}", *(f"{d:g}" for d in decades[1:])])
    axes.minorticks_off()
    axes.set_ylabel("finish above the bound [%]")
    named = {**look, "markersize": 3.5}
    for k, model in enumerate(models):
        axes.plot([], [], MARKS[k], color=COLORS[k], label=model, **named)
    for inverse, fill in fills.items():
        axes.plot([], [], "h", color="#595959", fillstyle=fill, label=inverse, **named)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, columnspacing=1.2)
    sizes = len({row["world_size"] for row in rows})
    note(
        figure,
        f"Simulated: {len(rows)} instances of {len(models)} models, {len(fills)} inverse costs and {sizes} numbers of "
        "ranks (rising from left to right). Bar: median; dashed: 10\N{NO-BREAK SPACE}%.",
    )
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
