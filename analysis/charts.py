"""Charts as SVG text: no libraries, no scripts; colours come from the page's variables, so that they follow its theme.

Every function takes a width in pixels at which its texts have their natural size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from analysis.looks import look
from analysis.tables import shortened
from experiments.timeline_ranks import Shown
from kfac.timeline import COMPUTE_LANE, KIND_COLORS, KINDS, OTHER, Span, Timeline

MARKED = 4
"""A line that is not marked at each point is at so many."""
BEYOND = 1e100
"""Numbers from here on, and what is none, are not drawn."""
POINTS = 160
"""A longer line is averaged down to so many points."""
TEXT_PX, LINE_PX, STRIPE_PX = 12, 1.8, 2.8
LANE_PX, RANK_GAP_PX = 16, 6
LABEL = 32
"""Characters of a label beside a bar."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        label: for the tooltip.
        look: the number of its look (:func:`analysis.looks.look`).
        points: x and y.
        dots: whether each point is marked, and nothing averaged.
    """

    label: str
    look: int
    points: Sequence[tuple[float, float]]
    dots: bool = False


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, *, width: int = 460, height: int = 270, whole: bool = False
) -> str:
    """Lines over a common axis; the vertical one is logarithmic where values span more than a factor of 30.

    Args:
        lines: to draw, those of the first below.
        x_label, y_label: of the axes.
        width, height: in pixels.
        whole: whether there is nothing between whole numbers on the horizontal axis.
    """
    lines = [line for line in map(_finite, lines) if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    log = min(ys) > 0 and max(ys) / min(ys) > 30
    scale_y = math.log10 if log else float
    left, right, top, bottom = 66, 10, 10, 40
    x_low, x_high = min(0.0, *xs), max(xs) or 1.0
    y_low, y_high = scale_y(min(ys)), scale_y(max(ys))
    if not log and 0 < y_low < 0.6 * y_high:
        y_low = 0.0
    room = 0.05 * (y_high - y_low) or max(0.5, 0.05 * abs(y_low))
    y_high += room
    y_low -= 0.0 if y_low == 0 else room

    def px(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low or 1) * (width - left - right)

    def py(y: float) -> float:
        return top + (y_high - scale_y(y)) / (y_high - y_low) * (height - top - bottom)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">']
    for tick in (t for t in _ticks(x_low, x_high, 5) if not whole or t == round(t)):
        parts.append(_vertical(px(tick), top, height - bottom))
        parts.append(_text(px(tick), height - bottom + 16, _number(tick), "middle", "soft"))
    powers = [10.0**k * m for k in range(math.floor(y_low), math.ceil(y_high) + 1) for m in (1, 2, 5)] if log else []
    y_ticks = [t for t in powers if y_low <= math.log10(t) <= y_high] if log else _ticks(y_low, y_high, 5)
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(_text(left - 6, py(tick) + 4, _number(tick), "end", "soft"))
    parts.append(_text((left + width - right) / 2, height - 6, x_label, "middle", "soft"))
    parts.append(f'<g transform="translate(12 {(top + height - bottom) / 2:.0f}) rotate(-90)">')
    parts.append(_text(0, 0, y_label, "middle", "soft") + "</g>")
    for number, line in enumerate(lines):
        points = line.points if line.dots else _thinned(line.points)
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        # Lines that lie on one another, as those of schedules that compute the same, show as stripes.
        covering = sum(list(other.points) == list(line.points) for other in lines[number + 1 :])
        width_px = LINE_PX + STRIPE_PX * min(covering, 3)
        drawn = look(line.look)
        style = drawn.stroke(width_px)
        parts.append(
            f'<polyline class="line" style="{style}" points="{path}"><title>{escape(line.label)}</title></polyline>'
        )
        for x, y in points if line.dots else _places(points, line.look) if drawn.mark else ():
            parts.append(drawn.mark_at(px(x), py(y), escape(f"{line.label}: {_number(x)}, {y:.4g}")))
    return "".join([*parts, "</svg>"])


def breakdown_chart(bars: Mapping[str, Mapping[str, float]], *, width: int) -> str:
    """Stacked horizontal bars: exposed milliseconds of each kind.

    Args:
        bars: seconds by kind, by label.
        width: in pixels.
    """
    longest = max((sum(of.values()) for of in bars.values()), default=0.0)
    if not longest:
        return ""
    above = width < 600  # labels above the bars where there is no room beside them
    left = 0 if above else min(260, 8 * max(map(len, bars)) + 10)
    shown = {label: shortened(label, LABEL) for label in bars}
    row = 44 if above else 30
    height, top = row * len(bars) + 26, 4
    scale = (width - left - 84) / longest
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="exposed time per kind">']
    for tick in _ticks(0, 1e3 * longest, 4 if above else 7):
        parts.append(_vertical(left + tick / 1e3 * scale, top, height - 22))
        parts.append(
            _text(
                left + tick / 1e3 * scale, height - 6, f"{_number(tick)} ms", "start" if not tick else "middle", "soft"
            )
        )
    for number, (label, of) in enumerate(bars.items()):
        y = top + number * row + (16 if above else 0)
        name = shown[label]
        parts.append(_text(0, y - 4, name) if above else _text(left - 8, y + 16, name, "end"))
        x = float(left)
        for kind in (*KINDS, OTHER):
            length = of.get(kind, 0.0) * scale
            if length > 0:
                tip = f"{label}, {kind}: {1e3 * of[kind]:.2f} ms exposed"
                parts.append(_bar(x, y, length, 22, kind, tip))
                x += length
        parts.append(_text(x + 6, y + 16, f"{1e3 * sum(of.values()):.1f} ms", css="soft"))
    return "".join([*parts, "</svg>"])


def timeline_chart(timeline: Timeline, shown: Sequence[Shown], *, width: int, until_s: float) -> str:
    """Two lanes per rank: computing above, messages below.

    Args:
        timeline: of one iteration.
        shown: the ranks that are drawn (:func:`experiments.timeline_ranks.shown_ranks`).
        width: in pixels.
        until_s: where the axis ends, so that timelines can be compared.
    """
    narrow = width < 600
    left, right, top = (46 if narrow else 120), 8, 4
    block = 2 * LANE_PX + RANK_GAP_PX
    height = top + block * len(shown) + 22
    scale = (width - left - right) / (until_s or 1.0)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="timeline">']
    for tick in _ticks(0, 1e3 * until_s, 4 if narrow else 8):
        x = left + tick / 1e3 * scale
        parts.append(_vertical(x, top, height - 20))
        parts.append(_text(x, height - 5, f"{_number(tick)} ms", "start" if not tick else "middle", "soft"))
    end = left + timeline.iteration_s * scale
    parts.append(f'<line class="end" x1="{end:.1f}" x2="{end:.1f}" y1="{top}" y2="{height - 20}"/>')
    for number, one in enumerate(shown):
        y = top + number * block
        name = f"{one.rank}" if narrow else f"rank {one.rank}"
        remarks = [] if narrow else [remark for remark in one.remark.split(", ") if remark]
        for line, text in enumerate((name, *remarks)):
            parts.append(_text(left - 6, y + LANE_PX + 4 + (line - len(remarks) / 2) * TEXT_PX, text, "end"))
        spans = [s for s in timeline.spans if s.rank == one.rank and s.duration_s > 0]
        for span in _merged(spans, 0.4 / scale):
            lane = y + (0 if span.lane == COMPUTE_LANE else LANE_PX)
            tip = f"{span.kind}: {span.name}, {1e3 * span.duration_s:.3f} ms from {1e3 * span.start_s:.3f} ms"
            parts.append(_bar(left + span.start_s * scale, lane, span.duration_s * scale, LANE_PX - 1, span.kind, tip))
    return "".join([*parts, "</svg>"])


def _merged(spans: Sequence[Span], gap_s: float) -> list[Span]:
    """Neighbours of one lane and kind that cannot be told apart at this size, as one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.lane, s.start_s)):
        last = merged[-1] if merged else None
        if last and (last.lane, last.kind) == (span.lane, span.kind) and span.start_s - last.end_s < gap_s:
            name = last.name if last.name.endswith(" ...") else f"{last.name} ..."
            short = last.duration_s < 4 * gap_s and span.duration_s < 4 * gap_s
            if short:
                end = max(last.end_s, span.end_s)
                merged[-1] = Span(last.rank, last.lane, last.kind, name, last.start_s, end)
                continue
        merged.append(span)
    return merged


def _bar(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}" height="{height:g}"'
    color = "var(--other)" if kind == OTHER else KIND_COLORS[kind]
    return f'<rect {box} fill="{color}"><title>{escape(tip)}</title></rect>'


def _vertical(x: float, top: float, bottom: float) -> str:
    return f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    style = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _finite(line: Line) -> Line:
    points = [(x, y) for x, y in line.points if abs(x) < BEYOND and abs(y) < BEYOND]
    return Line(line.label, line.look, points, line.dots)


def _places(points: Sequence[tuple[float, float]], number: int) -> list[tuple[float, float]]:
    """Where a line is marked; lines that lie on one another are not marked at the same places."""
    shift = (number * 3 % 8 + 0.5) / 8
    return [points[min(len(points) - 1, int(len(points) * (i + shift) / MARKED))] for i in range(MARKED)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of equal numbers of neighbours: a long noisy line would hide others."""
    size = math.ceil(len(points) / POINTS)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, about so many."""
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0e}"
