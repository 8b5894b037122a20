"""Cost models as curves on logarithmic axes: what the cost figures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kfac.planning.costs import Cost
from paper_figures.item import Provenance
from paper_figures.measured_costs import Points

LOOKS = (("#262626", "-"), ("#0072b2", "--"), ("#d55e00", "-."), ("#009e73", ":"))
"""Colour and dashes of each curve in turn: told apart in grey by their dashes."""
MEASURED_COLOR = "#cc79a7"


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
    for curve, (color, dashes) in zip(curves, LOOKS, strict=False):
        seconds = [1e3 * curve.cost(float(size)) for size in sizes]
        axes.plot(sizes, seconds, dashes, color=color, linewidth=1.2, label=curve.label)
    if points is not None:
        axes.plot(
            points.sizes, [1e3 * s for s in points.seconds], "o", color=MEASURED_COLOR, ms=3.5, label=points.label
        )
        own = np.geomspace(min(points.sizes), max(points.sizes), 100)
        fit = [1e3 * points.fit(float(size)) for size in own]
        axes.plot(own, fit, "-", color=MEASURED_COLOR, linewidth=0.8, label="its fit")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="both", which="major")
    axes.minorticks_off()
