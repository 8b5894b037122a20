"""Timelines to look at: a picture for a paper, and a page of its own to zoom into (no network, no libraries)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, KIND_COLORS, KINDS, OTHER, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LANES = (COMPUTE_LANE, COMMUNICATION_LANE)
TITLE_CHARACTERS = 78
"""Of a line above a picture."""
MAX_RANKS = 8
"""Ranks that a picture shows; the page shows all."""


def draw_timeline(timeline: Timeline, title: str = "", max_ranks: int = MAX_RANKS) -> Figure:
    """A figure with two lanes per rank: computing above, messages below, one colour per kind; the critical path is
    underlined where it is known.

    Args:
        timeline: of one iteration.
        title: above it.
        max_ranks: how many ranks are shown.
    """
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ranks = timeline.ranks[:max_ranks]
    figure = Figure(figsize=(7.2, 1.1 + 0.62 * max(1, len(ranks))), layout="constrained")
    axes = figure.add_subplot()
    ticks: list[tuple[float, str]] = []
    for row, rank in enumerate(ranks):
        for lane, name in enumerate(LANES):
            bottom = 2.4 * row + lane
            ticks.append((bottom + 0.45, f"{rank_name(timeline, rank)} {name}" if lane == 0 else name))
            for kind in KINDS:
                spans = [s for s in timeline.spans if (s.rank, s.lane, s.kind) == (rank, name, kind)]
                bars = [(1e3 * s.start_s, 1e3 * s.duration_s) for s in spans]
                axes.broken_barh(bars, (bottom, 0.9), color=KIND_COLORS[kind], linewidth=0)
            path = [s for s in timeline.spans if (s.rank, s.lane) == (rank, name) and s.critical]
            lines = [(1e3 * s.start_s, 1e3 * s.duration_s) for s in path]
            axes.broken_barh(lines, (bottom + 0.92, 0.1), color="black", linewidth=0)
    axes.set_yticks([position for position, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(2.4 * len(ranks) - 0.4, -0.1)
    axes.set_xlim(0, 1e3 * timeline.iteration_s or 1)
    axes.set_xlabel("milliseconds from the start of the iteration")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    present = {span.kind for span in timeline.spans}
    handles: list[Artist] = [Patch(color=KIND_COLORS[kind], label=kind) for kind in KINDS if kind in present]
    if any(span.critical for span in timeline.spans):
        handles.append(Line2D([], [], color="black", label="critical path"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    more = _count(timeline, timeline.ranks) - _count(timeline, ranks)
    if title or more:
        text = title + (f" ({more} more ranks not shown)" if more else "")
        axes.set_title(textwrap.fill(text, TITLE_CHARACTERS), loc="left", fontsize="medium")
    return figure


def write_png(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write :func:`draw_timeline` as a PNG."""
    draw_timeline(timeline, title).savefig(path, dpi=160, metadata={"Software": None})


def write_html(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write :func:`page_text` of one timeline."""
    path.write_text(page_text({timeline.source: timeline}, title))


def page_text(views: Mapping[str, Timeline], title: str = "", below: str = "") -> str:
    """A page that shows all spans of all ranks, zooms, moves and names them; it loads nothing else.

    Args:
        views: timelines of one iteration by what they are, at most two (measured, simulated); one below the other.
        title: above them.
        below: what follows them, as HTML.
    """
    before, after = (resources.files("experiments") / "timeline.html").read_text().split("__DATA__")
    text = json.dumps(_page_data(views, title), separators=(",", ":"))
    # Inside a script element only "<" could end the data early.
    return before.replace("__BELOW__\n", below) + text.replace("<", "\\u003c") + after


def _page_data(views: Mapping[str, Timeline], title: str) -> dict[str, Any]:
    several = len(views) > 1
    exposed = {name: timeline.breakdown_s() for name, timeline in views.items()}
    first, *others = views
    hidden = views[first].hidden_s()
    present = {span.kind for timeline in views.values() for span in timeline.spans}
    kinds = [k for k in (*KINDS, OTHER) if k in present or any(of[k] > 0 for of in exposed.values())]
    lanes = [(name, rank, lane) for name, timeline in views.items() for rank in timeline.ranks for lane in LANES]
    row = {lane: number for number, lane in enumerate(lanes)}
    return {
        "title": (title or "Timeline") + _alike(views[first]),
        "total_us": max(_us(timeline.iteration_s) for timeline in views.values()) or 1.0,
        "views": [{"name": name, "total_us": _us(timeline.iteration_s)} for name, timeline in views.items()],
        "kinds": [
            {
                "name": k,
                "color": KIND_COLORS[k],
                "exposed_us": _us(exposed[first][k]),
                "hidden_us": _us(hidden.get(k, 0.0)),
                "others_us": [_us(exposed[name][k]) for name in others],
            }
            for k in kinds
        ],
        "lanes": [
            {
                "long": f"{rank_name(views[name], rank)} {lane}",
                "short": f"{rank} {'comp' if lane == COMPUTE_LANE else 'comm'}",
                "rank": rank_name(views[name], rank),
                **({"view": name} if several and (rank, lane) == (views[name].ranks[0], LANES[0]) else {}),
            }
            for name, rank, lane in lanes
        ],
        "spans": [
            [
                *(row[name, s.rank, s.lane], kinds.index(s.kind), s.name, _us(s.start_s), _us(s.duration_s)),
                *([1] if s.critical else []),
            ]
            for name, timeline in views.items()
            for s in timeline.spans
        ],
    }


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def _count(timeline: Timeline, ranks: Iterable[int]) -> int:
    """How many ranks these stand for."""
    return sum(timeline.rank_counts.get(rank, 1) for rank in ranks)


def _alike(timeline: Timeline) -> str:
    """What a page that shows all ranks of a timeline does not show: those that others stand for."""
    more = _count(timeline, timeline.ranks) - len(timeline.ranks)
    return f" ({more} more ranks are like one that is shown)" if more else ""


def rank_name(timeline: Timeline, rank: int) -> str:
    """A rank for people, with how many it stands for."""
    count = timeline.rank_counts.get(rank, 1)
    return f"rank {rank}" + (f" (of {count} alike)" if count > 1 else "")
