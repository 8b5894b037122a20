"""``python -m analysis sync``: bring records into W&B, from a machine that has a network.

W&B's own ``wandb sync`` uploads the offline files; its exit code is always 0, it forgets what a killed run had not
flushed, and it marks as done what did not arrive. So what arrived is read back and compared with the record, and what
is missing, be it everything, is sent from the record. A ledger in each record says what has been verified where.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from analysis.runs import find_records
from analysis.tables import Column, Table
from analysis.wandb_state import Difference, Stored, Target, difference, read_stored
from experiments.records import RUNNING, RunRecord, now, write_json
from experiments.tracking.facts import KILLED, RunFacts
from experiments.tracking.interface import WHEN
from experiments.tracking.settings import ONLINE, TrackingSettings
from experiments.tracking.tracker import Tracker, recorded_iterations
from experiments.tracking.wandb_sink import WandbSink

logger = logging.getLogger(__name__)

LEDGER = "sync.json"
"""In a record's ``wandb`` folder: by server and run, what has been verified."""
FRAGMENTS = "offline-run-*"
COMPLETE, UP_TO_DATE, INCOMPLETE, UNREACHABLE, DAMAGED, LIVE = (
    "complete",
    "up to date",
    "INCOMPLETE",
    "NOT REACHED",
    "DAMAGED",
    "still running",
)
GOOD = (COMPLETE, UP_TO_DATE, LIVE)


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How to upload.

    Args:
        project, entity: where to, unless the runs' own configuration says.
        retries: how often to send again what did not arrive.
        timeout_s: of one upload, and of one reading back.
        pause_s: before the first retry; doubled for each further one.
        force: verify also what the ledger calls complete.
    """

    project: str | None = None
    entity: str | None = None
    retries: int = 2
    timeout_s: float = 300.0
    pause_s: float = 2.0
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one run.

    Args:
        run: its directory.
        target: where it lies in W&B.
        result: one of :data:`COMPLETE`, :data:`UP_TO_DATE`, :data:`INCOMPLETE`, :data:`UNREACHABLE`,
            :data:`DAMAGED`, :data:`LIVE`.
        rows, files, traces: verified to be there.
        missing: what is not, in words.
        url: for people.
    """

    run: Path
    target: str
    result: str
    rows: int = 0
    files: int = 0
    traces: int = 0
    missing: str = ""
    url: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing of the run is missing."""
        return self.result in GOOD


def sync(
    roots: Iterable[Path], options: SyncOptions, tell: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Upload and verify all runs below some folders, one after the other.

    Args:
        roots: folders with records.
        options: how.
        tell: called with each outcome as soon as it is known.

    Raises:
        ValueError: if W&B's key is missing or wrong.
    """
    outcomes = []
    for path in (path for root in roots for path in find_records(root)):
        try:
            record = RunRecord.load(path)
            record.read("config.json")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            outcomes.append(Outcome(run=path, target="", result=DAMAGED, missing=f"everything: {error}"))
        else:
            outcomes.append(sync_run(record, options))
        tell(outcomes[-1])
    return outcomes


def sync_run(record: RunRecord, options: SyncOptions) -> Outcome:
    """Upload and verify one run."""
    target = Target.of(record, options.project, options.entity)
    found = Outcome(run=record.path, target=target.path, result=INCOMPLETE)
    if is_live(record.path):
        return replace(found, result=LIVE)
    ledger = Ledger(record.path, target)
    mark = fingerprint(record)
    if ledger.verified(mark) and not options.force:
        return replace(found, **{**ledger.entry["counts"], "result": UP_TO_DATE, "url": ledger.entry["url"]})
    status = KILLED if record.status == RUNNING else record.status
    found = replace(found, missing="everything")
    for attempt in range(options.retries + 1):
        if attempt:
            time.sleep(options.pause_s * 2 ** (attempt - 1))
        try:
            stored = read_stored(target, options.timeout_s)
            if not stored.exists or ledger.unsent(fragments(record)):
                upload_fragments(record, target, ledger, options)
                stored = read_stored(target, options.timeout_s)
            lacking = difference(record, stored, status)
            if lacking:
                logger.info("%s: sending from the record: %s", record.path.name, lacking)
                send(record, target, lacking, status, options)
                stored = read_stored(target, options.timeout_s)
                lacking = difference(record, stored, status)
        except ConnectionError as error:
            logger.warning("%s: %s", record.path.name, error)
            found = replace(found, result=UNREACHABLE, missing=str(error))
            continue
        arrived: dict[str, Any] = counts(record, stored, lacking)
        found = replace(found, **arrived, missing=str(lacking) if lacking else "")
        found = replace(found, result=INCOMPLETE if lacking else COMPLETE, url=stored.url)
        if not lacking:
            ledger.verify(mark, arrived, stored.url)
            break
    return found


def counts(record: RunRecord, stored: Stored, lacking: Difference) -> dict[str, int]:
    """How much of a record has arrived."""
    traces = sum(name.startswith("trace-") for name in stored.artifacts)
    return {"rows": len(record.whole_rows()) - len(lacking.rows), "files": len(stored.files), "traces": traces}


def upload_fragments(record: RunRecord, target: Target, ledger: Ledger, options: SyncOptions) -> None:
    """Have W&B upload the offline files of each start of the run, each once: a second time would double its rows."""
    for fragment in ledger.unsent(fragments(record)):
        command = [sys.executable, "-m", "wandb", "sync", "--yes", "-p", target.project, "--id", target.id]
        command += ["-e", target.entity] if target.entity else []
        ledger.sent(fragment)
        try:
            done = subprocess.run(
                [*command, str(fragment)],
                capture_output=True,
                text=True,
                timeout=options.timeout_s,
                check=False,
                env={**os.environ, "WANDB_DATA_DIR": str((record.path / "wandb" / "data").resolve())},
            )
        except subprocess.TimeoutExpired:
            logger.warning("%s: wandb sync took more than %g s", fragment.name, options.timeout_s)
            continue
        if done.returncode or "error" in (done.stdout + done.stderr).lower():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
            logger.warning("%s: wandb sync: %s", fragment.name, (lines or ["failed"])[-1].strip())


def send(record: RunRecord, target: Target, lacking: Difference, status: str, options: SyncOptions) -> None:
    """Send what is lacking straight from the record.

    Raises:
        ConnectionError: if W&B does not take it in time.
    """
    tags = ((record.read("config.json") or {}).get("tracking") or {}).get("tags") or ()
    settings = TrackingSettings(
        wandb=ONLINE,
        project=target.project,
        entity=target.entity,
        tags=tuple(tags),
        init_timeout_s=options.timeout_s,
        call_timeout_s=options.timeout_s,
        finish_timeout_s=options.timeout_s,
    )
    facts = RunFacts.of(record)
    tracker = Tracker({"W&B": lambda: WandbSink(settings, facts, fall_back=False)}, settings)
    for row in logged_when(record, lacking.rows):
        tracker.log(row)
    tracker.flush()
    if summary := record.read("summary.json"):
        tracker.summary(summary)
    wanted = set(lacking.iterations) if not lacking.media else set(record.timeline_paths())
    for recorded in recorded_iterations(record) if wanted else ():
        if recorded.iteration in wanted:
            tracker.timeline(recorded)
    tracker.files(lacking.files)
    error = record.head.get("error") or {}
    if lacking.end and error:
        tracker.alert(status, str(error.get("message", "")))
    tracker.finish(status, patient=True)
    if not tracker.working:
        raise ConnectionError("W&B did not take what was sent")


def logged_when(record: RunRecord, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the time that W&B's axis of wall-clock needs: the run's beginning and the iterations up to each."""
    at_s, began_s = 0.0, datetime.fromisoformat(record.head["created"]).timestamp()
    reached: dict[int, float] = {}
    for row in sorted((row for row in record.whole_rows() if row["kind"] == "train"), key=itemgetter("iter")):
        at_s += row.get("iteration_s") or 0.0
        reached[row["iter"]] = at_s
    return [{**row, WHEN: began_s + reached.get(row["iter"], at_s)} for row in rows]


def fragments(record: RunRecord) -> list[Path]:
    """The offline folders of W&B that the run's starts left, in their order."""
    return sorted((record.path / "wandb").glob(FRAGMENTS))


def is_live(path: Path) -> bool:
    """Whether a process is writing the record."""
    try:
        with (path / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none, or no locks here
        return False
    return False


def fingerprint(record: RunRecord) -> str:
    """Changes when anything that is to arrive does."""
    parts: list[Any] = [record.status, record.head["segments"], [str(path.name) for path in fragments(record)]]
    for path in [record.path / "metrics.jsonl", *(p for paths in record.timeline_paths().values() for p in paths)]:
        parts.append([path.name, path.stat().st_size] if path.exists() else [path.name])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Ledger:
    """What was sent and verified of one run, per server.

    Args:
        path: the record's directory.
        target: the run in W&B.
    """

    def __init__(self, path: Path, target: Target) -> None:
        self._file = path / "wandb" / LEDGER
        self._key = f"{server()}/{target.path}"
        try:
            self._data: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            self._data = {}
        self.entry: dict[str, Any] = self._data.setdefault(self._key, {"fragments": [], "verified": None})

    def verified(self, mark: str) -> bool:
        """Whether the record was verified as it is now."""
        return bool(self.entry["verified"] == mark)

    def unsent(self, found: Iterable[Path]) -> list[Path]:
        """Those offline folders that were never handed to W&B."""
        return [path for path in found if path.name not in self.entry["fragments"]]

    def sent(self, fragment: Path) -> None:
        """Note, before it begins, that an offline folder is handed to W&B."""
        self.entry["fragments"].append(fragment.name)
        self._write()

    def verify(self, mark: str, found: dict[str, int], url: str) -> None:
        """Note that everything has arrived."""
        self.entry |= {"verified": mark, "when": now(), "counts": found, "url": url}
        self._write()

    def _write(self) -> None:
        write_json(self._file, self._data)


def server() -> str:
    """The address of W&B's server."""
    import wandb

    return str(wandb.setup().settings.base_url)


def sync_table(outcomes: Iterable[Outcome]) -> Table:
    """One row per run."""
    columns = (
        Column("run", align="left"),
        Column("result", align="left"),
        *(Column(name, "d") for name in ("rows", "files", "traces")),
        Column("missing", align="left"),
        Column("W&B", align="left"),
    )
    rows = tuple((o.run.name, o.result, o.rows, o.files, o.traces, o.missing, o.url or o.target) for o in outcomes)
    return Table("Upload to W&B, read back and compared with the records", columns, rows)
