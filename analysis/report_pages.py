"""A comparison as one HTML file that loads nothing, and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path

from analysis.charts import Line, breakdown_chart, line_chart, timeline_chart
from analysis.comparison import Comparison, Curve, Pictured
from analysis.comparison_tables import all_tables, scaling_lines
from analysis.html_tables import WIDE_PX, html_table
from analysis.looks import LOOKS, look
from analysis.tables import LONGEST, Table, markdown_escape, printable, shortened, to_markdown
from experiments.records import write_text
from experiments.timeline_ranks import said_of, shown_ranks
from experiments.timeline_view import page_text
from kfac.timeline import KIND_COLORS, KINDS, OTHER

NARROW_PX = 350
"""Full-width pictures are drawn twice, and the page shows the one that fits."""
SECTIONS: Mapping[str, str] = {
    "overview": "Overview",
    "breakdown": "Where the time goes",
    "learning": "Learning",
    "timelines": "Timelines",
    "scaling": "Scaling",
    "runs": "All runs",
    "differences": "What was different",
    "provenance": "Where the numbers come from",
}
MAX_RANKS = 4
"""Of a timeline, in a picture."""
MAX_ZOOMABLE_SPANS = 20_000
"""A timeline of more is pictured, but not packed into the file a second time to be zoomed."""


def write_report(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.md``.

    Args:
        comparison: of runs.
        folder: where to.

    Returns:
        both paths.
    """
    tables = all_tables(comparison)
    html, markdown = folder / "report.html", folder / "report.md"
    write_text(html, html_report(comparison, tables))
    write_text(markdown, markdown_report(comparison, tables))
    return html, markdown


def headline(comparison: Comparison) -> str:
    """One line: how many runs of what."""
    runs = comparison.runs
    finished = sum(run.status == "finished" for run in runs)
    models, data = (
        shortened(", ".join(dict.fromkeys(names)), LONGEST)
        for names in ((run.model for run in runs), (run.data for run in runs))
    )
    return (
        f"{len(runs)} run{'s' * (len(runs) != 1)}, {finished} finished: {models} on {data}; "
        f"the latest of {_moment(comparison.latest)}."
    )


def _moment(text: str) -> str:
    """A recorded time for people, in UTC; as it stands where it is none."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return shortened(text, 30) or "unknown time"


def markdown_report(comparison: Comparison, tables: Mapping[str, Table]) -> str:
    """The report's tables; pictures are in the HTML file beside it."""
    parts = [f"# {markdown_escape(comparison.title)}", markdown_escape(headline(comparison))]
    for name, heading in SECTIONS.items():
        if name in tables:
            parts += [f"## {heading}", to_markdown(tables[name]).strip()]
        elif name == "timelines":
            lines = [markdown_escape(_pictured_line(p)) for p in comparison.pictured()]
            parts += [f"## {heading}", "\n".join(lines), "Pictures: report.html."] if lines else []
    if comparison.problems:
        parts += ["## Left out", "\n".join(f"* {markdown_escape(str(problem))}" for problem in comparison.problems)]
    return "\n\n".join(parts) + "\n"


def html_report(comparison: Comparison, tables: Mapping[str, Table]) -> str:
    """The whole page."""
    template = (resources.files("analysis") / "report.html").read_text()
    body = {
        "overview": "",
        "breakdown": _breakdown(comparison),
        "learning": _learning(comparison),
        "timelines": _timelines(comparison.pictured()),
        "scaling": _scaling(comparison),
    }
    sections = []
    for name, heading in SECTIONS.items():
        content = body.get(name, "") + (html_table(tables[name]) if name in tables else "")
        if content:
            sections.append((name, heading, content))
    if comparison.problems:
        items = "".join(f"<li>{escape(str(problem))}</li>" for problem in comparison.problems)
        sections.append(("left-out", "Left out", f"<ul>{items}</ul>"))
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in sections)
    content = "".join(f'<section id="{n}"><h2>{escape(h)}</h2>{c}</section>' for n, h, c in sections)
    title = escape(printable(comparison.title))
    parts = {"TITLE": title, "HEADLINE": escape(headline(comparison)), "NAV": links, "BODY": content}
    return re.sub("__([A-Z]+)__", lambda match: parts[match[1]], template)


def _twice(wide: str, narrow: str) -> str:
    return f"<div class=wide>{wide}</div><div class=narrow>{narrow}</div>"


def _kinds_legend(kinds: Sequence[str]) -> str:
    colors = {**KIND_COLORS, OTHER: "var(--other)"}
    items = "".join(f'<span style="--k:{colors[kind]}">{kind}</span>' for kind in (*KINDS, OTHER) if kind in kinds)
    return f'<div class="legend kinds">{items}</div>'


def _lines_legend(labels: Sequence[str]) -> str:
    items = [f"<span>{look(i).sample()}{escape(label)}</span>" for i, label in enumerate(labels[:LOOKS])]
    if (more := len(labels) - LOOKS) > 0:
        rest = f"{more} other{'s' * (more > 1)}, thin and grey: their names are under the pointer and in the tables"
        items.append(f"<span>{look(LOOKS).sample()}{rest}</span>")
    return f"<div class=legend>{''.join(items)}</div>"


def _breakdown(comparison: Comparison) -> str:
    bars = {group.label: seconds for group in comparison.groups if (seconds := group.breakdown_s())}
    if not bars:
        return ""
    kinds = [kind for kind in (*KINDS, OTHER) if any(of.get(kind, 0) > 0 for of in bars.values())]
    charts = _twice(breakdown_chart(bars, width=WIDE_PX), breakdown_chart(bars, width=NARROW_PX))
    return f"{_kinds_legend(kinds)}{charts}"


def _learning(comparison: Comparison) -> str:
    curves = comparison.curves()
    if not curves:
        return ""
    steps = [Line(c.label, c.group, list(zip(c.steps, c.loss, strict=True))) for c in curves]
    seconds = [Line(c.label, c.group, list(zip(c.seconds, c.loss, strict=True))) for c in curves]
    tests = [Line(c.label, c.group, list(zip(c.eval_steps, c.eval_loss, strict=True)), dots=True) for c in curves]
    timed = [Line(c.label, c.group, list(zip(c.eval_seconds, c.eval_loss, strict=True)), dots=True) for c in curves]
    charts = [
        line_chart(steps, "iterations", "training loss"),
        line_chart(seconds, "seconds in iterations", "training loss"),
        line_chart(tests, "iterations", "test loss"),
        line_chart(timed, "seconds in iterations", "test loss"),
    ]
    figures = "".join(f"<figure>{chart}</figure>" for chart in charts if chart)
    legend = _lines_legend([group.label for group in comparison.groups])
    return f"{legend}<div class=pair>{figures}</div>{_coinciding(comparison, curves)}"


def _coinciding(comparison: Comparison, curves: Sequence[Curve]) -> str:
    """Which schedules learned the same, and so have one line over iterations."""
    by_loss: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for number, of in enumerate(comparison.groups):
        losses = tuple(tuple(curve.loss) for curve in curves if curve.group == number)
        if losses:
            by_loss.setdefault(losses, []).append(of.label)
    same = [", ".join(labels) for labels in by_loss.values() if len(labels) > 1]
    text = "".join(
        f" The losses of {labels} are equal to the last bit: their lines lie on one another." for labels in same
    )
    return f"<p class=note>{escape(text.strip())}</p>" if text else ""


def _scaling(comparison: Comparison) -> str:
    lines = scaling_lines(comparison)
    if all(len(points) < 2 for points in lines.values()):
        return ""
    drawn = [
        Line(label, i, [(w, 1e3 * s) for w, s in points], dots=True) for i, (label, points) in enumerate(lines.items())
    ]
    chart = line_chart(drawn, "ranks", "milliseconds per iteration", whole=True)
    return f"{_lines_legend(list(lines))}<div class=pair><figure>{chart}</figure></div>"


def _pictured_line(p: Pictured) -> str:
    whose = f" with the costs of {p.costs_of}" if p.costs_of else ""
    simulated = f", simulated {1e3 * p.simulated.iteration_s:.2f} ms{whose}" if p.simulated else ", not simulated"
    return f"* {p.label}: iteration {p.iteration} of {p.run}, {1e3 * p.measured.iteration_s:.2f} ms{simulated}"


def _timelines(pictured: Sequence[Pictured]) -> str:
    if not pictured:
        return ""
    until_s = max(view.iteration_s for p in pictured for view in p.views.values())
    shown = {id(view): shown_ranks(view, MAX_RANKS) for p in pictured for view in p.views.values()}
    kinds = {
        span.kind
        for p in pictured
        for view in p.views.values()
        for span in view.spans
        if span.duration_s > 0 and span.rank in {one.rank for one in shown[id(view)]}
    }
    parts = [
        "<p>One iteration of each, all on one scale; above what a rank computes, below what it sends or waits for. "
        "The line marks the iteration's end.</p>",
        _kinds_legend([kind for kind in KINDS if kind in kinds]),
    ]
    for p in pictured:
        parts.append(f"<h3>{escape(p.label)}</h3>")
        for name, view in p.views.items():
            said = said_of(shown[id(view)], view)
            more = f"; {said}" if said else ""
            whose = f" with the costs that {escape(p.costs_of)} measured" if view is p.simulated and p.costs_of else ""
            parts.append(f"<h4>{name}{whose}, {1e3 * view.iteration_s:.2f} ms{more}</h4>")
            wide, narrow = (
                timeline_chart(view, shown[id(view)], width=px, until_s=until_s) for px in (WIDE_PX, NARROW_PX)
            )
            parts.append(_twice(wide, narrow))
        if p.simulated is None:
            parts.append(
                "<h4>not simulated: no run of this model, these ranks and this machine holds cost profiles</h4>"
            )
        if sum(len(view.spans) for view in p.views.values()) <= MAX_ZOOMABLE_SPANS:
            page = escape(page_text(p.views, f"{p.run}: iteration {p.iteration}"), quote=True)
            frame = f'<iframe loading="lazy" title="timeline" srcdoc="{page}"></iframe>'
            parts.append(f"<details><summary>zoom</summary>{frame}</details>")
    return "".join(parts)
