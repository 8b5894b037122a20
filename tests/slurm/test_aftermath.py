"""Which jobs are started again after their ranks have ended."""

import json
import shutil

import pytest

from experiments.records import RunRecord
from experiments.settings import ConfigError
from slurm import manifest
from slurm.aftermath import Attempt, goes_on, main, outcome, settle
from slurm.job import TrainingJob
from slurm.manifest import Submission
from slurm.queue import QueuedJob
from slurm.status import sweep_status

JOB = {"job": "5_0", "restart": 1}


def attempts(*pairs):
    return [Attempt(restart, how, iteration) for restart, (how, iteration) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("history", "retries", "again"),
    [
        ([("interrupted", 10)], 0, True),  # preempted, with a checkpoint
        ([("interrupted", 10), ("interrupted", 30), ("interrupted", 50)], 0, True),  # as often as it takes
        ([("interrupted", 0)], 1, True),  # before its first checkpoint
        ([("interrupted", 10), ("interrupted", 10), ("interrupted", 10)], 1, False),  # the time limit is too short
        ([("failed", 10)], 2, True),
        ([("failed", 10), ("failed", 20)], 2, True),
        ([("failed", 10), ("failed", 20), ("failed", 30)], 2, False),  # a crash is not tried for ever
        ([("failed", 10), ("failed", 20), ("interrupted", 30), ("failed", 40)], 2, False),
        ([("failed", 10), ("failed", 20), ("interrupted", 30)], 2, True),
        ([("failed", 0)], 0, False),
    ],
)
def test_bounded_retries(history, retries, again):
    assert goes_on(attempts(*history), retries) == again


@pytest.mark.parametrize("error", ["ConfigError", "NonFiniteError", "FactorInversionError"])
def test_what_would_fail_again_is_not_tried_again(error):
    assert not goes_on(attempts(("failed", 10)), 5, error)


@pytest.mark.parametrize(
    ("status", "segment", "code", "how"),
    [
        ("interrupted", JOB, 0, "interrupted"),  # asked to stop, all ranks return
        ("interrupted", JOB, 137, "interrupted"),
        ("failed", JOB, 1, "failed"),
        ("running", JOB, 137, "failed"),
        ("running", JOB, 140, "interrupted"),  # SIGUSR2 before anybody listened
        ("failed", {**JOB, "restart": 0}, 140, "interrupted"),  # what the start before had written
        ("interrupted", {**JOB, "restart": 0}, 1, "failed"),
        (None, None, 1, "failed"),
        ("finished", JOB, 1, "finished"),
    ],
)
def test_how_a_start_ended(status, segment, code, how):
    head = {"status": status, "segments": [segment], "error": None} if status else {}
    assert outcome(head, code, JOB)[0] == how


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name, value in {"JOB_ID": "9", "ARRAY_JOB_ID": "5", "ARRAY_TASK_ID": "0", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    submission = Submission(
        run_id="r", job_id="5_0", submitted="", overrides=(), site={"scheduler": "slurm", "retries": 1}, code="",
        config={"runs": str(tmp_path), "sweep": "s", "world_size": 1}, logs=".jobs/5_0",
    )  # fmt: skip
    (tmp_path / "s").mkdir()
    manifest.append(tmp_path / "s", [submission])
    record = RunRecord.open(tmp_path / "s" / "r", run_id="r", name="r", facts={}, config={})
    record.begin_segment()
    record.close()
    return tmp_path / "s", submission


def test_killed_ranks_are_written_down_and_counted(job, capsys):
    sweep, submission = job
    assert main([str(sweep), "5_0", "137"]) == 0
    record = RunRecord.load(sweep / "r")
    assert (record.status, record.head["error"]["message"]) == ("failed", "killed: exit status 137 (signal 9)")
    assert record.head["segments"][-1]["job"] == "5_0"
    assert main([str(sweep), "5_0", "137"]) == 75
    assert "not queued again" in capsys.readouterr().out
    lines = (sweep / submission.logs / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["failed", "failed"]


def test_ranks_that_never_met_say_why(job, capsys, monkeypatch):
    """Without a record; srun's exit status is that of the ranks that were terminated for the failed one."""
    sweep, submission = job
    shutil.rmtree(sweep / "r")
    work = TrainingJob(submission.config, str(sweep / ".jobs" / "meetings" / "a"), None, 1)
    (sweep / submission.logs).mkdir(parents=True)
    work._leave_word(1, RuntimeError("no such network interface"))
    work._leave_word(0, RuntimeError("rank 1 is gone"))  # the first one is the cause
    assert main([str(sweep), "5_0", "143"]) == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    work._leave_word(0, ConfigError("no"))
    assert main([str(sweep), "5_0", "143"]) == 75  # a mistake is not tried again
    (row,) = sweep_status(sweep, {"5_0": QueuedJob("FAILED", "NonZeroExitCode", "node0")})
    assert (row.state, row.reason) == ("failed", "failed: ConfigError: no")
    lines = [json.loads(line) for line in (sweep / submission.logs / "attempts.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["failed", "failed"]
    assert lines[0]["reason"] == "failed: RuntimeError: no such network interface"


def test_a_finished_run_is_left_alone(job):
    sweep, submission = job
    record = RunRecord.load(sweep / "r")
    record.end_segment("finished")
    before = (sweep / "r" / "run.json").read_bytes()
    assert not settle(sweep, submission, 1, {"job": "5_0", "restart": 0})  # as if a rank had died while leaving
    assert (sweep / "r" / "run.json").read_bytes() == before
    assert main([str(sweep), "5_0", "0"]) == 3


def test_a_job_that_the_manifest_does_not_know(job, monkeypatch, capsys):
    monkeypatch.setattr("slurm.aftermath.MANIFEST_WAIT_S", 0)
    assert main([str(job[0]), "6", "1"]) == 75
    assert "knows no job 6" in capsys.readouterr().err
