"""Inverse figure: inverting and broadcasting under the paper's three placements and this project's own."""

from __future__ import annotations

from dataclasses import replace

from paper_figures import published
from paper_figures.bars import Bar, draw, published_bar, simulated_bar
from paper_figures.interference import AS_RUN, SCHEDULES
from paper_figures.item import Context, Made, Provenance
from paper_figures.style import paper_style, save

NAME = "inverse_placement"
KINDS = ("InverseComp", "InverseComm")
PLACEMENTS = {"Non-Dist": SCHEDULES["D-KFAC"], "Seq-Dist": SCHEDULES["MPD-KFAC"], "LBP": AS_RUN}
"""The paper's, as its runs had them."""
OURS = ("ours", replace(AS_RUN, placement="optimized", inverse_fusion="planned"))
"""This project's placement, with inverses fused into broadcasts."""


def bars(key: str, provenance: Provenance) -> list[Bar]:
    """Per placement the published and the simulated bar; of ours the simulated one."""
    made = []
    for name, schedule in PLACEMENTS.items():
        made.append(published_bar(key, name, published.inverse_s(key, name), provenance))
        made.append(simulated_bar(key, name, schedule, provenance, KINDS))
    return [*made, simulated_bar(key, *OURS, provenance, KINDS)]


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    models = {key: bars(key, provenance) for key in published.model_keys()}
    with paper_style():
        files = save(draw(models, "inverting and broadcasting [s]"), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
