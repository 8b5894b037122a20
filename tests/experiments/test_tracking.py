"""W&B gets a copy, offline inside the record; whatever it does, the run goes on."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import tracking
from experiments.config import TrainConfig
from experiments.records import RunRecord
from experiments.summary import render_timelines
from kfac.timeline import Span, Timeline
from tests.experiments.test_config import compose

wandb = pytest.importorskip("wandb")


@pytest.fixture
def config(tmp_path):
    return TrainConfig.from_dict(compose("world_size=2", f"runs={tmp_path}", "tracking.init_timeout_s=20"))


@pytest.fixture
def record(config, monkeypatch):
    for name in ("DATA", "CACHE", "ARTIFACT", "CONFIG"):  # restored after the test
        monkeypatch.setenv(f"WANDB_{name}_DIR", "")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    facts = {"schedule": "spdkfac", "model": "mlp", "data": "digits", "world_size": 2, "seed": 0}
    record = RunRecord.open(
        config.record_path, run_id=config.run_id, name=config.run_id, facts=facts, config=config.to_dict()
    )
    record.begin_segment()
    for rank in range(2):
        spans = (
            Span(rank, "compute", "FF", "forward", 0, 1e-3),
            Span(rank, "communication", "FactorComm", "A", 5e-4, 2e-3),
        )
        path = record.timeline_path(5, rank)
        path.parent.mkdir(exist_ok=True)
        Timeline(spans, total_s=2e-3).to_chrome_trace(path)
    yield record
    record.close()


def stored(folder):
    """What W&B's own reader finds in the offline file."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", str(folder), "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_offline_run_holds_what_the_record_holds(config, record):
    tracker = tracking.open_tracker(config, record)
    rows = [{"kind": "train", "iter": i, "epoch": i / 10, "loss": 1 / (i + 1), "lr": 0.1} for i in (0, 1, 2, 1)]
    for row in [*rows, {"kind": "eval", "iter": 2, "loss": 0.5, "accuracy": 0.75}]:
        tracker.log(row)
    tracker.summary({"iteration_s": {"median": 0.25}, "breakdown_s": {"FF": 0.1}, "iterations": 3})
    render_timelines(record)
    tracker.timeline(record)
    tracker.finish("finished")

    (folder,) = (record.path / "wandb").glob("offline-run-*")
    assert tracking.wandb_id(record) in folder.name
    found = stored(folder)
    history = [entry["history"]["item"] for entry in found if entry["type"] == "history"]
    # No explicit steps: a repeated iteration is another row, over the column "iter".
    assert [(r["iter"], r["train/loss"]) for r in history if "train/loss" in r] == [
        (r["iter"], r["loss"]) for r in rows
    ]
    assert [(r["iter"], r["eval/accuracy"]) for r in history if "eval/accuracy" in r] == [(2, 0.75)]
    assert any(e["metric"].get("step_metric") == "iter" for e in found if e["type"] == "metric")
    run = next(entry["run"] for entry in found if entry["type"] == "run")
    assert run["config"]["update"]["schedule"]["placement"] == "lbp"
    assert (run["run_group"], run["job_type"]) == ("single", "spdkfac")
    summary = {k: v for entry in found if entry["type"] == "summary" for k, v in entry["summary"]["update"].items()}
    assert (summary["iteration_s/median"], summary["breakdown_s/FF"], summary["end_reason"]) == (0.25, 0.1, "finished")
    assert len(list((folder / "files").rglob("*.png"))) == len(list((folder / "files").rglob("*.html"))) == 1
    artifact = next(entry["artifact"] for entry in found if entry["type"] == "artifact")
    assert artifact["type"] == "timeline"
    assert "iter000005.rank1.pt.trace.json" in json.dumps(artifact)


def test_id_is_stable_through_restarts_and_new_when_it_starts_over(record):
    first = tracking.wandb_id(record)
    assert tracking.wandb_id(RunRecord.load(record.path)) == first
    record.begin_segment()
    assert tracking.wandb_id(record) == first
    record.head["created"] = "2030-01-01T00:00:00+00:00"
    assert tracking.wandb_id(record) != first


class Failing:
    def __init__(self):
        self.calls = 0

    def log(self, row):
        self.calls += 1
        raise ConnectionResetError("the service is gone")

    summary = timeline = finish = log


def test_a_sink_that_raises_is_switched_off_with_one_warning(caplog):
    inner = Failing()
    safe = tracking.SafeTracker(inner)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            safe.log({})
        safe.summary({})
        safe.finish("finished")
    assert inner.calls == 1
    assert len(caplog.records) == 1
    assert "the run record is complete" in caplog.text


def test_online_without_a_server_falls_back_to_offline(tmp_path, record, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wandb.teardown()  # so that the variables are read
    config = TrainConfig.from_dict(compose(f"runs={tmp_path}", "tracking=wandb", "tracking.init_timeout_s=3"))
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracker = tracking.open_tracker(config, record)
    assert time.monotonic() - start < 60
    assert "tracking offline" in caplog.text
    tracker.log({"kind": "train", "iter": 0, "loss": 1.0})
    tracker.finish("failed")
    assert sum(entry.name == "experiments.tracking" for entry in caplog.records) == 1
    (folder,) = (record.path / "wandb").glob("offline-run-*")
    assert "train/loss" in json.dumps(stored(folder))


def test_online_without_a_login_says_how_to_log_in(tmp_path, record, caplog, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    config = TrainConfig.from_dict(compose(f"runs={tmp_path}", "tracking=wandb", "tracking.init_timeout_s=3"))
    with caplog.at_level(logging.WARNING):
        tracking.open_tracker(config, record).finish("failed")
    assert "not logged in to W&B (wandb login, or choose tracking=offline): tracking offline" in caplog.text


def test_without_wandb_only_a_warning(config, record, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        assert isinstance(tracking.open_tracker(config, record), tracking.NoTracker)
    assert "pip install wandb)" in caplog.text


def test_none_writes_nothing(tmp_path, record):
    config = TrainConfig.from_dict(compose(f"runs={tmp_path}", "tracking=none"))
    assert isinstance(tracking.open_tracker(config, record), tracking.NoTracker)
    assert not (record.path / "wandb").exists()
