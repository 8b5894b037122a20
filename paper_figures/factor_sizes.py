"""Factor size figure: how many elements the factors of each model have, A and G apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kfac.planning.costs import packed_elements
from kfac.timeline import KIND_COLORS
from paper_figures import published
from paper_figures.item import Context, Made, Provenance
from paper_figures.paper_cluster import architectures
from paper_figures.style import EDGE, PAGE_IN, note, paper_style, save

NAME = "factor_sizes"
EDGES = tuple(10 ** (2 + k / 4) for k in range(22))
"""Of the bins, in elements: four to a power of ten."""
LOOKS = {"A": (KIND_COLORS["FactorComp"], None), "G": (KIND_COLORS["InverseComm"], "//////")}


def sizes(key: str) -> dict[str, list[int]]:
    """Elements of the packed triangles of a model's factors, by side."""
    layers = architectures()[key]["layers"]
    return {side: [packed_elements(layer[f"{side.lower()}_dim"]) for layer in layers] for side in LOOKS}


def draw(models: Mapping[str, Mapping[str, list[int]]]) -> Figure:
    """One panel per model, G upon A, with the mean of all; call it inside :func:`~paper_figures.style.paper_style`."""
    figure = Figure(figsize=(PAGE_IN, 2.3), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True)
    for axes, (key, of_model) in zip(panels, models.items(), strict=True):
        bottom = np.zeros(len(EDGES) - 1)
        for side, (color, hatch) in LOOKS.items():
            counts = np.histogram(of_model[side], bins=EDGES)[0]
            axes.bar(EDGES[:-1], counts, np.diff(EDGES), bottom, align="edge", color=color, hatch=hatch, **EDGE)
            bottom += counts
        mean = sum(map(sum, of_model.values())) / sum(map(len, of_model.values()))
        axes.axvline(mean, color="#262626", linewidth=0.9, linestyle="--")
        axes.set_xscale("log")
        axes.set_xticks([1e3, 1e5, 1e7])
        axes.minorticks_off()
        axes.set_title(published.model(key).name)
        axes.set_xlabel("elements of a factor")
    highest = max(patch.get_y() + patch.get_height() for axes in panels for patch in axes.patches)
    panels[0].set_ylim(0, 1.05 * highest)
    panels[0].set_ylabel("number of factors")
    handles = [Patch(facecolor=color, hatch=hatch, label=side, **EDGE) for side, (color, hatch) in LOOKS.items()]
    handles.append(panels[0].plot([], [], "--", color="#262626", linewidth=0.9, label="mean")[0])
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    note(
        figure,
        "Traced from the architectures. Elements: the triangle with the diagonal, d(d+1)/2, which travels. Mean: of "
        "all factors of the model.",
    )
    return figure


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    made_by = "python -m experiments.architectures"
    provenance.inputs["architectures"] = {"file": "paper_figures/architectures.json", "made_by": made_by}
    models = {key: sizes(key) for key in published.model_keys()}
    for key, of_model in models.items():
        for side, elements in of_model.items():
            counts = np.histogram(elements, bins=EDGES)[0]
            for low, count in zip(EDGES, counts, strict=False):
                provenance.add(f"{key}/{side}/from {low:.0f}", int(count), "traced", input="architectures")
        every = [n for elements in of_model.values() for n in elements]
        for name, value in (("min", min(every)), ("max", max(every)), ("mean", sum(every) / len(every))):
            provenance.add(f"{key}/{name}", value, "traced", input="architectures")
    with paper_style():
        files = save(draw(models), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
