"""TensorBoard: event files inside the record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.timeline_view import draw_timeline
from experiments.tracking.facts import RunFacts
from experiments.tracking.interface import WHEN, RecordedIteration, flat, scalars, time_shares

FLUSH_S = 20
"""Seconds between writes to the file; each at once would cost more than all the rest."""


class TensorboardSink:
    """Scalars over iterations, timelines as pictures, everything else as text.

    Args:
        facts: of the run.

    Raises:
        ImportError: if tensorboardX is not installed.
    """

    def __init__(self, facts: RunFacts) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError("needs tensorboardX (pip install 'spdkfac[trackers]')") from error
        self._facts, self._open = facts, SummaryWriter
        self._writer: Any = None

    def _at(self, iteration: int) -> Any:
        """The writer; after a restart it hides what the run repeats, so it opens with the first iteration."""
        if self._writer is None:
            purge = iteration if self._facts.restarts else None
            self._writer = self._open(str(self._facts.path / "tensorboard"), purge_step=purge, flush_secs=FLUSH_S)
            self._text("config", self._facts.config, iteration)
            self._text("segments", self._facts.segments, iteration)
        return self._writer

    def _text(self, name: str, data: Any, iteration: int = 0) -> None:
        indented = json.dumps(data, indent=1).replace("\n", "\n    ")
        self._at(iteration).add_text(name, f"    {indented}", iteration)

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Scalars."""
        for row in rows:
            writer = self._at(row["iter"])
            for path, value in scalars(row).items():
                writer.add_scalar(path, value, row["iter"], walltime=row.get(WHEN))

    def summary(self, values: Mapping[str, Any]) -> None:
        """As text."""
        self._text("summary", flat(values))

    def timeline(self, recorded: RecordedIteration) -> None:
        """Seconds per kind as scalars, the timeline as a picture."""
        writer = self._at(recorded.iteration)
        for path, seconds in time_shares(recorded.measured).items():
            writer.add_scalar(path, seconds, recorded.iteration)
        for timeline in filter(None, (recorded.measured, recorded.simulated)):
            name = f"timeline/{timeline.source}"
            writer.add_figure(name, draw_timeline(timeline, recorded.title), recorded.iteration)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """As Markdown."""
        lines = [columns, ["--"] * len(columns), *rows]
        self._at(0).add_text(name, "\n".join("|" + "|".join(map(str, line)) + "|" for line in lines), 0)

    def files(self, paths: Sequence[Path]) -> None:
        """They lie beside the event files already."""

    def alert(self, title: str, text: str) -> None:
        """As text."""
        self._text("alert", f"{title}: {text}")

    def finish(self, status: str) -> None:
        """Close the file."""
        self._text("end_reason", status)
        self._writer.close()
