"""All sinks of a run as one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.records import FAILED, FINISHED, RunRecord
from experiments.redaction import redact
from experiments.simulated import simulated_timeline
from experiments.summary import merged_timelines
from experiments.tracking.facts import RunFacts
from experiments.tracking.guard import Guard
from experiments.tracking.interface import WHEN, RecordedIteration, Sink, time_shares
from experiments.tracking.settings import OFF, TrackingSettings

logger = logging.getLogger(__name__)

BATCH_S, BATCH_ROWS = 10.0, 1000
"""Rows are handed over when the first has waited so long, or there are so many: a thread that wakes up, and W&B's
process that is given work, cost a busy machine more than the rows themselves."""
LAST_WORDS_S = 5.0
"""How long the sinks may take to end a run that did not finish: an error, or a machine taken away, does not wait."""
SPARE_S = 5.0
"""Added where a sink has the same limit itself, so that its own message comes first."""
FILES = (
    *("run.json", "config.json", "plan.json", "choice.json", "model_profile.json", "cluster_profile.json"),
    *("environment.json", "code.diff", "summary.json", "timeline.html", "timeline.png"),
)
"""What sinks that keep files get of a record; metrics and timelines go their own way."""


class Tracker:
    """The sinks of one rank; with none, everything is for nothing.

    Args:
        sinks: how to open each, by name.
        settings: how long they may take.
    """

    def __init__(self, sinks: Mapping[str, Callable[[], Sink]], settings: TrackingSettings) -> None:
        self._settings = settings
        self._rows: list[Mapping[str, Any]] = []
        self._since_s = 0.0  # when the first of the rows came
        self._guards = [Guard(name, open_sink) for name, open_sink in sinks.items()]
        self._wait(settings.init_timeout_s + SPARE_S, "start")

    @property
    def working(self) -> tuple[str, ...]:
        """The names of the sinks that take part."""
        return tuple(guard.name for guard in self._guards if guard.works)

    def log(self, row: Mapping[str, Any]) -> None:
        """Keep a metrics row until it is handed over."""
        if self._guards:
            if not self._rows:
                self._since_s = time.monotonic()
            self._rows.append({WHEN: time.time(), **row})

    def offer(self) -> None:
        """:meth:`flush` if it is time; to be called between timed iterations."""
        if self._rows and (len(self._rows) >= BATCH_ROWS or time.monotonic() - self._since_s >= BATCH_S):
            self.flush()

    def flush(self) -> None:
        """Hand over the rows, and come back when the sinks have taken them; outside of timed iterations only."""
        rows, self._rows = self._rows, []
        if rows:
            self._each(lambda sink: sink.log(rows), "take rows")

    def summary(self, values: Mapping[str, Any]) -> None:
        """The content of ``summary.json``."""
        self._each(lambda sink: sink.summary(values), "take the summary")

    def timelines(self, record: RunRecord) -> None:
        """The record's timelines, their breakdowns as a table, and the record's files."""
        if not self.working:
            return
        for recorded in recorded_iterations(record):
            self.timeline(recorded)
        columns, rows = breakdown_rows(record)
        if rows:
            self._each(lambda sink: sink.table("breakdown", columns, rows), "take a table")
        self.files(record_files(record))

    def timeline(self, recorded: RecordedIteration) -> None:
        """One recorded iteration."""
        self._each(lambda sink: sink.timeline(recorded), "take a timeline")

    def files(self, paths: Sequence[Path]) -> None:
        """Files of the record."""
        self._each(lambda sink: sink.files(paths), "take files")

    def alert(self, title: str, text: str) -> None:
        """Somebody should look; without secrets."""
        self._each(lambda sink: sink.alert(title, redact(text)), "take an alert", LAST_WORDS_S)

    def failed(self, error: BaseException) -> None:
        """The run is about to end with this error."""
        self.flush()
        self.alert(f"{FAILED}: {type(error).__name__}", str(error) or type(error).__name__)

    def finish(self, status: str, *, patient: bool = False) -> None:
        """End all sinks in time.

        Args:
            status: finished, interrupted or failed.
            patient: whether a run that did not finish may take as long as one that did.
        """
        self.flush()
        limit_s = self._settings.finish_timeout_s + SPARE_S if patient or status == FINISHED else LAST_WORDS_S
        self._each(lambda sink: sink.finish(status), "finish", limit_s)
        for guard in self._guards:
            guard.end()

    def _each(self, action: Callable[[Sink], None], what: str, limit_s: float | None = None) -> None:
        for guard in self._guards:
            guard.post(action)
        self._wait(self._settings.call_timeout_s if limit_s is None else limit_s, what)

    def _wait(self, limit_s: float, what: str) -> None:
        for guard in self._guards:
            guard.wait(limit_s, what)


def open_tracker(settings: TrackingSettings, record: RunRecord, rank: int = 0) -> Tracker:
    """The tracker of a rank: that of rank 0 has all sinks, the others have W&B if ``all_ranks`` asks for it.

    Args:
        settings: which sinks.
        record: of the run.
        rank: of this process.
    """
    sinks: dict[str, Callable[[], Sink]] = {}
    if rank == 0 or settings.all_ranks:
        facts = RunFacts.of(record, rank)
        if settings.wandb != OFF:
            sinks["W&B"] = lambda: _wandb(settings, facts)
        if settings.tensorboard and rank == 0:
            sinks["TensorBoard"] = lambda: _tensorboard(facts)
        if settings.trackio and rank == 0:
            sinks["trackio"] = lambda: _trackio(settings, facts)
    return Tracker(sinks, settings)


def _wandb(settings: TrackingSettings, facts: RunFacts) -> Sink:
    from experiments.tracking.wandb_sink import WandbSink

    return WandbSink(settings, facts)


def _tensorboard(facts: RunFacts) -> Sink:
    from experiments.tracking.tensorboard_sink import TensorboardSink

    return TensorboardSink(facts)


def _trackio(settings: TrackingSettings, facts: RunFacts) -> Sink:
    from experiments.tracking.trackio_sink import TrackioSink

    return TrackioSink(settings, facts)


def recorded_iterations(record: RunRecord) -> list[RecordedIteration]:
    """The record's timelines, each beside the simulation of the same plan."""
    simulated = simulated_timeline(record)
    return [
        RecordedIteration(i, measured, simulated, f"{record.head['name']}: iteration {i}")
        for i, measured in merged_timelines(record).items()
    ]


def breakdown_rows(record: RunRecord) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows of a table: seconds of each kind in each recorded iteration."""
    rows = [
        (i, path.partition("/")[2], path.partition("_")[0], seconds)
        for i, timeline in merged_timelines(record).items()
        for path, seconds in time_shares(timeline).items()
        if "/" in path and seconds > 0
    ]
    return ("iter", "kind", "time", "seconds"), rows


def record_files(record: RunRecord) -> list[Path]:
    """The record's files that tell what the run was."""
    return [path for name in FILES if (path := record.path / name).is_file()]
