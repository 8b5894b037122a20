"""Timelines and breakdowns as Plotly figures in plain data: Plotly itself is needed only to show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.timeline_ranks import said_of, shown_ranks
from experiments.timeline_view import LANES
from kfac.timeline import KIND_COLORS, KINDS, OTHER, Timeline

ROW_PX = 26
MARGIN_PX = 150
LINE_PX = 20
"""Of the title, below its first."""
MAX_RANKS = 16
"""Of a timeline; the page beside the figure has all that differ."""


def timeline_figure(timelines: Mapping[str, Timeline], title: str = "") -> dict[str, Any]:
    """A Gantt chart: one bar per span, one row per rank and lane, milliseconds from the iteration's start.

    Args:
        timelines: of one iteration, by what they are (``measured``, ``simulated``); one below the other, same scale. Of
            each at most :data:`MAX_RANKS` ranks are shown, those that differ.
        title: above it.
    """
    labels: dict[tuple[str, int], str] = {}
    said: list[str] = []
    for name, timeline in timelines.items():
        shown = shown_ranks(timeline, MAX_RANKS)
        which = "" if len(timelines) == 1 else f", {name}"
        labels |= {(name, one.rank): f"{one.name}{which}" for one in shown}
        if remark := said_of(shown, timeline):
            said.append(remark if len(timelines) == 1 else f"{name}: {remark}")
    rows = [(label, lane) for label in labels.values() for lane in LANES]
    bars: dict[str, list[tuple[str, str, float, float, str]]] = {kind: [] for kind in KINDS}
    for name, timeline in timelines.items():
        for span in timeline.spans:
            if (name, span.rank) in labels and span.duration_s > 0:
                place = labels[name, span.rank], span.lane
                bars[span.kind].append((*place, 1e3 * span.start_s, 1e3 * span.duration_s, span.name))
    data = [_bars(kind, of_kind) for kind, of_kind in bars.items() if of_kind]
    # Categories appear in the order of their first bar: an invisible one puts every row where it belongs.
    order = {"type": "bar", "orientation": "h", "y": _transposed(rows), "x": [0] * len(rows), "base": [0] * len(rows)}
    data.insert(0, {**order, "showlegend": False, "hoverinfo": "skip"})
    layout = {
        "title": _title(title, said),
        "barmode": "overlay",
        "xaxis": {"ticksuffix": " ms", "rangemode": "tozero"},  # a title would lie under the legend
        "yaxis": {"autorange": "reversed", "type": "multicategory"},
        **_frame(len(rows), len(said)),
    }
    return {"data": data, "layout": layout}


def breakdown_figure(breakdowns_s: Mapping[str, Mapping[str, float]], title: str = "") -> dict[str, Any]:
    """Stacked bars: exposed milliseconds of each kind, one bar per name.

    Args:
        breakdowns_s: seconds by kind, by name.
        title: above it.
    """
    names = list(breakdowns_s)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": names,
            "x": [1e3 * breakdowns_s[name].get(kind, 0.0) for name in names],
            "marker": {"color": KIND_COLORS[kind]},
        }
        for kind in (*KINDS, OTHER)
        if any(breakdowns_s[name].get(kind, 0.0) > 0 for name in names)
    ]
    layout = {
        "title": {"text": title},
        "barmode": "stack",
        "xaxis": {"ticksuffix": " ms"},
        "yaxis": {"autorange": "reversed"},
        **_frame(len(names)),
    }
    return {"data": data, "layout": layout}


def _bars(kind: str, bars: Sequence[tuple[str, str, float, float, str]]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": _transposed([bar[:2] for bar in bars]),
        "base": [round(bar[2], 6) for bar in bars],
        "x": [round(bar[3], 6) for bar in bars],
        "text": [bar[4] for bar in bars],
        "textposition": "none",
        "hovertemplate": "%{text}: %{x:.3f} ms from %{base:.3f} ms",
        "marker": {"color": KIND_COLORS[kind], "line": {"width": 0}},  # a frame would hide the short ones
    }


def _title(title: str, said: Sequence[str]) -> dict[str, Any]:
    """From the upper edge downwards, where the frame leaves room for every line."""
    small = [f'<span style="font-size:12px">{line}</span>' for line in said]
    place = {"yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 20}}
    return {"text": "<br>".join([title, *small]), **(place if said else {})}


def _frame(rows: int, lines: int = 0) -> dict[str, Any]:
    """Room for the rows, the legend below, and the title above with so many lines below it."""
    below = {"xref": "container", "x": 0.02, "yref": "container", "y": 0.02, "yanchor": "bottom"}
    legend = {"orientation": "h", "traceorder": "normal", **below}
    said_px = LINE_PX * lines
    margin = {"t": 60 + said_px, "b": MARGIN_PX - 60, "l": 10, "r": 30}
    return {"legend": legend, "margin": margin, "height": MARGIN_PX + said_px + ROW_PX * rows}


def _transposed(rows: Sequence[tuple[str, str]]) -> list[list[str]]:
    return [[row[0] for row in rows], [row[1] for row in rows]]
