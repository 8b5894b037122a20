"""Scaling figure: iteration time against world size for each schedule, simulated from the paper's 64 GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from paper_figures import published
from paper_figures.item import Context, Made, Provenance
from paper_figures.scheduling import load, origin
from paper_figures.style import PAGE_IN, note, paper_style, save

NAME = "scaling"
LOOKS = (
    ("#595959", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#e69f00", "-.", "^"),
    ("#d55e00", "-", "D"),
    ("#d55e00", ":", "v"),
    ("#009e73", "-", "P"),
)
"""Colour, dashes and mark of each schedule, in their order: told apart in grey by the last two."""


def draw(curves: Sequence[Mapping[str, Any]]) -> Figure:
    """One row of panels per law of start-up times, one column per model."""
    laws = list(dict.fromkeys(curve["latency"] for curve in curves))
    models = list(dict.fromkeys(curve["model"] for curve in curves))
    figure = Figure(figsize=(PAGE_IN, 1.9 * len(laws) + 0.5), layout="constrained")
    panels = figure.subplots(len(laws), len(models), sharex=True, sharey="row", squeeze=False)
    for curve in curves:
        axes = panels[laws.index(curve["latency"])][models.index(curve["model"])]
        for k, ((name, seconds), (color, line, mark)) in enumerate(
            zip(curve["iteration_s"].items(), LOOKS, strict=True)
        ):
            look: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": 1.0, "label": name}
            axes.plot(curve["world_sizes"], seconds, marker=mark, ms=2.6, markevery=(k % 3, 3), **look)
        axes.set_xscale("log", base=4)
        axes.set_xticks([4, 64, 1024, 16384], ["4", "64", "1k", "16k"])
        axes.minorticks_off()
        axes.set_yscale("log")
    for axes, model in zip(panels[0], models, strict=True):
        axes.set_title(published.model(model).name)
    for row, law in zip(panels, laws, strict=True):
        row[0].set_ylabel(f"start-up as of a {law}:\niteration time [s]")
        for axes in row:
            axes.set_yticks(*_ticks(axes.get_ylim()))
            axes.minorticks_off()
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    note(
        figure,
        "Simulated: costs of the paper's 64 GPUs, ideally overlapped, carried over to P ranks: start-up times grow "
        "with log P (tree) or P - 1 (ring), times per element with (P - 1) / P. The batch per rank stays.",
    )
    return figure


def _ticks(limits: tuple[float, float]) -> tuple[list[float], list[str]]:
    low, high = limits
    steps = (1, 2, 5) if high / low > 20 else (1, 1.5, 2, 3, 5, 7)
    ticks = [t for t in (10.0**k * m for k in (-1, 0, 1, 2) for m in steps) if low <= t <= high]
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
