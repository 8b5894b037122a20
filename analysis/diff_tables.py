"""The tables of a difference of two timelines, and the page that shows it below both of them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from analysis.sources import Source
from analysis.tables import Cell, Column, Table
from analysis.timeline_diff import Difference, Share, TimelineDiff
from experiments.timeline_view import page_text
from kfac.timeline import COMMUNICATION_KINDS, KIND_COLORS

_MS = 1e3
ROWS = 40
"""Parts that a page shows; the table of the command shows as many as it is asked for."""
NOISE_S = 1e-10
"""Differences below this are rounding."""
_NOTE = (
    "Exposed: what the iteration is longer for; hidden: what runs meanwhile. The differences of exposed time sum to "
    "the difference of the iterations. Averaged over ranks and iterations. #n: the nth message of its kind."
)
_SIDES = ("exposed [ms]", "hidden [ms]", "total [ms]")


def kinds_table(diff: TimelineDiff, names: tuple[str, str]) -> Table:
    """One row per kind: exposed, hidden and total milliseconds of both, and the differences."""
    rows = [(d.kind, *_cells(d)) for d in diff.kinds]
    total = (diff.first_s * _MS, None, None, diff.second_s * _MS, None, None, diff.longer_s * _MS, None, None)
    columns = (Column("kind", align="left"), *_columns(names))
    title = f"{names[1]} against {names[0]}: {diff.longer_s * _MS:+.2f} ms, {_times(diff)}"
    return Table(title, columns, (*rows, ("iteration", *total)), (_NOTE,))


def parts_table(diff: TimelineDiff, names: tuple[str, str], limit: int | None = None) -> Table:
    """One row per layer and message, those that differ most first.

    Args:
        diff: the difference.
        names: of its sides.
        limit: how many rows; the rest is one row, so that nothing is lost.
    """
    shown = list(diff.parts if limit is None else diff.parts[:limit])
    rest = diff.parts[len(shown) :]
    if rest:
        first = sum((d.first for d in rest), Share())
        second = sum((d.second for d in rest), Share())
        shown.append(Difference("", f"{len(rest)} more", first, second))
    rows = tuple((d.kind, d.name, *_cells(d)) for d in shown)
    columns = (Column("kind", align="left"), Column("layer or message", align="left"), *_columns(names))
    return Table("By layer and message", columns, rows)


def _columns(names: tuple[str, str]) -> tuple[Column, ...]:
    sides = [(name, ".2f") for name in names] + [("difference", "+.2f")]
    return tuple(Column(title, spec, group=name) for name, spec in sides for title in _SIDES)


def _cells(d: Difference) -> tuple[Cell, ...]:
    hides = d.kind in (*COMMUNICATION_KINDS, "")  # computing is never hidden

    def of(share: Share) -> tuple[Cell, ...]:
        return share.exposed_s * _MS, share.hidden_s * _MS if hides else None, share.total_s * _MS

    changes = (d.exposed_s, d.hidden_s if hides else None, d.total_s)
    return (*of(d.first), *of(d.second), *(None if s is None else _plain(s) for s in changes))


def _plain(seconds: float) -> float:
    """Milliseconds, without the rounding errors of sums."""
    return 0.0 if abs(seconds) < NOISE_S else seconds * _MS


def _times(diff: TimelineDiff) -> str:
    if not diff.first_s or not diff.second_s:
        return "one of them takes no time"
    ratio = diff.first_s / diff.second_s
    return f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as long"


def diff_page(diff: TimelineDiff, first: Source, second: Source) -> str:
    """A page of its own: both timelines on one axis, below them what differs per kind and per layer and message."""
    names = side_names(first, second)
    views = {name: source.typical for name, source in zip(names, (first, second), strict=True)}
    counts = " and ".join(str(len(source.timelines)) for source in (first, second))
    below = f"<p>A: {escape(names[0])}. B: {escape(names[1])}. #n: the nth message of its kind.</p>"
    below += f"<p>Above: of each side the iteration of median length. Below: averages over {counts} iterations.</p>"
    below += _bars("Difference per kind", diff.kinds)
    below += _bars("Difference per layer and message", diff.parts[:ROWS])
    if len(diff.parts) > ROWS:
        left = sum(d.exposed_s for d in diff.parts[ROWS:]) * _MS
        below += f"<p>{len(diff.parts) - ROWS} more differ by {left:+.2f} ms of exposed time in all.</p>"
    return page_text(views, kinds_table(diff, names).title, f'<section class="diff">{below}<p>{_NOTE}</p></section>')


def side_names(first: Source, second: Source) -> tuple[str, str]:
    """Names of both sides that differ."""
    if first.name != second.name:
        return first.name, second.name
    return f"{first.name} (A)", f"{second.name} (B)"


def _bars(title: str, differences: Sequence[Difference]) -> str:
    """A table whose difference is also a bar: to the left where the second side is faster."""
    longest = max((abs(d.exposed_s) for d in differences), default=0.0) or 1.0
    heads = ("", "A exposed", "A hidden", "B exposed", "B hidden", "B − A exposed [ms]", "")
    head = "".join(f"<th>{text}</th>" for text in heads)
    rows = []
    for d in differences:
        share = 50 * abs(d.exposed_s) / longest
        left = 50 - share if d.exposed_s < 0 else 50
        color = KIND_COLORS[d.kind]
        label = f'<i style="background:{color}"></i>{escape(d.kind)}' + (f": {escape(d.name)}" if d.name else "")
        numbers = (d.first.exposed_s, d.first.hidden_s, d.second.exposed_s, d.second.hidden_s)
        cells = "".join(f"<td>{x * _MS:.2f}</td>" for x in numbers) + f"<td>{_plain(d.exposed_s):+.2f}</td>"
        bar = f'<td class="bar"><b style="left:{left:.2f}%;width:{share:.2f}%;background:{color}"></b></td>'
        rows.append(f"<tr><th>{label}</th>{cells}{bar}</tr>")
    total = (
        f"<tr><th>sum</th><td colspan=4></td><td>{sum(d.exposed_s for d in differences) * _MS:+.2f}</td><td></td></tr>"
    )
    return f"<h2>{title}</h2><table><tr>{head}</tr>{''.join(rows)}{total}</table>"
