"""What a finished run comes to: seconds per iteration and kind, final accuracy, the timeline as pictures."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.load import worst_load
from experiments.records import RunRecord, write_text
from experiments.simulated import simulated_timeline
from experiments.timeline_view import page_text, write_png
from kfac.timeline import Timeline

logger = logging.getLogger(__name__)

METRICS = ("accuracy", "squared_error")
"""Of the objectives."""


def summarise(record: RunRecord, warmup: int, timelines: Mapping[int, Timeline] | None = None) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        record: of the run.
        warmup: first iterations that the times leave out (unless there are no others).
        timelines: of the recorded iterations; None: :func:`merged_timelines`.
    """
    rows = record.whole_rows()
    trained = [row for row in rows if row["kind"] == "train"]
    evaluated = [row for row in rows if row["kind"] == "eval"]
    seconds = [row["iteration_s"] for row in trained if isinstance(row.get("iteration_s"), (int, float))]
    timelines = merged_timelines(record) if timelines is None else timelines
    recorded = list(timelines.values())
    last = evaluated[-1] if evaluated else {}
    load = worst_load(record)
    return {
        "iterations": len(trained),
        "iteration_s": _quartiles(seconds[warmup:] or seconds),
        "breakdown_s": _mean([timeline.breakdown_s() for timeline in recorded]),
        "hidden_s": _mean([timeline.hidden_s() for timeline in recorded]),
        "recorded_iterations": list(timelines),
        "train_loss": trained[-1].get("loss") if trained else None,
        "eval_loss": last.get("loss"),
        "eval_accuracy": None,  # of a model that classifies
        **{f"eval_{name}": last[name] for name in METRICS if name in last},
        **({} if load is None else {"load": load}),
    }


def describe_metric(name: str, value: float) -> str:
    """A metric in words."""
    return f"accuracy {100 * value:.1f} %" if name == "accuracy" else f"{name.replace('_', ' ')} {value:.4f}"


def merged_timelines(record: RunRecord) -> dict[int, Timeline]:
    """One timeline of all ranks per recorded iteration; those that cannot be read are left out, with one warning."""
    merged, damaged = {}, []
    for iteration, paths in record.timeline_paths().items():
        try:
            merged[iteration] = Timeline.merge(map(Timeline.from_chrome_trace, paths))
        except Exception as error:  # a file may hold anything
            damaged.append(f"iteration {iteration} ({error})")
    if damaged:
        logger.warning("%s: damaged timelines are left out, %s", record.path / "timelines", ", ".join(damaged))
    return merged


def render_timelines(record: RunRecord, timelines: Mapping[int, Timeline] | None = None) -> Timeline | None:
    """Draw the last recorded iteration into ``timeline.png`` and ``timeline.html``; None if none was recorded.

    The page also shows the simulation of the same plan, where the record holds what it takes.
    """
    timelines = merged_timelines(record) if timelines is None else timelines
    if not timelines:
        return None
    last = max(timelines)
    title = f"{record.head['name']}: iteration {last}, measured"
    write_png(timelines[last], record.path / "timeline.png", title)
    simulated = simulated_timeline(record)
    views = {"measured": timelines[last], **({} if simulated is None else {"simulated": simulated})}
    write_text(record.path / "timeline.html", page_text(views, f"{record.head['name']}: iteration {last}"))
    return timelines[last]


def _quartiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    q25, median, q75 = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median": median, "q25": q25, "q75": q75, "n": len(seconds)}


def _mean(values: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(value[key] for value in values) for key in values[0]} if values else {}
