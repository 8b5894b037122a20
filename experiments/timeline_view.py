"""Timelines to look at: a picture for a paper, and a page of its own to zoom into (no network, no libraries)."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.timeline_ranks import Shown, said_of, shown_ranks, without_repeats
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, KIND_COLORS, KINDS, OTHER, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LANES = (COMPUTE_LANE, COMMUNICATION_LANE)
TITLE_CHARACTERS = 78
"""Of a line above a picture."""
MAX_RANKS = 8
"""Ranks that a picture shows; the page shows all that differ."""
BLOCK = 2.4
"""From rank to rank, in heights of a lane."""
LANE_NAMES_PT = 74.0
"""Room for the names of lanes, right of the ranks'."""
LEAST_BAR = 1 / 1000
"""Of the iteration: shorter spans are drawn this long, about a pixel, so that nothing in the legend is invisible."""


def draw_timeline(timeline: Timeline, title: str = "", max_ranks: int = MAX_RANKS) -> Figure:
    """A figure with two lanes per rank: computing above, messages below, one colour per kind; the critical path is
    underlined where it is known.

    Args:
        timeline: of one iteration.
        title: above it.
        max_ranks: how many ranks are shown; where there are more, those that differ
            (:func:`experiments.timeline_ranks.shown_ranks`).
    """
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = shown_ranks(timeline, max_ranks)
    row_of = {one.rank: row for row, one in enumerate(shown)}
    spans = [span for span in timeline.spans if span.rank in row_of and span.duration_s > 0]
    total_ms = 1e3 * timeline.iteration_s or 1.0
    least_ms = total_ms * LEAST_BAR
    figure = Figure(figsize=(7.2, 1.1 + 0.62 * max(1, len(shown))), layout="constrained")
    axes = figure.add_subplot()
    bars: dict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    critical: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        place = row_of[span.rank], LANES.index(span.lane)
        bars[*place, span.kind].append((1e3 * span.start_s, max(least_ms, 1e3 * span.duration_s)))
        if span.critical:
            critical[place].append((1e3 * span.start_s, 1e3 * span.duration_s))
    for (row, lane, kind), of_kind in bars.items():
        axes.broken_barh(of_kind, (BLOCK * row + lane, 0.9), color=KIND_COLORS[kind], linewidth=0)
    for (row, lane), of_lane in critical.items():
        axes.broken_barh(of_lane, (BLOCK * row + lane + 0.92, 0.1), color="black", linewidth=0)
    lanes = [(BLOCK * row + lane + 0.45, name) for row in range(len(shown)) for lane, name in enumerate(LANES)]
    axes.set_yticks([position for position, _ in lanes], [name for _, name in lanes], minor=True, fontsize=8)
    names = [f"rank {one.rank}" + "".join(f"\n{part}" for part in one.remark.split(", ") if part) for one in shown]
    axes.set_yticks([BLOCK * row + 0.95 for row in range(len(shown))], names, fontsize=8)
    axes.tick_params(axis="y", which="both", length=0)
    axes.tick_params(axis="y", which="major", pad=LANE_NAMES_PT)
    axes.set_ylim(BLOCK * max(1, len(shown)) - 0.4, -0.1)
    axes.set_xlim(0, total_ms)
    axes.set_xlabel("time from the start of the iteration [ms]")
    axes.spines[["top", "right", "left"]].set_visible(False)
    present = {span.kind for span in spans}
    handles: list[Artist] = [Patch(color=KIND_COLORS[kind], label=kind) for kind in KINDS if kind in present]
    if critical:
        handles.append(Line2D([], [], color="black", label="critical path"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    text = "; ".join(filter(None, (title, said_of(shown, timeline))))
    if text:
        figure.suptitle(textwrap.fill(text, TITLE_CHARACTERS), x=0.01, ha="left", fontsize="medium")
    return figure


def write_png(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write :func:`draw_timeline` as a PNG."""
    draw_timeline(timeline, title).savefig(path, dpi=160, metadata={"Software": None})


def write_html(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write :func:`page_text` of one timeline."""
    path.write_text(page_text({timeline.source: timeline}, title))


def page_text(views: Mapping[str, Timeline], title: str = "", below: str = "") -> str:
    """A page that shows all spans of all ranks, zooms, moves and names them; it loads nothing else.

    Ranks that do exactly the same share their lanes.

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
    views = {name: without_repeats(timeline) for name, timeline in views.items()}
    several = len(views) > 1
    exposed = {name: timeline.breakdown_s() for name, timeline in views.items()}
    first, *others = views
    hidden = views[first].hidden_s()
    present = {span.kind for timeline in views.values() for span in timeline.spans if span.duration_s > 0}
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
                "color": "transparent" if k == OTHER else KIND_COLORS[k],
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
            if s.duration_s > 0
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
    return Shown(rank, timeline.rank_counts.get(rank, 1)).name
