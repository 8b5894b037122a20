"""Inverse cost figures: inverting against the dimension, and where it crosses broadcasting, stated and measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from matplotlib.figure import Figure
from scipy.optimize import brentq

from kfac.planning import ExponentialCost, LinearCost
from kfac.planning.costs import Cost, packed_elements
from paper_figures import published, simulated
from paper_figures.curves import Curve, add_legend, draw_curves
from paper_figures.item import Context, Made, Provenance
from paper_figures.measured_costs import Points, measured_costs
from paper_figures.paper_cluster import CLUSTER_NAME
from paper_figures.style import PAGE_IN, paper_style, save

NAME = "inverse_costs"
LIMITS = (32, 8192)
SIZES = (64, 512, 1024, 2048, 4608, 8128)
"""Where curves are written down."""
_SHIPPED = {"file": f"kfac/planning/shipped/{CLUSTER_NAME}.json", "made_by": "python -m paper_figures.paper_cluster"}


def curves() -> tuple[Curve, Curve]:
    """Seconds of an inverse on one of the paper's GPUs."""
    alpha_s, beta_per_dim, origin = published.inverse_exponential()
    return (
        Curve("published: exponential", ExponentialCost(alpha_s, beta_per_dim), "published", origin),
        Curve("derived: cubic, Non-Dist", simulated.cluster().inverse, "derived", _SHIPPED),
    )


def broadcasts() -> tuple[Curve, Curve]:
    """Seconds until a factor of a dimension is broadcast to 64 GPUs."""
    stated = published.linear_cost("broadcast_code_2020_12")
    line = LinearCost(stated.alpha_s, stated.beta_s_per_element)
    origin = {"source": stated.source, "confidence": stated.confidence}
    return (
        Curve("code: broadcast, Dec. 2020", of_triangle(line), "code", origin),
        Curve("derived: broadcast, Seq-Dist", of_triangle(simulated.cluster().broadcast), "derived", _SHIPPED),
    )


def of_triangle(cost: Cost) -> Cost:
    """The cost of a message as one of the dimension of the factor in it."""
    return lambda dim: cost(packed_elements(round(dim)))


def crossings(inverse: Cost, broadcast: Cost) -> list[float]:
    """The dimensions between :data:`LIMITS` at which inverting costs as much as broadcasting."""

    def more_s(dim: float) -> float:
        return inverse(dim) - broadcast(dim)

    dims = [LIMITS[0] * 2 ** (k / 16) for k in range(16 * 8 + 1)]
    solve: Callable[..., float] = brentq
    return [round(solve(more_s, a, b), 1) for a, b in pairwise(dims) if (more_s(a) < 0) != (more_s(b) < 0)]


def draw(points: Points | None, crossing: list[float]) -> Figure:
    """Inverting on the left; on the right the derived curves and the code's, with their crossings."""
    figure = Figure(figsize=(PAGE_IN, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_curves(left, curves(), LIMITS, points)
    left.set_title("inverting")
    left.set_ylabel("time [ms]")
    draw_curves(right, (*curves(), *broadcasts()), LIMITS, None)
    right.set_title("inverting and broadcasting")
    threshold = published.lbp_threshold_dim()
    right.axvline(
        threshold, color="#595959", linewidth=0.8, linestyle=(0, (4, 2, 1, 2)), label=f"code: d = {threshold}"
    )
    inverse = curves()[1].cost
    right.plot(crossing, [1e3 * inverse(d) for d in crossing], "s", color="#262626", ms=4, label="derived curves cross")
    add_legend(right)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        ticks = [dim for dim in (2, 8, 32, 128, 512, 2048, 8192) if dim >= axes.get_xlim()[0]]
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        axes.set_xlabel("dimension d")
    return figure


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    points, warnings = measured_costs(context, provenance)
    for curve in curves():
        curve.record(provenance, "inverse", SIZES)
    for curve in broadcasts():
        curve.record(provenance, "broadcast", SIZES)
    if "inverse" in points:
        points["inverse"].record(provenance, "inverse")
    crossing = crossings(curves()[1].cost, broadcasts()[1].cost)
    for number, dim in enumerate(crossing):
        provenance.add(f"derived/crossing {number}", dim, "derived", input=f"inverse: {curves()[1].label}", **_SHIPPED)
    with paper_style():
        files = save(draw(points.get("inverse"), crossing), context.out / NAME)
    return Made((*files, provenance.write(context.out)), warnings=warnings)
