"""Trackers: sinks that get a copy of what the run record holds. They may fail; the run goes on."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from experiments.records import FINISHED, RunRecord

if TYPE_CHECKING:
    from experiments.config import TrainConfig

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long a tracker may take to finish a run that failed: the error must not wait for it."""


class Tracker(Protocol):
    """What a sink can do. Rank 0 alone has trackers, and calls them outside of timed iterations only."""

    def log(self, row: Mapping[str, Any]) -> None:
        """A row of the metrics (see :meth:`experiments.records.RunRecord.log`)."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """The content of ``summary.json``."""

    def timeline(self, record: RunRecord) -> None:
        """The record's timelines: picture, page and traces."""

    def finish(self, status: str) -> None:
        """The run ends as ``status``."""


class NoTracker:
    """Keeps nothing."""

    def log(self, row: Mapping[str, Any]) -> None:  # noqa: D102
        pass

    def summary(self, values: Mapping[str, Any]) -> None:  # noqa: D102
        pass

    def timeline(self, record: RunRecord) -> None:  # noqa: D102
        pass

    def finish(self, status: str) -> None:  # noqa: D102
        pass


class SafeTracker:
    """Another tracker, until it raises: then one warning, and nothing more."""

    def __init__(self, inner: Tracker) -> None:
        self._inner = inner

    def log(self, row: Mapping[str, Any]) -> None:  # noqa: D102
        self._try(lambda: self._inner.log(row))

    def summary(self, values: Mapping[str, Any]) -> None:  # noqa: D102
        self._try(lambda: self._inner.summary(values))

    def timeline(self, record: RunRecord) -> None:  # noqa: D102
        self._try(lambda: self._inner.timeline(record))

    def finish(self, status: str) -> None:  # noqa: D102
        self._try(lambda: self._inner.finish(status))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            name = type(self._inner).__name__
            logger.warning("%s failed and is switched off; the run record is complete: %r", name, error)
            self._inner = NoTracker()


def open_tracker(config: TrainConfig, record: RunRecord) -> Tracker:
    """The tracker that a configuration asks for; none, with a warning, where it cannot start."""
    if config.tracking.mode == "none":
        return NoTracker()
    try:
        return SafeTracker(WandbTracker(config, record))
    except ImportError:
        logger.warning("tracking=%s: wandb is not installed (pip install wandb)", config.tracking.mode)
    except Exception as error:
        logger.warning("tracking=%s could not start, only the run record is written: %r", config.tracking.mode, error)
    return NoTracker()


def wandb_id(record: RunRecord) -> str:
    """The W&B id of a run: the same after every restart, another one when it starts over or in another sweep."""
    origin = f"{record.path.parent.name}/{record.head['created']}"
    return f"{record.head['run_id']}-{hashlib.sha256(origin.encode()).hexdigest()[:6]}"


class WandbTracker:
    """Weights & Biases, offline (files inside the record, for ``wandb sync``) or online.

    Raises:
        ImportError: if wandb is not installed.
        Exception: what W&B raises if it cannot start offline; online falls back to offline.
    """

    def __init__(self, config: TrainConfig, record: RunRecord) -> None:
        import wandb

        self._wandb = wandb
        online = config.tracking.mode == "wandb"
        _keep_files_in(record.path / "wandb", offline=not online)
        logging.getLogger("wandb").propagate = False  # it has files of its own; ours is one warning
        try:
            self._run = self._init(config, record, "online" if online else "offline")
        except Exception as error:
            if not online:
                raise
            what = _why_not_online(str(error))
            logger.warning("%s: tracking offline now, for wandb sync %s/wandb", what, record.path)
            wandb.teardown(exit_code=1)  # its service still holds the id
            self._run = self._init(config, record, "offline")
        # A resumed run repeats iterations and W&B's own step only counts calls: the axis is a column of ours.
        self._run.define_metric("*", step_metric="iter")

    def _init(self, config: TrainConfig, record: RunRecord, mode: Literal["online", "offline"]) -> Any:
        tracking = config.tracking
        return self._wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            id=wandb_id(record),
            name=f"{config.schedule.label}-{config.model.name}-w{config.world_size}-s{config.seed}",
            group=config.sweep,
            job_type=config.schedule.label,
            tags=list(tracking.tags) or None,
            config={**config.to_dict(), "run_id": config.run_id, "restarts": record.restarts},
            dir=str(record.path),
            mode=mode,
            resume="allow",
            settings=self._wandb.Settings(
                init_timeout=tracking.init_timeout_s,
                finish_timeout=tracking.finish_timeout_s,
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=not tracking.system_metrics,
            ),
        )

    def log(self, row: Mapping[str, Any]) -> None:
        """One row under ``train/`` or ``eval/``, over ``iter``."""
        shared = {key: row[key] for key in ("iter", "epoch") if key in row}
        own = {f"{row['kind']}/{key}": value for key, value in row.items() if key not in ("kind", "iter", "epoch")}
        self._run.log({**shared, **own})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Into the run's summary, nested keys as paths."""
        self._run.summary.update(_flat(values))

    def timeline(self, record: RunRecord) -> None:
        """Picture and page as media, the traces as an artifact."""
        wandb = self._wandb
        media = {"timeline": wandb.Image(str(record.path / "timeline.png"))}
        media["timeline_page"] = wandb.Html((record.path / "timeline.html").read_text(), inject=False)
        self._run.log(media)
        artifact = wandb.Artifact(f"timelines-{self._run.id}", type="timeline")
        for paths in record.timeline_paths().values():
            for path in paths:
                artifact.add_file(str(path), name=f"{path.stem}.pt.trace.json")
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        """Note how the run ended, and end W&B's part in time."""
        self._run.summary["end_reason"] = status
        if status == FINISHED:
            self._run.finish()
            return
        thread = threading.Thread(target=self._run.finish, kwargs={"exit_code": 1}, daemon=True)
        thread.start()
        thread.join(LAST_WORDS_S)


def _why_not_online(text: str) -> str:
    """One line for W&B's error, with the remedy where it is known."""
    if "no api key" in text.lower():
        return "not logged in to W&B (wandb login, or choose tracking=offline)"
    return f"W&B cannot be reached ({text.partition(chr(10))[0]})"


def _keep_files_in(folder: Path, *, offline: bool) -> None:
    """All of W&B's folders inside the run's: home quotas stay untouched, and what belongs together lies together."""
    folder.mkdir(exist_ok=True)
    names = ["WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR"]
    if offline:  # online, the settings file may hold the server's address
        names.append("WANDB_CONFIG_DIR")
    for name in names:
        os.environ[name] = str((folder / name.split("_")[1].lower()).resolve())


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat
