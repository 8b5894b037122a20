"""Pipelining figure: computing factors and what of their messages is exposed, under four ways of fusing them."""

from __future__ import annotations

from dataclasses import replace

from paper_figures import published, simulated
from paper_figures.bars import Bar, draw, published_bar, simulated_bar
from paper_figures.interference import AS_RUN
from paper_figures.item import Context, Made, Provenance
from paper_figures.style import paper_style, save

NAME = "pipelining"
KINDS = ("FactorComp", "FactorComm")
SCHEDULES = {
    "Naive": replace(AS_RUN, pipelining="none", fusion="threshold"),
    "LW w/o TF": replace(AS_RUN, fusion="none"),
    "LW w/ TTF": replace(AS_RUN, fusion="threshold"),
    "SP w/ OTF": AS_RUN,
}
"""The paper's four: after the backward pass; layer by layer without fusion, with Horovod's threshold, with its rule."""
EXACT = ("exact", replace(AS_RUN, fusion="optimal"))
"""And one more: this project's exact program for the fusion, under its name in the figure."""


def bars(key: str, provenance: Provenance) -> list[Bar]:
    """Per way of fusing the published and the simulated bar."""
    made = []
    for name, schedule in SCHEDULES.items():
        made.append(published_bar(key, name, published.pipelining_s(key, name), provenance))
        made.append(simulated_bar(key, name, schedule, provenance, KINDS))
    return [*made, simulated_bar(key, *EXACT, provenance, KINDS)]


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    provenance.inputs["bars"] = (
        "simulated: the exposed seconds of a whole iteration's levels; the fit of interference saw SP w/ OTF of "
        "ResNet-50 within a row, and no other bar. exact: the fusion that an exact program finds best at the planner's "
        f"ideal costs; it is not always best with the interference that is simulated. {simulated.PRECONDITIONING}"
    )
    models = {key: bars(key, provenance) for key in published.model_keys()}
    with paper_style():
        figure = draw(models, "FactorComp, exposed FactorComm [s]", height_in=3.0, angle=30)
        files = save(figure, context.out / NAME)
    return Made((*files, provenance.write(context.out)))
