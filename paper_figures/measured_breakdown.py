"""Measured breakdown figure: exposed milliseconds per kind of the small model's runs, with their quartiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kfac.timeline import KIND_COLORS
from paper_figures.item import Context, Made, Provenance
from paper_figures.measured import NO_RUNS, Measured, add_runs, measured
from paper_figures.style import COLUMN_IN, EDGE, PAGE_IN, paper_style, save

NAME = "measured_breakdown"
_LEGEND_COLUMNS = 3
_COLUMN_BARS = 6  # more bars than these need the width of the page
_PANEL_IN = 2.3  # height of one model's panel with its labels


def draw(groups: Sequence[Measured]) -> Figure:
    """One panel per model, one bar per schedule; call it inside :func:`~paper_figures.style.paper_style`.

    A bar's height is the mean recorded iteration; the mark beside it the median and quartiles of all iterations, most
    of which no timeline recorded.
    """
    panels: dict[str, list[Measured]] = {}
    for group in groups:
        panels.setdefault(_title(group), []).append(group)
    widest = max(map(len, panels.values()))
    kinds = [kind for kind in KIND_COLORS if any(group.breakdown_s().get(kind, 0.0) > 0 for group in groups)]
    handles: list[Artist] = [Patch(facecolor=KIND_COLORS[kind], label=kind, **EDGE) for kind in kinds]
    handles.append(Line2D([], [], color=EDGE["edgecolor"], marker="o", ms=2, lw=0.8, label="median, quartiles"))
    legend_in = 0.15 + 0.15 * math.ceil(len(handles) / _LEGEND_COLUMNS)
    height_in = legend_in + _PANEL_IN * len(panels)
    figure = Figure(figsize=(COLUMN_IN if widest <= _COLUMN_BARS else PAGE_IN, height_in))
    for axes, (title, members) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        _panel(axes, members)
        axes.set_title(title)
    figure.legend(handles=handles, loc="upper center", ncols=_LEGEND_COLUMNS, frameon=False, handlelength=1.5)
    figure.subplots_adjust(
        left=0.14, right=0.99, top=1 - (legend_in + 0.2) / height_in, bottom=0.36 / height_in, hspace=0.4
    )
    return figure


def _title(group: Measured) -> str:
    return f"{group.run.model}, {group.run.data}, batch {group.run.batch_size} per rank, measured"


def _panel(axes: Axes, members: Sequence[Measured]) -> None:
    for x, group in enumerate(members):
        bottom = 0.0
        breakdown_s = group.breakdown_s()
        for kind, color in KIND_COLORS.items():
            milliseconds = 1e3 * breakdown_s.get(kind, 0.0)
            axes.bar(x, milliseconds, 0.6, bottom=bottom, color=color, **EDGE)
            bottom += milliseconds
        spread = group.spread
        middle, low, high = (1e3 * value for value in (spread.median, spread.q25, spread.q75))
        axes.errorbar(
            x + 0.4,
            middle,
            [[middle - low], [high - middle]],
            fmt="o",
            color=EDGE["edgecolor"],
            ms=2,
            lw=0.8,
            capsize=2,
        )
    names = [g.run.schedule.replace("+", "\n") for g in members]
    ranks = [f"{n} rank" + "s" * (n > 1) for n in (g.run.world_size for g in members)]
    labels = [f"{name}\n{count}" for name, count in zip(names, ranks, strict=True)]
    axes.set_xticks(range(len(members)), labels)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(members) - 0.35)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("iteration time [ms]")


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG; without runs there is none, and an old one is removed."""
    provenance = Provenance(NAME)
    found, warnings = measured(context.runs)
    groups = [group for group in found if group.breakdown_s()]
    add_runs(provenance, groups, context.runs)
    for group in groups:
        for kind, seconds in group.breakdown_s().items():
            provenance.add(f"{group.label}/{kind}", seconds, "measured", **group.origin())
    if not groups:
        for suffix in (".pdf", ".png"):
            (context.out / f"{NAME}{suffix}").unlink(missing_ok=True)
        return Made((provenance.write(context.out),), NO_RUNS.format(context.runs) + "\n", tuple(warnings))
    with paper_style():
        files = save(draw(groups), context.out / NAME)
    return Made((*files, provenance.write(context.out)), warnings=tuple(warnings))
