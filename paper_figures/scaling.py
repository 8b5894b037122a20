"""Scaling figure: iteration time against world size for each schedule, simulated from the paper's 64 GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from paper_figures import published
from paper_figures.item import Context, Made, Provenance
from paper_figures.scheduling import load, origin
from paper_figures.style import PAGE_IN, paper_style, save

NAME = "scaling"
LOOKS = (
    ("#8c8c8c", "-"),
    ("#0072b2", "-"),
    ("#e69f00", "-"),
    ("#d55e00", "-"),
    ("#d55e00", ":"),
    ("#009e73", "-"),
)
"""Colour and line of each schedule, in their order."""


def draw(curves: Sequence[Mapping[str, Any]]) -> Figure:
    """One row of panels per law of start-up times, one column per model."""
    laws = list(dict.fromkeys(curve["latency"] for curve in curves))
    models = list(dict.fromkeys(curve["model"] for curve in curves))
    figure = Figure(figsize=(PAGE_IN, 1.9 * len(laws) + 0.4))
    panels = figure.subplots(len(laws), len(models), sharex=True, sharey="row", squeeze=False)
    for curve in curves:
        axes = panels[laws.index(curve["latency"])][models.index(curve["model"])]
        for (name, seconds), (color, line) in zip(curve["iteration_s"].items(), LOOKS, strict=True):
            axes.plot(curve["world_sizes"], seconds, line, color=color, linewidth=1.2, label=name)
        axes.set_xscale("log", base=4)
        axes.set_xticks([4, 64, 1024, 16384], ["4", "64", "1k", "16k"])
        axes.minorticks_off()
        axes.set_yscale("log")
    for axes, model in zip(panels[0], models, strict=True):
        axes.set_title(published.model(model).name)
    for row, law in zip(panels, laws, strict=True):
        row[0].set_ylabel(f"start-up as of a {law}\niteration time [s]")
        for axes in row:
            axes.set_yticks(*_ticks(axes.get_ylim()))
            axes.minorticks_off()
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, bbox_to_anchor=(0.53, 1.0))
    figure.subplots_adjust(left=0.09, right=0.985, top=0.88, bottom=0.095, wspace=0.08, hspace=0.1)
    return figure


def _ticks(limits: tuple[float, float]) -> tuple[list[float], list[str]]:
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if limits[0] <= t <= limits[1]]
    return ticks, [f"{t:g}" for t in ticks]


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    provenance.inputs["scaling"] = origin("scaling")
    curves = load()["scaling"]
    for curve in curves:
        for name, seconds in curve["iteration_s"].items():
            for world_size, value in zip(curve["world_sizes"], seconds, strict=True):
                path = f"{curve['model']}/{curve['latency']}/simulated/{name}/{world_size}"
                provenance.add(path, value, "simulated", input="scaling")
    with paper_style():
        files = save(draw(curves), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
