"""Communication cost figure: all-reduce and broadcast against the message's size, as stated, derived and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from kfac.planning import LinearCost
from paper_figures import interference, published, simulated
from paper_figures.curves import Curve, draw_curves
from paper_figures.item import Context, Made, Provenance
from paper_figures.measured_costs import Points, measured_costs
from paper_figures.paper_cluster import CLUSTER_NAME
from paper_figures.style import PAGE_IN, paper_style, save

NAME = "communication_costs"
LIMITS = (1e3, 5e8)
"""Elements of the smallest and the greatest message drawn."""
SIZES = (1e4, 1e6, 1e8)
"""Where curves are written down."""
TITLES = {"all_reduce": "all-reduce", "broadcast": "broadcast"}


def _stated(name: str, label: str) -> Curve:
    found = published.linear_cost(name)
    origin = {"source": found.source, "confidence": found.confidence}
    cost = LinearCost(found.alpha_s, found.beta_s_per_element)
    return Curve(f"{found.status}: {label}", cost, found.status, origin)


def curves() -> dict[str, tuple[Curve, ...]]:
    """The cost models on 64 GPUs, by collective.

    The broadcast line of the paper's figure is known from recollection alone and is not drawn.
    """
    fit = interference.load()
    fitted = {"file": f"paper_figures/{interference.PATH.name}", "made_by": interference.COMMAND}
    shipped = {"file": f"kfac/planning/shipped/{CLUSTER_NAME}.json", "made_by": "python -m paper_figures.paper_cluster"}
    own = simulated.cluster().broadcast
    return {
        "all_reduce": (
            _stated("all_reduce_figure", "the paper's figure"),
            _stated("all_reduce_final_runs", "constants of the runs"),
            Curve(
                "derived: D-KFAC's bars, one factor",
                LinearCost(fit.message_s + fit.item_s, fit.element_s),
                "derived",
                fitted,
            ),
        ),
        "broadcast": (
            _stated("broadcast_code_2020_12", "constants, Dec. 2020"),
            Curve("derived: from Seq-Dist's bars", own, "derived", shipped),
            Curve(
                "derived: from MPD-KFAC of ResNet-50",
                LinearCost(fit.broadcast_s, fit.broadcast_element_s),
                "derived",
                fitted,
            ),
        ),
    }


def draw(models: Mapping[str, Sequence[Curve]], points: Mapping[str, Points]) -> Figure:
    """One panel per collective; call it inside :func:`~paper_figures.style.paper_style`."""
    figure = Figure(figsize=(PAGE_IN, 3.3), layout="constrained")
    for axes, (name, of_panel) in zip(figure.subplots(1, 2, sharey=True), models.items(), strict=True):
        draw_curves(axes, of_panel, LIMITS, points.get(name))
        axes.set_title(TITLES[name])
        axes.set_xlabel("message [elements of 32 bits]")
    figure.axes[0].set_ylabel("time [ms]")
    return figure


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG."""
    provenance = Provenance(NAME)
    points, warnings = measured_costs(context, provenance)
    models = curves()
    for name, of_panel in models.items():
        for curve in of_panel:
            curve.record(provenance, name, SIZES)
        if name in points:
            points[name].record(provenance, name)
    with paper_style():
        files = save(draw(models, points), context.out / NAME)
    return Made((*files, provenance.write(context.out)), warnings=warnings)
