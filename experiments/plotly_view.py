"""Timelines and breakdowns as Plotly figures in plain data: Plotly itself is needed only to show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.timeline_view import LANES, rank_name
from kfac.timeline import KIND_COLORS, KINDS, OTHER, Timeline

ROW_PX = 26
MARGIN_PX = 140


def timeline_figure(timelines: Mapping[str, Timeline], title: str = "") -> dict[str, Any]:
    """A Gantt chart: one bar per span, one row per rank and lane, milliseconds from the iteration's start.

    Args:
        timelines: of one iteration, by what they are (``measured``, ``simulated``); one below the other, same scale.
        title: above it.
    """
    rows = [
        (f"{rank_name(timeline, rank)}{'' if len(timelines) == 1 else ', ' + name}", lane)
        for name, timeline in timelines.items()
        for rank in timeline.ranks
        for lane in LANES
    ]
    bars: dict[str, list[tuple[str, str, float, float, str]]] = {kind: [] for kind in KINDS}
    for name, timeline in timelines.items():
        for span in timeline.spans:
            row = f"{rank_name(timeline, span.rank)}{'' if len(timelines) == 1 else ', ' + name}"
            bars[span.kind].append((row, span.lane, 1e3 * span.start_s, 1e3 * span.duration_s, span.name))
    data = [_bars(kind, of_kind) for kind, of_kind in bars.items() if of_kind]
    # Categories appear in the order of their first bar: an invisible one puts every row where it belongs.
    order = {"type": "bar", "orientation": "h", "y": _transposed(rows), "x": [0] * len(rows), "base": [0] * len(rows)}
    data.insert(0, {**order, "showlegend": False, "hoverinfo": "skip"})
    layout = {
        "title": {"text": title},
        "barmode": "overlay",
        "xaxis": {"title": {"text": "milliseconds from the start of the iteration"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "multicategory"},
        "legend": {"orientation": "h"},
        "height": MARGIN_PX + ROW_PX * len(rows),
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
        "xaxis": {"title": {"text": "exposed milliseconds per iteration"}},
        "yaxis": {"autorange": "reversed"},
        "height": MARGIN_PX + ROW_PX * len(names),
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
        "marker": {"color": KIND_COLORS[kind]},
    }


def _transposed(rows: Sequence[tuple[str, str]]) -> list[list[str]]:
    return [[row[0] for row in rows], [row[1] for row in rows]]
