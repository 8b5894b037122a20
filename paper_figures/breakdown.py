"""Stacked breakdown figure: exposed seconds per kind, three algorithms, four models, published beside simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kfac.planning import ScheduleConfig
from kfac.timeline import KIND_COLORS
from paper_figures import interference, published, simulated
from paper_figures.item import Context, Made, Provenance
from paper_figures.style import EDGE, PAGE_IN, paper_style, save

NAME = "breakdown"
COLORS = {"FF&BP": KIND_COLORS["BP"], **{kind: KIND_COLORS[kind] for kind in published.KINDS[1:]}}
TAGS = {
    "P": "P: published",
    "S": "S: simulated",
    "S*": f"S*: simulated, every rank inverts d < {published.lbp_threshold_dim()} as in the paper's runs",
}
"""What stands under a bar, and what it means."""
HATCHES = {"P": None, "S": "//////", "S*": "......"}
_GAP = 0.7  # between algorithms, in widths of a bar


@dataclass(frozen=True)
class Bar:
    """One stacked bar: its algorithm, a tag of :data:`TAGS`, and its seconds per kind."""

    algorithm: str
    tag: str
    exposed_s: Mapping[str, float]


def bars(key: str, provenance: Provenance) -> list[Bar]:
    """The bars of a model: per algorithm the published one and, beside it, the simulated ones."""
    made = []
    for algorithm in published.ALGORITHMS:
        sourced = published.breakdown_s(key, algorithm)
        for kind, number in sourced.items():
            provenance.add(f"{key}/published/{algorithm}/{kind}", number.value, number.status, **number.origin())
        made.append(Bar(algorithm, "P", {kind: number.value for kind, number in sourced.items()}))
        made.append(_simulated_bar(key, algorithm, "S", simulated.SCHEDULES[algorithm], provenance))
    made.append(_simulated_bar(key, "SPD-KFAC", "S*", interference.AS_RUN, provenance))
    return made


def _simulated_bar(key: str, algorithm: str, tag: str, schedule: ScheduleConfig, provenance: Provenance) -> Bar:
    exposed_s = simulated.simulated(key, schedule).exposed_s
    name = algorithm + tag.removeprefix("S")
    origin = simulated.add_input(provenance, key, name, schedule)
    for kind, seconds in exposed_s.items():
        provenance.add(f"{key}/simulated/{name}/{kind}", seconds, "simulated", input=origin)
    return Bar(algorithm, tag, exposed_s)


def draw(models: Mapping[str, list[Bar]]) -> Figure:
    """One panel per model on one scale of seconds; call it inside :func:`~paper_figures.style.paper_style`."""
    figure = Figure(figsize=(PAGE_IN, 2.9))
    panels = figure.subplots(1, len(models), sharey=True)
    for axes, (key, of_model) in zip(panels, models.items(), strict=True):
        _panel(axes, of_model)
        axes.set_title(published.model(key).name)
    highest_s = max(sum(bar.exposed_s.values()) for of_model in models.values() for bar in of_model)
    panels[0].set_ylim(0.0, 1.04 * highest_s)
    panels[0].set_ylabel("iteration time [s]")
    look: dict[str, Any] = {"loc": "upper center", "frameon": False, "handlelength": 1.4, "columnspacing": 1.4}
    named = {kind: kind for kind in published.KINDS} | {"FactorComp": "FactorComp with preconditioning"}
    kinds = [Patch(facecolor=COLORS[kind], label=label, **EDGE) for kind, label in named.items()]
    figure.legend(handles=kinds, ncols=len(kinds), bbox_to_anchor=(0.53, 1.01), **look)
    tags = [Patch(facecolor="white", hatch=HATCHES[tag], label=text, **EDGE) for tag, text in TAGS.items()]
    figure.legend(handles=tags, ncols=len(tags), bbox_to_anchor=(0.53, 0.95), **look)
    figure.subplots_adjust(left=0.065, right=0.995, top=0.80, bottom=0.115, wspace=0.06)
    return figure


def _panel(axes: Axes, of_model: list[Bar]) -> None:
    x = 0.0
    centres: dict[str, list[float]] = {}
    for before, bar in zip([None, *of_model], of_model, strict=False):
        if before is not None:
            x += 1.0 if before.algorithm == bar.algorithm else 1.0 + _GAP
        centres.setdefault(bar.algorithm, []).append(x)
        bottom = 0.0
        for kind, seconds in bar.exposed_s.items():
            axes.bar(x, seconds, 1.0, bottom=bottom, color=COLORS[kind], hatch=HATCHES[bar.tag], **EDGE)
            bottom += seconds
        where: dict[str, Any] = {"xytext": (0, -2), "textcoords": "offset points", "ha": "center", "va": "top"}
        axes.annotate(bar.tag, (x, 0.0), fontsize=6, annotation_clip=False, **where)
    axes.set_xticks([sum(xs) / len(xs) for xs in centres.values()], list(centres), fontsize=6.5)
    axes.tick_params(axis="x", length=0, pad=9)
    axes.set_xlim(-0.9, x + 0.9)


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    provenance.inputs["bars"] = (
        "Both are differences between iterations with parts left out, the paper's protocol: forward and backward; plus "
        f"gradient messages; plus factors; plus factor messages; plus inversions; plus broadcasts. "
        f"{simulated.PRECONDITIONING}"
    )
    models = {key: bars(key, provenance) for key in published.model_keys()}
    with paper_style():
        files = save(draw(models), context.out / NAME)
    return Made((*files, provenance.write(context.out)))
