"""Weights & Biases, offline (files inside the record) or online."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.plotly_view import breakdown_figure, timeline_figure
from experiments.records import FINISHED, INTERRUPTED, write_json, write_text
from experiments.redaction import masked_process
from experiments.timeline_view import page_text
from experiments.tracking.facts import RunFacts
from experiments.tracking.interface import WHEN, RecordedIteration, flat, scalars, time_shares
from experiments.tracking.settings import OFFLINE, ONLINE, TrackingSettings
from kfac.timeline import Timeline, chrome_trace

logger = logging.getLogger(__name__)

SERVICE_WAIT_S = 120
"""How long W&B's own process may take to come up: on a node where many jobs start at once it needs more than 30 s."""
LAST_START = "wandb/last_start.json"
"""In a record: how the last start of the run reached W&B, and what W&B has been told of its end."""


class WandbSink:
    """One run of W&B per run of ours.

    The id is derived, so a requeued run goes on in the same one. No explicit step is ever given: offline W&B shifts
    those of a resumed run; the axis is our column ``iter``.

    Args:
        settings: project, timeouts, offline or online.
        facts: of the run. Ranks above 0 write to the same run where W&B can (online), else to one of their own.
        fall_back: whether to go on offline where the server cannot be reached.

    Raises:
        ImportError: if wandb is not installed.
        Exception: what W&B raises if it cannot start.
    """

    def __init__(self, settings: TrackingSettings, facts: RunFacts, *, fall_back: bool = True) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("needs wandb (pip install 'spdkfac[wandb]')") from error
        self._wandb: Any = wandb
        self._settings, self._facts = settings, facts
        online = settings.wandb == ONLINE
        keep_files_in(facts.path / "wandb", offline=not online)
        logging.getLogger("wandb").propagate = False  # it has files of its own; ours is one warning
        try:
            self._run = self._init(settings.wandb)
        except Exception as error:
            if not (online and fall_back):
                raise
            what = why_not_online(str(error))
            logger.warning("%s: tracking offline now, for python -m analysis sync %s", what, facts.path)
            wandb.teardown(exit_code=1)  # its service still holds the id
            self._run = self._init(OFFLINE)
        self._run.define_metric("iter")
        self._run.define_metric("*", step_metric="iter")
        self._note()
        self._news: dict[str, Any] = {"restarts": facts.restarts} if facts.rank == 0 else {}

    def _init(self, mode: str) -> Any:
        settings, facts = self._settings, self._facts
        shared: dict[str, Any] = {}
        suffix = ""
        if settings.all_ranks and mode == ONLINE:
            first = facts.rank == 0
            shared = {"x_label": f"rank{facts.rank}", "x_primary": first, "x_update_finish_state": first}
        elif facts.rank:  # several writers of one offline run would get into each other's way
            suffix = f"-r{facts.rank}"
        with masked_process("SLURM_"):  # W&B sends the command line and the job's variables
            run = self._wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=facts.id + suffix,
                name=facts.name + suffix,
                group=facts.group,
                job_type=facts.job_type,
                tags=list(settings.tags) or None,
                config=dict(facts.config),
                dir=str(facts.path),
                mode="shared" if shared else mode,
                resume="allow",
                settings=self._wandb.Settings(
                    init_timeout=settings.init_timeout_s,
                    finish_timeout=settings.finish_timeout_s,
                    x_service_wait=SERVICE_WAIT_S,
                    console="off",
                    silent=True,
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=not settings.system_metrics,
                    **shared,
                ),
            )
        if facts.rank == 0:
            history = {"restarts": facts.restarts, "segments": json.dumps(facts.segments)}
            run.config.update(history, allow_val_change=True)
            run.summary.update({"end_reason": "running", "restarts": facts.restarts})
        return run

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Each under ``train/`` or ``eval/``, over ``iter``."""
        for row in rows:
            when = {WHEN: row[WHEN]} if WHEN in row else {}
            self._run.log({"iter": row["iter"], **scalars(row), **self._news, **when})
            self._news = {}

    def summary(self, values: Mapping[str, Any]) -> None:
        """Into the run's summary, nested keys as paths."""
        self._run.summary.update(flat(values))

    def timeline(self, recorded: RecordedIteration) -> None:
        """Seconds per kind as history; the picture as a Plotly panel and as a page; a trace for Perfetto.

        The trace's name ends as W&B's own trace viewer wants it.
        """
        import plotly.graph_objects as go

        wandb = self._wandb
        views = _views(recorded)
        figure = go.Figure(timeline_figure(views, recorded.title))
        media = {"timeline": figure, "timeline_page": wandb.Html(page_text(views, recorded.title), inject=False)}
        shares = {name: view.breakdown_s() for name, view in views.items()}
        media["breakdown_bars"] = go.Figure(breakdown_figure(shares, f"{recorded.title}: exposed time"))
        self._run.log({"iter": recorded.iteration, **time_shares(recorded.measured), **media})
        folder = self._facts.path / "wandb" / "traces"
        path = folder / f"iter{recorded.iteration:06d}.pt.trace.json"
        write_text(path, json.dumps(chrome_trace(views)) + "\n")
        artifact = wandb.Artifact(trace_artifact(self._run.id, recorded.iteration), type="profile")
        artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)
        merged = self._record_folder("timelines") / f"iter{recorded.iteration:06d}.rank0.json"
        recorded.measured.to_chrome_trace(merged)
        self._save(merged)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A W&B table."""
        self._run.log({name: self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def files(self, paths: Sequence[Path]) -> None:
        """Below ``record/`` among the run's files."""
        folder = self._record_folder()
        for path in paths:
            shutil.copyfile(path, folder / path.name)
            self._save(folder / path.name)

    def _record_folder(self, *parts: str) -> Path:
        folder = Path(self._run.dir, "record", *parts)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _save(self, path: Path) -> None:
        self._run.save(str(path), base_path=self._run.dir, policy="now")

    def alert(self, title: str, text: str) -> None:
        """W&B tells by mail or Slack, as its user has chosen; offline, once the run is uploaded."""
        self._run.alert(title=title, text=text, level=self._wandb.AlertLevel.ERROR)

    def finish(self, status: str) -> None:
        """Note how the run ended: an interrupted one is preempted, not crashed."""
        if self._facts.rank == 0:
            self._run.summary["end_reason"] = status
        if status == INTERRUPTED:
            self._run.mark_preempting()
        exit_code = 0 if status == FINISHED else 1
        self._run.finish(exit_code=exit_code)
        if self._run.offline:  # W&B's process may still be writing the file; when it has ended, all is there
            self._wandb.teardown(exit_code=exit_code)
        self._note(status)

    def _note(self, end: str | None = None) -> None:
        if self._facts.rank == 0:
            mode = OFFLINE if self._run.offline else ONLINE
            write_json(
                self._facts.path / LAST_START, {"start": self._facts.segments[-1]["start"], "mode": mode, "end": end}
            )


def trace_artifact(run: str, iteration: int) -> str:
    """The name of the artifact with an iteration's trace."""
    return f"trace-{run}-iter{iteration:06d}"


def why_not_online(text: str) -> str:
    """One line for W&B's error, with the remedy where it is known."""
    if "no api key" in text.lower():
        return "not logged in to W&B (wandb login, or choose tracking=offline)"
    return f"W&B cannot be reached ({text.partition(chr(10))[0]})"


def keep_files_in(folder: Path, *, offline: bool) -> None:
    """All of W&B's folders inside the run's: home quotas stay untouched, and what belongs together lies together."""
    folder.mkdir(exist_ok=True)
    names = ["WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_ARTIFACT_DIR"]
    if offline:  # online, the settings file may hold the server's address
        names.append("WANDB_CONFIG_DIR")
    for name in names:
        os.environ[name] = str((folder / name.split("_")[1].lower()).resolve())
    os.environ.setdefault("WANDB_SILENT", "true")  # also what it prints before a run has settings


def _views(recorded: RecordedIteration) -> dict[str, Timeline]:
    views = {"measured": recorded.measured}
    return views if recorded.simulated is None else {**views, "simulated": recorded.simulated}
