"""Run records: one directory per run that alone reproduces and explains it. Analysis reads nothing else.

``run.json`` says what the run is and how far it came, ``config.json`` the resolved configuration, ``metrics.jsonl`` one
row per training iteration and evaluation, ``timelines/`` one trace per recorded iteration and rank; ``plan.json``,
``choice.json`` (why ``auto`` chose the plan), ``model_profile.json``, ``cluster_profile.json``, ``environment.json``,
``code.diff``, ``load.json`` (how busy the machines were with other things), ``summary.json`` and ``model.pt`` (the
trained model) what their names say; ``checkpoint/`` is there until the run has finished. Every file but the
metrics is replaced as a whole, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from experiments.locks import LOCK, RecordInUseError, is_at, job_facts, take_lock
from experiments.patience import patiently
from experiments.provenance import code_identity, environment_facts, patch_digest
from experiments.redaction import redact, redacted
from experiments.rows import last_rows, read_rows, read_whole_rows

logger = logging.getLogger(__name__)

SCHEMA = 1
RUNNING, FINISHED, FAILED, INTERRUPTED = "running", "finished", "failed", "interrupted"
KEPT = (LOCK, ".rendezvous", "rendezvous")
"""Beginnings of the names of files that starting over leaves alone."""
STATUSES = (RUNNING, FINISHED, FAILED, INTERRUPTED)
FOLDERS = ("timelines", "checkpoint", "logs", "wandb")
_TIMELINE = re.compile(r"iter(\d+)\.rank(\d+)\.json")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: readers see the old text or the new one, also after a crash.

    Secrets of the environment and of the command line are masked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(redact(text))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # as on a full disk, where what was written is in the way
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file as a whole."""
    write_text(path, json.dumps(data, indent=1) + "\n")


class RunRecord:
    """A run's directory.

    Use :meth:`open` to write one and :meth:`load` to read one.

    Args:
        path: the directory.
        head: the content of ``run.json``.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.head = head
        self.patience_s = 0.0
        """For how long a file system that is away or full is waited for (:mod:`experiments.patience`)."""
        self._metrics: IO[str] | None = None
        self._lock: IO[str] | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        run_id: str,
        name: str,
        facts: Mapping[str, Any],
        config: Mapping[str, Any],
        rerun: bool = False,
    ) -> RunRecord:
        """Create a record or continue the one that is there, and lock it for this process.

        Args:
            path: the run's directory.
            run_id: its identity; a record of another identity is not continued.
            name: for people.
            facts: ``schedule``, ``model``, ``data``, ``world_size`` and ``seed``.
            config: the resolved nested configuration.
            rerun: throw away what is there.

        Raises:
            RecordInUseError: if a live process writes it.
            ValueError: if the directory holds the record of another run, or something else.
        """
        path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path)
        try:
            if rerun:
                _empty(path)
            if (path / "run.json").exists():
                record = cls.load(path)
                if record.head["run_id"] != run_id:
                    raise ValueError(f"{path} holds the record of {record.head['run_id']}, not of {run_id}")
                if record.status != FINISHED:
                    record._repair()
            else:
                head = {"schema": SCHEMA, "run_id": run_id, "name": name, "status": INTERRUPTED, **facts}
                head |= {"created": now(), "finished": None, "segments": [], "code": {}, "error": None}
                record = cls(path, head)
                write_json(path / "config.json", redacted(config))
                record._write_head()
        except BaseException:
            lock.close()
            raise
        record._lock = lock
        return record

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read a record.

        Raises:
            ValueError: if there is none, a damaged one, or one of another schema.
        """
        try:
            head = json.loads((path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"no run record in {path}: {error}") from error
        if not isinstance(head, dict):
            raise ValueError(f"{path}/run.json is damaged: no object")
        if head.get("schema") != SCHEMA:
            raise ValueError(f"{path}/run.json has schema {head.get('schema')!r}, this code reads {SCHEMA}")
        _require(path, head, run_id=str, status=str)
        return cls(path, head)

    @property
    def status(self) -> str:
        """One of :data:`STATUSES`; ``running`` also for a run that was killed together with its launcher."""
        return str(self.head["status"])

    @property
    def restarts(self) -> int:
        """How often the run was continued."""
        return max(0, len(self.head["segments"]) - 1)

    def begin_segment(self, **facts: Any) -> bool:
        """Note that the run starts or goes on here and now.

        Args:
            facts: what else to note of this segment.

        Returns:
            Whether the code is the same as in the segment before.
        """
        code, patch = code_identity()
        facts = {"patch": patch_digest(patch), **job_facts(), **facts}
        before = self.head["segments"][-1].get("code") if self.head["segments"] else None
        previous = self.path / "code.diff"
        old = previous.read_bytes() if previous.exists() else b""
        same = before is None or (before == code and old == patch.encode())
        if not self.head["segments"]:
            self.head["code"] = code
        if patch or not same:
            write_text(previous, patch)
        write_json(self.path / "environment.json", environment_facts())
        segment = {"start": now(), "end": None, "host": socket.gethostname(), "end_reason": None, "code": code, **facts}
        self.head["segments"].append(segment)
        self.head |= {"status": RUNNING, "finished": None, "error": None}
        self._write_head()
        return same

    def end_segment(self, status: str, error: Mapping[str, Any] | None = None) -> None:
        """Note that the run ends here: ``finished``, ``failed`` or ``interrupted``.

        Raises:
            ValueError: for another status.
        """
        if status not in STATUSES[1:]:
            raise ValueError(f"status {status!r} is not one of: {', '.join(STATUSES[1:])}")
        moment = now()
        with suppress(ValueError):  # what another process has noted meanwhile stays
            self.head = {**RunRecord.load(self.path).head, **self.head}
        if self.head["segments"]:
            self.head["segments"][-1] |= {"end": moment, "end_reason": status}
        self.head |= {"status": status, "error": dict(error) if error else None}
        self.head["finished"] = moment if status == FINISHED else None
        self._write_head()

    def note(self, **facts: Any) -> None:
        """Add facts to ``run.json``, as ``iterations``, how many the run has."""
        self.head |= facts
        self._write_head()

    def check_ours(self) -> None:
        """Raise RecordInUseError if a later start of the same job has taken the record over.

        That happens where SLURM took a node for dead and started the job again while the first copy lived on.
        """
        if self._lock is not None and not is_at(self._lock, self.path / LOCK):
            raise RecordInUseError(f"{self.path} is continued by a later start of this job: this one ends")

    def write(self, name: str, data: Any) -> None:
        """Replace one of the record's JSON files."""
        patiently(lambda: self._replace(name, data), f"writing {name}", self.patience_s)

    def read(self, name: str) -> Any:
        """The content of one of the record's JSON files, or None."""
        path = self.path / name
        return json.loads(path.read_text()) if path.exists() else None

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a metrics row with at least ``kind`` (``train`` or ``eval``) and ``iter``; it is flushed at once."""
        line = json.dumps(dict(row)) + "\n"
        patiently(lambda: self._append(line), "writing metrics", self.patience_s)

    def sync(self) -> None:
        """Have the rows so far outlive a crash of the machine: before a checkpoint that builds on them."""
        if self._metrics is not None:
            number = self._metrics.fileno()
            patiently(lambda: os.fsync(number), "writing metrics", self.patience_s)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics, one row per kind and iteration.

        Raises:
            ValueError: for a damaged row, naming file and line.
        """
        return last_rows(read_rows(self.path / "metrics.jsonl"))

    def whole_rows(self) -> list[dict[str, Any]]:
        """As :meth:`rows`, but without the damaged ones, which one warning names."""
        return last_rows(read_whole_rows(self.path / "metrics.jsonl"))

    def timeline_path(self, iteration: int, rank: int) -> Path:
        """Where a rank saves the timeline of an iteration."""
        return self.path / "timelines" / f"iter{iteration:06d}.rank{rank}.json"

    def timeline_paths(self) -> dict[int, list[Path]]:
        """The saved timelines of each iteration, in the order of the ranks; files of other names do not count."""
        found: dict[int, dict[int, Path]] = {}
        for path in (self.path / "timelines").glob("iter*.rank*.json"):
            if match := _TIMELINE.fullmatch(path.name):
                found.setdefault(int(match[1]), {})[int(match[2])] = path
        return {i: [found[i][rank] for rank in sorted(found[i])] for i in sorted(found)}

    def close(self) -> None:
        """Release the files and the lock."""
        for file in (self._metrics, self._lock):
            if file is not None:
                with suppress(OSError):  # a row that a full disk has refused already
                    file.close()
        self._metrics = self._lock = None

    def _repair(self) -> None:
        """Remove damaged rows, and what a crash left of the last one: the next one starts on a line of its own."""
        _require(self.path, self.head, name=str, created=str, segments=list)
        for folder in (self.path / name for name in FOLDERS):
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder} is no folder: remove it")
        _keep_whole_rows(self.path / "metrics.jsonl")

    def _replace(self, name: str, data: Any) -> None:
        self.path.stat()  # where the file system is away, no folder is made in its place
        write_json(self.path / name, data)

    def _append(self, line: str) -> None:
        """Add a line to the metrics; after a failure the file is opened anew, and what was written of it removed."""
        path = self.path / "metrics.jsonl"
        if self._metrics is None:
            _keep_whole_rows(path)
            self._metrics = path.open("a", encoding="utf-8")
        try:
            self._metrics.write(line)
            self._metrics.flush()
        except OSError:
            with suppress(OSError):
                self._metrics.close()
            self._metrics = None
            raise

    def _write_head(self) -> None:
        self.write("run.json", self.head)


def find_records(root: Path) -> list[RunRecord]:
    """All records at or below a folder, in the order of their paths; inside of records nothing is searched for."""
    found = []
    for folder, folders, files in os.walk(root):
        if "run.json" in files:
            folders.clear()
            found.append(Path(folder))
    return [RunRecord.load(path) for path in sorted(found)]


def _require(path: Path, head: Mapping[str, Any], **kinds: type) -> None:
    wrong = [key for key, kind in kinds.items() if not isinstance(head.get(key), kind)]
    if wrong or not all(isinstance(segment, dict) for segment in head.get("segments", ())):
        raise ValueError(f"{path}/run.json is damaged: {', '.join(wrong) or 'segments'} missing or of a wrong kind")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _keep_whole_rows(path: Path) -> None:
    if path.exists():
        text = "".join(json.dumps(row) + "\n" for row in read_whole_rows(path))
        if text.encode() != path.read_bytes():
            write_text(path, text)


def _empty(path: Path) -> None:
    for child in path.iterdir():
        if child.name.startswith(KEPT):  # in use by this start
            continue
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
