"""Cost models as curves on logarithmic axes: what the cost figures share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kfac.planning.costs import Cost
from paper_figures.item import Provenance
from paper_figures.measured_costs import Points

LOOKS: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "published": (("#262626", "-"),),
    "code": (("#0072b2", "--"),),
    "derived": (("#d55e00", "-."), ("#d55e00", ":")),
}
"""Colour and dashes of the curves of each tag in turn: a colour says where a curve comes from, in both panels; in grey
they are told apart by their dashes."""
MEASURED_COLOR = "#009e73"


@dataclass(frozen=True)
class Curve:
    """A cost model.

    Args:
        label: its name in the legend, with its tag.
        cost: seconds of a size.
        tag: published, code, derived or simulated.
        origin: what leads to it.
    """

    label: str
    cost: Cost
    tag: str
    origin: dict[str, Any]

    def record(self, provenance: Provenance, name: str, sizes: Sequence[float]) -> None:
        """Write down the curve at some sizes."""
        provenance.inputs[f"{name}: {self.label}"] = self.origin
        for size in sizes:
            path = f"{self.tag}/{name}/{self.label}/{size:g}"
            provenance.add(path, self.cost(size), self.tag, input=f"{name}: {self.label}", **self.origin)


def draw_curves(axes: Axes, curves: Sequence[Curve], limits: tuple[float, float], points: Points | None) -> None:
    """Curves between two sizes, and measured points with their fit over the range that was measured."""
    sizes = np.geomspace(*limits, 200)
    seen: Counter[str] = Counter()
    for curve in curves:
        color, dashes = LOOKS[curve.tag][seen[curve.tag]]
        seen[curve.tag] += 1
        seconds = [1e3 * curve.cost(float(size)) for size in sizes]
        axes.plot(sizes, seconds, linestyle=dashes, color=color, linewidth=1.2, label=curve.label)
    if points is not None:
        _draw_points(axes, points)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, axis="both", which="major")
    axes.minorticks_off()
    add_legend(axes)


def add_legend(axes: Axes) -> None:
    """Name everything below the axes, since what was measured may lie anywhere in it; fits last."""
    named = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: pair[1].startswith("fit to"))
    handles, labels = zip(*named, strict=True)
    axes.legend(
        handles,
        labels,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        frameon=False,
        handlelength=3.2,
        labelspacing=0.35,
    )


def _draw_points(axes: Axes, points: Points) -> None:
    look: dict[str, Any] = {"color": MEASURED_COLOR, "linewidth": 0.7}
    middle = np.array(points.seconds)
    spread = None
    if points.quartiles_s is not None:
        low, high = points.quartiles_s
        spread = [1e3 * (middle - low), 1e3 * (np.array(high) - middle)]
    axes.errorbar(points.sizes, 1e3 * middle, spread, fmt="o", ms=3, capsize=2, label=points.label, **look)
    own = np.geomspace(min(points.sizes), max(points.sizes), 100)
    axes.plot(own, [1e3 * points.fit(float(size)) for size in own], "-", label=points.fit_label, **look)
