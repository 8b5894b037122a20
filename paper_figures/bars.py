"""Stacked bars of seconds per kind, one panel per model, published beside simulated: what several figures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kfac.planning import ScheduleConfig
from kfac.timeline import KIND_COLORS
from paper_figures import published, simulated
from paper_figures.item import Provenance
from paper_figures.style import EDGE, PAGE_IN

COLORS = {"FF&BP": KIND_COLORS["BP"], **{kind: KIND_COLORS[kind] for kind in published.KINDS[1:]}}
TAGS = {"P": "P: published", "S": "S: simulated, fitted to D-KFAC and to ResNet-50", "I": "I: simulated, ideal"}
"""What stands under a bar, and what it means."""
HATCHES = {"P": None, "S": "//////", "I": "......"}
LABELS = {kind: kind for kind in published.KINDS} | {"FactorComp": "FactorComp with preconditioning"}
_GAP = 0.7  # between groups, in widths of a bar


@dataclass(frozen=True)
class Bar:
    """One stacked bar.

    Args:
        group: what it shows; bars of one group stand side by side.
        tag: one of :data:`TAGS`.
        parts_s: seconds per kind, from the bottom.
    """

    group: str
    tag: str
    parts_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """Its height."""
        return sum(self.parts_s.values())


def published_bar(key: str, group: str, parts: Mapping[str, published.Sourced], provenance: Provenance) -> Bar:
    """A bar of published parts, with each recorded."""
    for kind, number in parts.items():
        provenance.add(f"{key}/published/{group}/{kind}", number.value, number.status, **number.origin())
    return Bar(group, "P", {kind: number.value for kind, number in parts.items()})


def simulated_bar(
    key: str,
    group: str,
    schedule: ScheduleConfig,
    provenance: Provenance,
    kinds: Sequence[str] = published.KINDS,
    fitted: bool = True,
) -> Bar:
    """A bar of some kinds of a simulated iteration, with each recorded."""
    exposed_s = simulated.simulated(key, schedule, fitted).exposed_s
    origin = simulated.add_input(provenance, key, group, schedule, fitted)
    tag = "S" if fitted else "I"
    for kind in kinds:
        provenance.add(f"{key}/simulated/{group} ({tag})/{kind}", exposed_s[kind], "simulated", input=origin)
    return Bar(group, tag, {kind: exposed_s[kind] for kind in kinds})


def draw(models: Mapping[str, Sequence[Bar]], ylabel: str, height_in: float = 2.9, angle: float = 0.0) -> Figure:
    """One panel per model on one scale of seconds; call it inside :func:`~paper_figures.style.paper_style`.

    Args:
        models: the bars, by a key of :mod:`paper_figures.published`.
        ylabel: of the axis.
        height_in: of the figure.
        angle: of the groups' names, where they are long.
    """
    every = [bar for of_model in models.values() for bar in of_model]
    kinds = [kind for kind in published.KINDS if any(bar.parts_s.get(kind, 0.0) > 0 for bar in every)]
    figure = Figure(figsize=(PAGE_IN, height_in))
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (key, of_model) in zip(panels, models.items(), strict=True):
        draw_panel(axes, of_model, angle)
        axes.set_title(published.model(key).name)
    panels[0].set_ylim(0.0, 1.04 * max(bar.total_s for bar in every))
    panels[0].set_ylabel(ylabel)
    look: dict[str, Any] = {"loc": "upper center", "frameon": False, "handlelength": 1.4, "columnspacing": 1.4}
    handles = [Patch(facecolor=COLORS[kind], label=LABELS[kind], **EDGE) for kind in kinds]
    figure.legend(handles=handles, ncols=len(handles), bbox_to_anchor=(0.53, 1.01), **look)
    used = [tag for tag in TAGS if any(bar.tag == tag for bar in every)]
    tags = [Patch(facecolor="white", hatch=HATCHES[tag], label=TAGS[tag], **EDGE) for tag in used]
    figure.legend(handles=tags, ncols=len(tags), bbox_to_anchor=(0.53, 1.01 - 0.17 / height_in), **look)
    below_in = 0.33 if not angle else 0.6
    figure.subplots_adjust(left=0.065, right=0.995, top=1 - 0.57 / height_in, bottom=below_in / height_in, wspace=0.06)
    return figure


def draw_panel(axes: Axes, of_model: Sequence[Bar], angle: float = 0.0) -> None:
    """One model's bars, side by side in groups, with their tags and the groups' names below."""
    x = 0.0
    centres: dict[str, list[float]] = {}
    for before, bar in zip([None, *of_model], of_model, strict=False):
        if before is not None:
            x += 1.0 if before.group == bar.group else 1.0 + _GAP
        centres.setdefault(bar.group, []).append(x)
        bottom = 0.0
        for kind, seconds in bar.parts_s.items():
            axes.bar(x, seconds, 1.0, bottom=bottom, color=COLORS[kind], hatch=HATCHES[bar.tag], **EDGE)
            bottom += seconds
        where: dict[str, Any] = {"xytext": (0, -2), "textcoords": "offset points", "ha": "center", "va": "top"}
        axes.annotate(bar.tag, (x, 0.0), fontsize=6, annotation_clip=False, **where)
    turned: dict[str, Any] = {"rotation": angle, "ha": "right", "rotation_mode": "anchor"} if angle else {}
    axes.set_xticks([sum(xs) / len(xs) for xs in centres.values()], list(centres), fontsize=6.5, **turned)
    axes.tick_params(axis="x", length=0, pad=9)
    axes.set_xlim(-0.9, x + 0.9)
