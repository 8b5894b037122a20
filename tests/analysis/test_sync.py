"""What sync calls complete is there, row by row and file by file; what is not there it sends, or says."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.__main__ import main
from analysis.sync import SyncOptions, fragments, sync_run
from analysis.wandb_state import Stored, difference, media_files
from experiments.records import RunRecord
from experiments.tracking import TrackingSettings, open_tracker, tracking_id
from tests.experiments.tracked import open_record, train_row, write_plan, write_run, write_timelines
from tests.wandb_server import DROP

ROOT = Path(__file__).parents[2]
QUICK = SyncOptions(retries=1, timeout_s=30, pause_s=0.1)


def offline_run(tmp_path, iterations=6, lost=0, **options):
    """A finished run that was tracked offline; ``lost`` rows are in the record alone, as after a kill."""
    record = open_record(tmp_path, **options)
    tracker = open_tracker(TrackingSettings(wandb="offline", project="p"), record)
    for i in range(iterations):
        record.log(train_row(i))
        if i < iterations - lost:
            tracker.log(train_row(i))
    write_timelines(record)
    write_plan(record)
    record.write("summary.json", {"iterations": iterations, "iteration_s": None, "breakdown_s": {}, "hidden_s": {}})
    tracker.timelines(record)
    tracker.finish("finished")
    record.end_segment("finished")
    record.close()
    return RunRecord.load(record.path)


def iterations(run):
    return [row["iter"] for row in run.rows() if "train/loss" in row]


def test_an_offline_run_is_uploaded_verified_and_not_uploaded_again(tmp_path, server):
    record = offline_run(tmp_path)
    outcome = sync_run(record, QUICK)
    assert (outcome.result, outcome.rows, outcome.traces, outcome.missing) == ("complete", 6, 2, "")
    run = server.run
    assert (run.name, run.state, run.summary["end_reason"]) == (tracking_id(record), "finished", "finished")
    assert iterations(run) == list(range(6))
    assert json.loads(run.files["record/run.json"])["status"] == "finished"  # as it is now, not as it was then
    before = len(server.requests)
    assert sync_run(record, QUICK).result == "up to date"
    assert all(request.operation in ("", "Viewer") for request in server.requests[before:])
    forced = sync_run(record, SyncOptions(force=True, timeout_s=30))
    assert (forced.result, iterations(server.run)) == ("complete", list(range(6)))


def test_what_a_killed_run_lost_is_sent_from_the_record(tmp_path, server):
    record = offline_run(tmp_path, lost=2)
    outcome = sync_run(record, QUICK)
    assert (outcome.result, outcome.rows) == ("complete", 6)
    assert iterations(server.run) == [0, 1, 2, 3, 4, 5]
    assert [row["train/loss"] for row in server.run.rows() if row.get("iter") == 5 and "train/loss" in row] == [1 / 6]


def test_a_run_without_any_files_of_wandb_is_sent_from_the_record(tmp_path, server):
    record = write_run(tmp_path)
    assert fragments(record) == []
    outcome = sync_run(record, QUICK)
    assert (outcome.result, outcome.rows, outcome.traces) == ("complete", 7, 2)
    assert set(iterations(server.run)) == set(range(6))
    times = {row["iter"]: row["_timestamp"] for row in server.run.rows() if "train/loss" in row}
    assert times[5] - times[0] == pytest.approx(sum(0.01 + i / 1000 for i in range(1, 6)), abs=1e-5)


def test_a_killed_run_is_called_killed_and_a_failed_one_failed(tmp_path, server):
    killed = write_run(tmp_path, status="running")
    assert sync_run(killed, QUICK).result == "complete"
    assert (server.run.state, server.run.summary["end_reason"]) == ("failed", "killed")
    failed = open_record(tmp_path, run_id="other")
    failed.log(train_row(0))
    failed.end_segment("failed", {"rank": 1, "message": "failed: out of memory"})
    failed.close()
    assert sync_run(RunRecord.load(failed.path), QUICK).result == "complete"
    other = server.store.runs["team", "p", tracking_id(failed)]
    assert (other.state, other.summary["end_reason"]) == ("failed", "failed")
    assert [alert["text"] for alert in other.alerts] == ["failed: out of memory"]


def test_a_run_that_is_being_written_waits(tmp_path, server):
    record = open_record(tmp_path)
    assert sync_run(RunRecord.load(record.path), QUICK).result == "still running"
    assert server.store.runs == {}
    record.close()


@pytest.mark.parametrize(
    "fault",
    [
        lambda r: 500 if r.path.endswith("/file_stream") else None,
        lambda r: 403 if r.path.startswith("/blob/run/") and r.method == "PUT" else None,
        lambda r: 403 if r.path.startswith("/blob/artifact/") else None,
        lambda r: DROP,
    ],
    ids=["rows", "files", "artifacts", "everything"],
)
def test_what_does_not_arrive_is_never_called_complete(tmp_path, server, fault):
    record = offline_run(tmp_path)
    server.fault = fault
    outcome = sync_run(record, SyncOptions(retries=0, timeout_s=4))
    assert outcome.result in ("INCOMPLETE", "NOT REACHED")
    assert outcome.missing
    ledger = record.path / "wandb" / "sync.json"
    assert not ledger.exists() or all(not entry["verified"] for entry in json.loads(ledger.read_text()).values())


def test_it_is_completed_once_the_server_is_well_again(tmp_path, server, wandb_client):
    record = offline_run(tmp_path)
    server.fault = lambda r: 403 if r.path.startswith("/blob/artifact/") else None
    assert not sync_run(record, SyncOptions(retries=0, timeout_s=8)).good
    server.fault = lambda r: None
    wandb_client.teardown()
    outcome = sync_run(record, QUICK)
    assert (outcome.result, outcome.rows, outcome.traces) == ("complete", 6, 2)


def test_differences_are_found_by_value(tmp_path):
    record = write_run(tmp_path)
    rows = [{"iter": r["iter"], **{f"{r['kind']}/{k}": v for k, v in r.items()}} for r in record.rows()]
    assert difference(record, Stored(exists=True, rows=tuple(rows)), "finished").rows == []
    rows[3]["train/loss"] = 99.0
    found = difference(record, Stored(exists=True, rows=tuple(rows[:-2])), "finished")
    assert [row["iter"] for row in found.rows] == [3, 5, 5]
    assert found.iterations == [1, 3]
    assert found.end
    assert "3 rows, 2 timelines" in str(found)
    assert media_files([{"a": {"_type": "html-file", "path": "media/x.html"}, "b": 1}]) == ["media/x.html"]


def test_the_command_says_what_became_of_each_run(tmp_path, server):
    offline_run(tmp_path)
    command = [sys.executable, "-m", "analysis", "sync", str(tmp_path), "--format", "json", "--timeout", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["result"], row["rows"], row["traces"]) == ("complete", 6, 2)
    server.fault = lambda r: 403
    again = subprocess.run(
        [*command, "--force", "--retries", "0"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert json.loads(again.stdout)["rows"][0]["result"] == "NOT REACHED"


@pytest.mark.parametrize(
    ("key", "fault", "words"),
    [
        (None, None, "No API key configured"),
        ("short", None, "must have 40+ characters"),
        ("f" * 40, 401, "error 401"),
    ],
    ids=["missing", "malformed", "unknown"],
)
def test_a_key_that_is_missing_or_wrong_is_said_once_and_at_once(
    tmp_path, server, wandb_client, monkeypatch, capsys, key, fault, words
):
    for name in "ab":
        offline_run(tmp_path, run_id=name)
    monkeypatch.delenv("WANDB_API_KEY") if key is None else monkeypatch.setenv("WANDB_API_KEY", key)
    wandb_client.teardown()
    server.fault = lambda request: fault
    pauses = []
    monkeypatch.setattr("analysis.sync.time", SimpleNamespace(sleep=pauses.append))
    assert main(["sync", str(tmp_path), "--timeout", "20"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("wandb login") == shown.err.count(words) == shown.err.count("error: W&B") == 1
    assert shown.out == ""
    assert pauses == []


def test_a_server_that_refuses_for_now_is_asked_again(tmp_path, server, monkeypatch):
    """Negative control of the above: 503 is a fault that passes."""
    record, pauses = offline_run(tmp_path), []
    monkeypatch.setattr("analysis.sync.time", SimpleNamespace(sleep=pauses.append))
    server.fault = lambda request: 503
    assert sync_run(record, SyncOptions(retries=2, timeout_s=1, pause_s=0.1)).result == "NOT REACHED"
    assert pauses == [0.1, 0.2]


def test_a_damaged_record_is_named_and_does_not_hold_up_the_others(tmp_path, server, capsys):
    good, bad = (offline_run(tmp_path, run_id=name) for name in ("good", "bad"))
    worse = offline_run(tmp_path, run_id="worse")
    (bad.path / "run.json").write_text("{")
    (worse.path / "config.json").write_text("{")
    assert main(["sync", str(tmp_path), "--format", "json", "--timeout", "30"]) == 1
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [rows[r.path.name]["result"] for r in (good, bad, worse)] == ["complete", "DAMAGED", "DAMAGED"]
    assert "no run record in" in rows[bad.path.name]["missing"]


def test_nothing_to_sync_is_an_error(tmp_path, wandb_client, capsys):
    assert main(["sync", str(tmp_path)]) == 1
    assert "no run records below" in capsys.readouterr().err
