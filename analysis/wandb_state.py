"""What a run's record holds, what W&B holds of it, and the difference."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from experiments.records import RunRecord
from experiments.tracking.facts import tracking_id
from experiments.tracking.tracker import record_files

T = TypeVar("T")
Row = Mapping[str, Any]
TRACES = "trace-"
"""What names of artifacts with timelines begin with."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where in W&B a run lies.

    Args:
        entity: the user or team; None: whoever is logged in.
        project: its project.
        id: the run.
    """

    entity: str | None
    project: str
    id: str

    @classmethod
    def of(cls, record: RunRecord, project: str | None = None, entity: str | None = None) -> Target:
        """That of a record: by its configuration, unless one is given."""
        tracking = (record.read("config.json") or {}).get("tracking") or {}
        return cls(
            entity=entity or tracking.get("entity"),
            project=project or tracking.get("project") or "spdkfac",
            id=tracking_id(record),
        )

    @property
    def path(self) -> str:
        """As W&B's API takes it."""
        return "/".join(part for part in (self.entity, self.project, self.id) if part)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What W&B holds of a run.

    Args:
        exists: whether it knows the run.
        rows: its history.
        files: names and bytes of its files.
        artifacts: names of those that are complete.
        summary: its summary.
        state: finished, failed, ...
        url: for people.
    """

    exists: bool = False
    rows: Sequence[Row] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    artifacts: frozenset[str] = frozenset()
    summary: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What of a record has not arrived.

    Args:
        rows: metrics rows.
        iterations: recorded iterations without timeline.
        files: the record's files that are missing or were other ones.
        media: files that W&B's own history names, and that it does not hold.
        end: whether W&B does not know how the run ended.
    """

    rows: Sequence[Row] = ()
    iterations: Sequence[int] = ()
    files: Sequence[Path] = ()
    media: Sequence[str] = ()
    end: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows or self.iterations or self.files or self.media or self.end)

    def __str__(self) -> str:
        counts = {"rows": self.rows, "timelines": self.iterations, "files": self.files, "media files": self.media}
        parts = [f"{len(found)} {name}" for name, found in counts.items() if found]
        return ", ".join([*parts, "how it ended"] if self.end else parts) or "nothing"


def read_stored(target: Target, timeout_s: float) -> Stored:
    """What W&B's API says of a run.

    Raises:
        ConnectionError: if it does not answer, or refuses.
        ValueError: without a key, or with one that it does not know: to ask again would not help.
    """
    return within(timeout_s, lambda: _read(target, timeout_s))


def _read(target: Target, timeout_s: float) -> Stored:
    import wandb

    try:
        api = wandb.Api(timeout=max(1, int(timeout_s)))
        run = api.run(target.path)
    except Exception as error:
        if "could not find" in str(error).lower():
            return Stored()
        if isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError) and _of_key(str(error)):
            reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
            raise ValueError(
                f"W&B: {reason}. Run `wandb login` once, or set WANDB_API_KEY; for a server of your own "
                "also WANDB_BASE_URL. The records here are complete without it"
            ) from error
        raise ConnectionError(str(error).partition("\n")[0]) from error
    try:
        return Stored(
            exists=True,
            rows=tuple(run.scan_history()),
            files={file.name: int(file.size) for file in run.files(per_page=200)},
            artifacts=frozenset(a.name.partition(":")[0] for a in run.logged_artifacts() if a.state == "COMMITTED"),
            summary={key: run.summary.get(key) for key in ("end_reason", "restarts")},
            state=str(run.state),
            url=str(run.url),
        )
    except Exception as error:
        raise ConnectionError(str(error).partition("\n")[0]) from error


def _of_key(text: str) -> bool:
    """Whether an error says that the key is missing or wrong."""
    return any(words in text for words in ("No API key", "API key must", "API_KEY invalid", "error 401"))


def difference(record: RunRecord, stored: Stored, status: str) -> Difference:
    """What W&B lacks of a record.

    Args:
        record: the truth.
        stored: what W&B holds.
        status: how the run ended.
    """
    held = {(kind, row["iter"]): row for row in stored.rows for kind in ("train", "eval") if f"{kind}/loss" in row}
    rows = [row for row in record.whole_rows() if not _same(row, held.get((row["kind"], row["iter"])))]
    traced = {int(name.rpartition("iter")[2]) for name in stored.artifacts if name.startswith(TRACES)}
    timed = {row.get("iter") for row in stored.rows if "recorded_iteration_s" in row}
    summarised = status == "finished"  # only then are timelines drawn
    iterations = [i for i in record.timeline_paths() if i not in traced & timed] if summarised else []
    files = [p for p in record_files(record) if stored.files.get(f"record/{p.name}") != p.stat().st_size]
    media = [name for name in media_files(stored.rows) if name not in stored.files]
    end = stored.summary.get("end_reason") != status
    return Difference(rows=rows, iterations=iterations, files=files if summarised else [], media=media, end=end)


def media_files(rows: Iterable[Row]) -> list[str]:
    """The files that a history refers to."""
    values = [value for row in rows for value in row.values() if isinstance(value, Mapping)]
    return sorted({str(value["path"]) for value in values if "_type" in value and "path" in value})


def _same(row: Row, held: Row | None) -> bool:
    """Whether W&B's row has the numbers of ours; not a number equals itself."""
    if held is None:
        return False
    for key, value in row.items():
        if key in ("kind", "iter", "epoch") or not isinstance(value, (int, float)):
            continue
        other = held.get(f"{row['kind']}/{key}")
        if isinstance(other, str):  # how it writes NaN and infinity
            other = float(other.lower())
        both_nan = isinstance(other, float) and math.isnan(other) and math.isnan(value)
        if other != value and not both_nan:
            return False
    return True


def within(seconds: float, function: Callable[[], T]) -> T:
    """The value of a function that may hang.

    Raises:
        ConnectionError: if it takes longer; it is left behind then.
        Exception: what it raises.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise ConnectionError(f"no answer within {seconds:g} s")
    return outcome[0]
