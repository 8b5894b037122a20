"""A run that fails in another rank than the first, or is killed, alerts in W&B when its job ends, and only once."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments import train
from experiments.command import RunFailedError
from experiments.config import TrainConfig
from experiments.launch import LaunchError, RankFailure
from experiments.records import RunRecord
from experiments.tracking import TrackingSettings, open_tracker, tell_failure
from slurm.aftermath import settle
from slurm.manifest import Submission
from tests.experiments.test_config import compose
from tests.experiments.test_tracking_online import ONLINE
from tests.experiments.tracked import RUN_ID, open_record

ROOT = Path(__file__).parents[2]
CUT_OFF = """
import os, sys
from pathlib import Path
from tests.experiments.test_tracking_online import ONLINE, log
from tests.experiments.tracked import open_record
from experiments.tracking import open_tracker
record = open_record(Path(sys.argv[1]))
log(open_tracker(ONLINE, record), record, range(3))
os.kill(os.getpid(), 9)
"""
KILLED = {"rank": 1, "type": "", "message": "was killed by SIGKILL", "traceback": ""}


def cut_off(runs):
    """A record whose first rank was killed after it had begun to tell W&B."""
    subprocess.run([sys.executable, "-c", CUT_OFF, str(runs)], cwd=ROOT, check=False)
    return RunRecord.load(runs / "s" / RUN_ID)


def test_the_failure_of_another_rank_is_told_once(tmp_path, server):
    record = cut_off(tmp_path)
    assert not tell_failure(ONLINE, record)  # it may be running
    record.end_segment("failed", KILLED)
    assert tell_failure(ONLINE, record)
    assert (server.run.state, server.run.summary["end_reason"]) == ("failed", "failed")
    assert [(a["title"], a["text"]) for a in server.run.alerts] == [("failed: killed", "rank 1 was killed by SIGKILL")]
    assert not tell_failure(ONLINE, RunRecord.load(record.path))
    assert len(server.run.alerts) == 1


def test_what_the_first_rank_has_told_is_not_told_again(tmp_path, server):
    record = open_record(tmp_path)
    tracker = open_tracker(ONLINE, record)
    tracker.failed(RuntimeError("out of memory"))
    tracker.finish("failed")
    record.end_segment("failed", {**KILLED, "rank": 0})
    assert not tell_failure(ONLINE, record)
    assert len(server.run.alerts) == 1
    record.begin_segment()  # another start, which fails before W&B is opened
    record.head["segments"][-1]["start"] = "2030-01-01T00:00:00+00:00"
    record.end_segment("failed", KILLED)
    assert tell_failure(ONLINE, record)
    assert len(server.run.alerts) == 2


@pytest.mark.parametrize("mode", ["off", "offline"])
def test_nobody_is_told_where_wandb_is_not_online(tmp_path, server, mode):
    record = open_record(tmp_path)
    record.end_segment("failed", KILLED)
    assert not tell_failure(TrackingSettings(wandb=mode), record)
    assert server.requests == []


def test_a_run_that_had_to_track_offline_waits_for_sync(tmp_path, server):
    record = open_record(tmp_path)
    server.fault = lambda request: 500
    open_tracker(TrackingSettings(wandb="online", init_timeout_s=1, finish_timeout_s=1), record).finish("failed")
    record.end_segment("failed", KILLED)
    asked = len(server.requests)
    assert not tell_failure(ONLINE, record)
    assert len(server.requests) == asked


def test_the_launcher_of_the_ranks_tells(tmp_path, server, monkeypatch):
    def launch(*_, **__):
        raise LaunchError(RankFailure(1, "failed: ValueError: no such label", "Traceback ...", type="ValueError"))

    monkeypatch.setattr(train, "launch", launch)
    config = TrainConfig.from_dict(compose("model=mlp", "data=digits", "tracking=wandb", f"runs={tmp_path}"))
    with pytest.raises(RunFailedError):
        train.run_here(config)
    assert server.run.state == "failed"
    assert [(a["title"], a["text"]) for a in server.run.alerts] == [
        ("failed: ValueError", "rank 1 failed: ValueError: no such label")
    ]


def test_a_job_whose_ranks_are_all_killed_tells(tmp_path, server):
    record = cut_off(tmp_path)
    submission = Submission(
        run_id=RUN_ID, job_id="5_0", overrides=(), submitted="2026-01-01T00:00:00+00:00", code="",
        config={"runs": str(tmp_path), "sweep": "s", "tracking": {"wandb": "online", "project": "p"}}, logs=".jobs/5_0",
        site={"scheduler": "slurm", "retries": 0},
    )  # fmt: skip
    settle(tmp_path / "s", submission, 137, {})
    assert RunRecord.load(record.path).status == "failed"
    assert [a["text"] for a in server.run.alerts] == ["killed: exit status 137 (signal 9)"]
