"""What a sink can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kfac.timeline import Timeline


@dataclass(frozen=True)
class RecordedIteration:
    """An iteration whose timeline was recorded.

    Args:
        iteration: its number.
        measured: all ranks.
        simulated: the same plan on the cost profile of the run; None where there is none.
        title: for people.
    """

    iteration: int
    measured: Timeline
    simulated: Timeline | None
    title: str


WHEN = "_timestamp"
"""In a row that is handed over: seconds since 1970 when it was logged, since it may have waited; W&B's own name."""


class Sink(Protocol):
    """Where a copy of the record goes. Anything may raise; nothing is called within a timed iteration.

    The keys of scalars are paths (``train/loss``); their axis is the iteration, which a restart repeats.
    """

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of the metrics (see :meth:`experiments.records.RunRecord.log`), those of this run with :data:`WHEN`."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """The content of ``summary.json``."""

    def timeline(self, recorded: RecordedIteration) -> None:
        """One recorded iteration: where its time goes, as numbers and as pictures."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of plain cells."""

    def files(self, paths: Sequence[Path]) -> None:
        """Files of the record."""

    def alert(self, title: str, text: str) -> None:
        """Somebody should look."""

    def finish(self, status: str) -> None:
        """The run ends as ``status``: finished, interrupted or failed."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row by their paths, without ``iter``."""
    kind = row["kind"]
    return {
        key if key == "epoch" else f"{kind}/{key}": value
        for key, value in row.items()
        if key not in ("kind", "iter", WHEN) and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their paths."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
        else:
            found[prefix + key] = value
    return found


def time_shares(timeline: Timeline) -> dict[str, float]:
    """Where an iteration's time goes: exposed and hidden seconds by their paths, and the iteration's."""
    exposed = {f"exposed_s/{kind}": seconds for kind, seconds in timeline.breakdown_s().items()}
    hidden = {f"hidden_s/{kind}": seconds for kind, seconds in timeline.hidden_s().items()}
    return {**exposed, **hidden, "recorded_iteration_s": timeline.iteration_s}
