"""Stacked breakdown figure: exposed seconds per kind, three algorithms, four models, published beside simulated."""

from __future__ import annotations

from paper_figures import published, simulated
from paper_figures.bars import Bar, draw, published_bar, simulated_bar
from paper_figures.interference import SCHEDULES
from paper_figures.item import Context, Made, Provenance
from paper_figures.style import paper_style, save

NAME = "breakdown"


def bars(key: str, provenance: Provenance) -> list[Bar]:
    """The bars of a model: per algorithm the published one and, beside it, the simulated ones."""
    made = []
    for algorithm in published.ALGORITHMS:
        made.append(published_bar(key, algorithm, published.breakdown_s(key, algorithm), provenance))
        made += [simulated_bar(key, algorithm, SCHEDULES[algorithm], provenance, fitted=f) for f in (True, False)]
    return made


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    provenance.inputs["bars"] = (
        "All are differences between iterations with parts left out, the paper's protocol: forward and backward; plus "
        "gradient messages; plus factors; plus factor messages; plus inversions; plus broadcasts. SPD-KFAC has the "
        f"dimension threshold of the paper's runs. {simulated.PRECONDITIONING}"
    )
    models = {key: bars(key, provenance) for key in published.model_keys()}
    with paper_style():
        files = save(draw(models, "iteration time [s]"), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
