"""What a finished run comes to: seconds per iteration and kind, final accuracy, the timeline as pictures."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.records import RunRecord
from experiments.timeline_view import write_html, write_png
from kfac.timeline import Timeline


def summarise(record: RunRecord, warmup: int) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        record: of the run.
        warmup: first iterations that the times leave out (unless there are no others).
    """
    rows = record.rows()
    trained = [row for row in rows if row["kind"] == "train"]
    evaluated = [row for row in rows if row["kind"] == "eval"]
    seconds = [row["iteration_s"] for row in trained]
    timelines = merged_timelines(record)
    last = evaluated[-1] if evaluated else {}
    return {
        "iterations": len(trained),
        "iteration_s": _quartiles(seconds[warmup:] or seconds),
        "breakdown_s": _mean([timeline.breakdown_s() for timeline in timelines]),
        "hidden_s": _mean([timeline.hidden_s() for timeline in timelines]),
        "recorded_iterations": list(record.timeline_paths()),
        "train_loss": trained[-1]["loss"] if trained else None,
        "eval_loss": last.get("loss"),
        "eval_accuracy": last.get("accuracy"),
    }


def merged_timelines(record: RunRecord) -> list[Timeline]:
    """One timeline of all ranks per recorded iteration."""
    return [Timeline.merge(map(Timeline.from_chrome_trace, paths)) for paths in record.timeline_paths().values()]


def render_timelines(record: RunRecord) -> Timeline | None:
    """Draw the last recorded iteration into ``timeline.png`` and ``timeline.html``; None if none was recorded."""
    timelines = merged_timelines(record)
    if not timelines:
        return None
    title = f"{record.head['name']}: iteration {list(record.timeline_paths())[-1]}, measured"
    write_png(timelines[-1], record.path / "timeline.png", title)
    write_html(timelines[-1], record.path / "timeline.html", title)
    return timelines[-1]


def _quartiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    q25, median, q75 = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median": median, "q25": q25, "q75": q75, "n": len(seconds)}


def _mean(values: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(value[key] for value in values) for key in values[0]} if values else {}
