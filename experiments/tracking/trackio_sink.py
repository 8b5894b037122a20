"""Trackio: a local data base per sweep, with a dashboard that needs no network (``trackio show``)."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tracking.facts import RunFacts
from experiments.tracking.interface import RecordedIteration, flat, scalars, time_shares
from experiments.tracking.settings import TrackingSettings

FOLDER = "trackio"
"""Beside the sweep's records; ``TRACKIO_DIR`` for trackio's commands."""


class TrackioSink:
    """Scalars over iterations; summary and tables as further rows.

    Args:
        settings: the project.
        facts: of the run.

    Raises:
        ImportError: if trackio is not installed.
    """

    def __init__(self, settings: TrackingSettings, facts: RunFacts) -> None:
        os.environ["TRACKIO_DIR"] = str((facts.path.parent / FOLDER).resolve())  # read when it is imported
        try:
            import trackio
        except ImportError as error:
            raise ImportError("needs trackio (pip install 'spdkfac[trackers]')") from error
        self._trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # it advertises its dashboard
            self._run = trackio.init(
                settings.project,
                name=facts.id,
                group=facts.group,
                config={**facts.config, "restarts": facts.restarts, "segments": list(facts.segments)},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Each at its iteration."""
        for row in rows:
            self._run.log(scalars(row), step=row["iter"])

    def summary(self, values: Mapping[str, Any]) -> None:
        """One more row, under ``summary/``."""
        numbers = {f"summary/{k}": v for k, v in flat(values).items() if isinstance(v, (int, float))}
        if numbers:
            self._run.log(numbers)

    def timeline(self, recorded: RecordedIteration) -> None:
        """Seconds per kind; the pictures lie in the record."""
        self._run.log(time_shares(recorded.measured), step=recorded.iteration)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """The record holds what it was made from: its seconds are scalars here already."""

    def files(self, paths: Sequence[Path]) -> None:
        """They lie in the record already."""

    def alert(self, title: str, text: str) -> None:
        """Trackio's own alert."""
        self._trackio.context_vars.current_run.set(self._run)
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.alert(title, text, level=self._trackio.AlertLevel.ERROR)

    def finish(self, status: str) -> None:
        """Wait until everything is in the data base."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
