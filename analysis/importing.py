"""``python -m analysis import``: records of runs that are known only from W&B, so that they appear in our tables.

Sources are W&B's offline files, which are read without W&B, and projects or runs on its server. A run that this project
tracked becomes the record that it was; of somebody else's, names of metrics and facts are guessed, and can be given.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.wandb_file import OfflineRun, read_offline_run
from experiments.records import FAILED, FINISHED, INTERRUPTED, RUNNING, SCHEMA, RunRecord, now, write_json, write_text
from experiments.summary import summarise

OURS = "record"
"""The folder among a run's files in W&B that holds our record's."""
AXES = ("iter", "iteration", "step", "global_step", "trainer/global_step", "_step")
"""Names of the iteration's number, the first that is there counts."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "train.loss": ("train/loss", "train_loss", "training_loss", "loss/train", "train.loss", "loss"),
    "train.accuracy": ("train/accuracy", "train_accuracy", "train/acc", "train_acc", "accuracy", "acc"),
    "train.lr": ("train/lr", "lr", "learning_rate", "train/learning_rate"),
    "train.epoch": ("epoch", "train/epoch"),
    "train.iteration_s": ("train/iteration_s", "iteration_s", "iter_time", "step_time", "time/step", "batch_time"),
    "eval.loss": ("eval/loss", "val/loss", "val_loss", "valid_loss", "test/loss", "test_loss", "validation/loss"),
    "eval.accuracy": (
        "eval/accuracy",
        "val/accuracy",
        "val_accuracy",
        "val/acc",
        "val_acc",
        "test/accuracy",
        "test_acc",
    ),
}
"""Our columns, and what others call them."""
FACTS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("schedule_label", "schedule", "algorithm", "algo", "optimizer", "optim"),
    "model": ("model", "arch", "architecture", "model_name"),
    "data": ("data", "dataset", "data_name"),
    "world_size": ("world_size", "num_gpus", "n_gpus", "gpus", "num_workers"),
    "seed": ("seed", "random_seed"),
}
"""Our facts of a run, and the keys of a configuration that tell them."""
UNKNOWN: Mapping[str, Any] = {"schedule": "unknown", "model": "unknown", "data": "unknown", "world_size": 1, "seed": 0}


@dataclass
class ForeignRun:
    """A run as W&B has it.

    Args:
        source: where it was read, for people.
        id, name, group, job_type: in W&B.
        config: nested.
        history: its rows, in order.
        summary: its last values.
        status: finished, failed or interrupted.
        started: when, in ISO form; empty if unknown.
        files: the content of those files of the run that lie under :data:`OURS`, by name.
    """

    source: str
    id: str
    name: str
    group: str
    job_type: str
    config: dict[str, Any]
    history: list[Mapping[str, Any]]
    summary: Mapping[str, Any]
    status: str
    started: str
    files: dict[str, bytes] = field(default_factory=dict)


def from_offline(folders: Iterable[Path]) -> list[ForeignRun]:
    """The runs in offline folders of W&B; several folders of one run (its restarts) become one.

    Args:
        folders: ``offline-run-*`` folders, or folders with such below them.

    Raises:
        ValueError: if there is none, or one is damaged.
    """
    found: dict[str, list[OfflineRun]] = {}
    for folder in folders:
        files = [folder] if folder.is_file() else sorted(folder.rglob("run-*.wandb"))
        if not files:
            raise ValueError(f"no offline files of W&B (run-*.wandb) below {folder}")
        for file in files:
            run = read_offline_run(file)
            found.setdefault(run.id, []).append(run)
    return [_joined(sorted(parts, key=lambda part: part.started_s or 0.0)) for parts in found.values()]


def _joined(parts: Sequence[OfflineRun]) -> ForeignRun:
    last = parts[-1]
    files: dict[str, bytes] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for part in parts:
        config |= part.config
        summary |= part.summary
        folder = part.path.parent / "files" / OURS
        files |= {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    started = parts[0].started_s
    return ForeignRun(
        source=", ".join(str(part.path) for part in parts),
        id=last.id,
        name=last.name or last.id,
        group=last.group,
        job_type=last.job_type,
        config=_user_config(config),
        history=[row for part in parts for row in part.history],
        summary=summary,
        status=INTERRUPTED if last.exit_code is None or last.preempting else FAILED if last.exit_code else FINISHED,
        started="" if started is None else datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        files=files,
    )


def from_api(path: str) -> list[ForeignRun]:
    """The runs of ``ENTITY/PROJECT``, or ``ENTITY/PROJECT/RUN``, on W&B's server.

    Raises:
        ValueError: if W&B is not installed, not logged in, or does not know it.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError("import from a server needs wandb: pip install 'spdkfac[wandb]'") from error
    try:
        api = wandb.Api(timeout=60)
        runs = [api.run(path)] if path.count("/") == 2 else list(api.runs(path))
        return [_of_api(run) for run in runs]
    except Exception as error:
        raise ValueError(f"{path}: {str(error).partition(chr(10))[0]}") from error


def _of_api(run: Any) -> ForeignRun:
    run.load_full_data()
    states = {"finished": FINISHED, "failed": FAILED}
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for file in run.files(per_page=200):
            if file.name.startswith(f"{OURS}/"):
                with file.download(root=folder, replace=True) as content:
                    files[file.name.removeprefix(f"{OURS}/")] = Path(content.name).read_bytes()
    return ForeignRun(
        source=str(run.url),
        id=run.id,
        name=run.name or run.id,
        group=run.group or "",
        job_type=run.job_type or "",
        config=_user_config(run.config),
        history=list(run.scan_history()),
        summary=dict(run.summary),
        status=states.get(run.state, INTERRUPTED),
        started=str(run.created_at),
        files=files,
    )


def import_run(
    run: ForeignRun, folder: Path, columns: Mapping[str, str] | None = None, facts: Mapping[str, str] | None = None
) -> Path:
    """Write the record of a run.

    Args:
        run: as W&B has it.
        folder: the sweep to put it into; the record's folder gets the id of the run.
        columns: which of its columns are ours (``train.loss``), where the guess of :data:`COLUMNS` is wrong.
        facts: ``schedule``, ``model``, ``data``, ``world_size`` and ``seed``, where its configuration does not say.

    Returns:
        the record's folder.

    Raises:
        ValueError: if there is a record already, a column is not there, a number is none, or a name leads elsewhere.
    """
    if Path(run.id).name != run.id or run.id in ("", ".", ".."):
        raise ValueError(f"its id {run.id!r} is no name of a folder")
    path = folder / run.id
    if (path / "run.json").exists():
        raise ValueError(f"{path} holds a record already: remove it, or import into another folder")
    head, config = _head(run, facts or {}), dict(run.config)
    rows = rows_of(run.history, columns or {})
    ours = "run.json" in run.files
    if ours:
        with suppress(ValueError, RecursionError):
            saved, settings = (_object(run.files.get(name, b"{}")) for name in ("run.json", "config.json"))
            if saved.get("status") == RUNNING:  # saved before the run's end, of which W&B knows
                saved |= {"status": run.status, "finished": head["finished"]}
            head, config = {**saved, "imported": head["imported"]}, settings
    for name, content in run.files.items():
        if name not in ("run.json", "config.json") and _stays(name):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    write_text(path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config.setdefault("warmup", 0)
    write_json(path / "config.json", config)
    write_json(path / "run.json", head)  # last: from now on it is a record
    if not (path / "summary.json").exists() and head["status"] == FINISHED:
        write_json(path / "summary.json", summarise(RunRecord.load(path), config["warmup"]))
    return path


def _object(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _stays(name: str) -> bool:
    """Whether a file of this name lies in the record, wherever its name comes from."""
    return ".." not in Path(name).parts and not Path(name).is_absolute() and name not in ("", ".")


def rows_of(history: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Our metrics rows of a history.

    Seconds of iterations that nobody logged are those between the rows' times, shared by the iterations in between.

    Raises:
        ValueError: for a column that is given and not there.
    """
    known = dict.fromkeys(key for row in history for key in row)
    for ours, theirs in columns.items():
        if ours not in COLUMNS and ours != "iter":
            raise ValueError(f"unknown column {ours}; columns: iter, {', '.join(COLUMNS)}")
        if theirs not in known:
            raise ValueError(f"{ours}={theirs}: the run has no such column; it has: {', '.join(known)}")
    axis = columns.get("iter") or next((name for name in AXES if name in known), None)
    if axis is None:
        return []
    names = {ours: columns.get(ours) or next((n for n in of if n in known), None) for ours, of in COLUMNS.items()}
    rows: list[dict[str, Any]] = []
    stamps: list[tuple[int, float]] = []
    for row in history:
        value = row.get(axis)
        if not isinstance(value, (int, float)) or not abs(value) < math.inf:
            continue
        number = int(value)
        for kind in ("train", "eval"):
            found = {
                ours.partition(".")[2]: _number(row[name])
                for ours, name in names.items()
                if ours.startswith(f"{kind}.") and name is not None and row.get(name) is not None
            }
            if "loss" not in found and "accuracy" not in found:
                continue
            if kind == "eval" and (epoch := names["train.epoch"]) in row:
                found["epoch"] = _number(row[str(epoch)])
            rows.append({"kind": kind, "iter": number, **found})
            if kind == "train" and isinstance(row.get("_timestamp"), (int, float)):
                stamps.append((number, float(row["_timestamp"])))
    if names["train.iteration_s"] is None:
        _add_seconds(rows, stamps)
    return rows


def _add_seconds(rows: Sequence[dict[str, Any]], stamps: Sequence[tuple[int, float]]) -> None:
    seconds = {b: (tb - ta) / (b - a) for (a, ta), (b, tb) in pairwise(stamps) if b > a and tb > ta}
    if not seconds:
        return
    seconds[stamps[0][0]] = seconds.get(stamps[0][0], next(iter(seconds.values())))
    for row in rows:
        if row["kind"] == "train" and row["iter"] in seconds:
            row["iteration_s"] = seconds[row["iter"]]


def _head(run: ForeignRun, facts: Mapping[str, str]) -> dict[str, Any]:
    unknown = [name for name in facts if name not in FACTS]
    if unknown:
        raise ValueError(f"unknown fact {unknown[0]}; facts: {', '.join(FACTS)}")
    found = {name: _fact(name, run, facts) for name in FACTS}
    end = None if run.status == INTERRUPTED else run.started
    segment = {"start": run.started, "end": end, "host": "", "end_reason": run.status}
    return {
        "schema": SCHEMA,
        "run_id": run.id,
        "name": run.name,
        "status": run.status,
        **found,
        "created": run.started,
        "finished": end if run.status == FINISHED else None,
        "segments": [segment],
        "code": {"version": "imported from W&B"},
        "error": None,
        "imported": {"from": run.source, "when": now()},
    }


def _fact(name: str, run: ForeignRun, given: Mapping[str, str]) -> Any:
    value: Any = given.get(name)
    if value is None:
        values = (run.config.get(key) for key in FACTS[name])
        value = next((v.get("name") if isinstance(v, Mapping) else v for v in values if v is not None), None)
    if value is None and name == "schedule":
        value = run.job_type or None
    if value is None:
        return UNKNOWN[name]
    if not isinstance(UNKNOWN[name], int):
        return str(value)
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{run.id}: {name}={value!r} is no whole number") from error


def _user_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "_wandb"}


def _number(value: Any) -> Any:
    """W&B writes what JSON has not as texts."""
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
    return value
