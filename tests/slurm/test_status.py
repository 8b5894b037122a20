"""The state of runs from records and queue."""

import json

import pytest

from slurm import manifest
from slurm.__main__ import main
from slurm.queue import QueuedJob, SlurmError, jobs
from slurm.status import RunStatus, decide, error_output, sweep_status, table


def queued(state: str) -> QueuedJob:
    return QueuedJob(state, "Priority", "node0")


@pytest.mark.parametrize(
    ("recorded", "in_queue", "state"),
    [
        ("finished", None, "finished"),
        ("finished", "RUNNING", "finished"),
        (None, "PENDING", "pending"),
        ("failed", "PENDING", "pending"),  # submitted again
        ("running", "REQUEUED", "pending"),
        ("running", "RUNNING", "running"),
        (None, "COMPLETING", "running"),
        ("failed", "FAILED", "failed"),
        ("running", "FAILED", "failed"),  # killed before it could write
        ("running", "COMPLETED", "failed"),  # ended without finishing its record
        ("running", "CANCELLED", "cancelled"),
        ("interrupted", "CANCELLED", "cancelled"),  # it saved itself first
        ("interrupted", "TIMEOUT", "interrupted"),
        ("running", "TIMEOUT", "failed"),
        ("running", None, "lost"),
        (None, None, "lost"),
        ("failed", None, "failed"),
    ],
)
def test_decide(recorded, in_queue, state):
    assert decide(recorded, in_queue and queued(in_queue)) == state


def submission(run_id: str, job_id: str) -> manifest.Submission:
    return manifest.Submission(
        run_id=run_id, job_id=job_id, submitted="2024-01-01T00:00:00+00:00", overrides=("seed=1",),
        config={"world_size": 2}, site={"nodes": 1}, code="code", logs=f".jobs/{job_id}",
    )  # fmt: skip


def record(sweep, run_id, status, iterations=0, error=None):
    folder = sweep / run_id
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "status": status, "error": error}))
    rows = [{"kind": "train", "iter": i, "loss": 2.0 - i} for i in range(iterations)]
    rows.append({"kind": "eval", "iter": 9, "loss": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')


def test_a_sweep_in_every_state(tmp_path):
    manifest.append(tmp_path, [submission("old", "1"), submission("a", "5_0"), submission("b", "5_1")])
    manifest.append(tmp_path, [submission("old", "7"), submission("c", "8")])
    record(tmp_path, "a", "finished", 2)
    record(tmp_path, "b", "failed", 1, {"type": "ValueError", "message": "no luck\nmore"})
    record(tmp_path, "local", "finished", 3)
    rows = {row.run_id: row for row in sweep_status(tmp_path, {"7": queued("PENDING"), "1": queued("FAILED")})}
    assert {run_id: row.state for run_id, row in rows.items()} == {
        "old": "pending", "a": "finished", "b": "failed", "c": "lost", "local": "finished",
    }  # fmt: skip
    assert (rows["old"].job_id, rows["old"].reason) == ("7", "Priority")
    assert (rows["a"].iteration, rows["a"].loss) == (2, 1.0)
    assert rows["b"].reason == "no luck"
    text = table(list(rows.values()))
    assert text.splitlines()[-1] == "1 failed, 2 finished, 1 lost, 1 pending"
    assert len(text.splitlines()) == 1 + 5 + 2


def test_a_cut_manifest_line_is_passed_over_and_another_schema_is_not(tmp_path):
    manifest.append(tmp_path, [submission("a", "5")])
    with (tmp_path / manifest.FILE).open("a") as file:
        file.write('{"schema": 2, "run_id"')
    assert list(manifest.read(tmp_path).submissions) == ["a"]
    manifest.append(tmp_path, [submission("b", "6")])  # on a line of its own
    assert list(manifest.read(tmp_path).submissions) == ["a", "b"]
    (tmp_path / manifest.FILE).write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="another version"):
        manifest.read(tmp_path)


def test_the_output_shown_is_that_of_the_rank_that_raised(tmp_path):
    logs = tmp_path / ".jobs" / "5"
    logs.mkdir(parents=True)
    (logs / "5_0_log.err").write_text("srun: error: killed\n")
    (logs / "5_1_log.err").write_text("noise\n" * 50 + "Traceback (most recent call last):\nValueError: no luck\n")
    assert error_output(tmp_path, submission("a", "5"), lines=2).splitlines()[-1] == "ValueError: no luck"
    assert "srun" not in error_output(tmp_path, submission("a", "5"))


def test_the_queue_is_asked_only_for_what_is_wanted(stand_ins):
    (stand_ins / "queue").write_text("5_0|RUNNING|None|node0\n5_1|PENDING|Priority|\n6|FAILED|NonZeroExitCode|node1\n")
    assert jobs([]) == {}
    assert jobs(["5_1", "9"]) == {"5_1": QueuedJob("PENDING", "Priority", "")}
    (stand_ins / "queue").write_text("5_0|RUNNING|None|node0\n5|CANCELLED|None|\n")
    assert {job_id: job.state for job_id, job in jobs(["5_0", "5_1"]).items()} == {"5_0": "RUNNING", "5_1": "CANCELLED"}


def test_accounting_tells_what_the_controller_has_forgotten(stand_ins):
    sweep = stand_ins / "sweep"
    sweep.mkdir()
    manifest.append(sweep, [submission(name, f"5_{k}") for k, name in enumerate("abcde")])
    record(sweep, "a", "running", 1)
    (stand_ins / "queue").write_text("5_3|RUNNING|None|node0\n")
    assert [row.state for row in sweep_status(sweep)] == ["lost", "lost", "lost", "running", "lost"]
    (stand_ins / "accounting").write_text(
        "5_0|NODE_FAIL|node1\n5_1|CANCELLED by 1000|\n5_2|OUT_OF_MEMORY|node0\n5_4|RUNNING|node0\n"
    )
    rows = sweep_status(sweep)  # the last one's end was lost with its controller
    assert [row.state for row in rows] == ["failed", "cancelled", "failed", "running", "lost"]
    assert [row.reason for row in rows][:4] == ["node fail", "", "out of memory", ""]


def test_status_knows_how_far_and_how_long(tmp_path):
    manifest.append(tmp_path, [submission("a", "5")])
    record(tmp_path, "a", "running", 0)
    head = {"status": "running", "iterations": 100, "segments": [{"code": {"commit": "c"}, "patch": "p"}, {}, {}]}
    (tmp_path / "a" / "run.json").write_text(json.dumps(head))
    rows = [{"kind": "train", "iter": i, "loss": 1.0, "iteration_s": 9.0 if i == 0 else 2.0} for i in range(40)]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = sweep_status(tmp_path, {"5": queued("RUNNING")})
    assert (row.iteration, row.iterations, row.iteration_s, row.eta_s, row.restarts) == (40, 100, 2.0, 120.0, 2)
    assert table([row]).splitlines()[1].split() == ["a", "5", "running", "40/100", "2", "0:02:00", "1", "2"]
    head, *_, legend, _, _ = table([row]).splitlines()
    assert "SEC/ITERATION" in head
    assert legend.startswith("SEC/ITERATION: median seconds of a training iteration on rank 0")
    waiting = table([RunStatus(run_id="a", job_id="5", state="pending")])
    assert "SEC/ITERATION" not in waiting, "nothing to explain"


NO_CONTROLLER = {
    "no configuration": "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "squeue: error: fetch_config: DNS SRV lookup failed\nsqueue: fatal: Could not establish a configuration source",
    "no daemon": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
}


@pytest.mark.parametrize("words", NO_CONTROLLER.values(), ids=NO_CONTROLLER)
def test_without_a_controller_the_records_are_shown_and_the_remedy_is_told(stand_ins, capsys, monkeypatch, words):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for name in ("squeue", "scancel", "sbatch"):
        (stand_ins / "bin" / name).write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    sweep = stand_ins / "sweep"
    sweep.mkdir()
    manifest.append(sweep, [submission("a", "5_0"), submission("b", "5_1"), submission("c", "5_2")])
    record(sweep, "a", "finished", 2)
    record(sweep, "b", "running", 1)
    assert main(["status", str(sweep)]) == 2
    output, errors = capsys.readouterr()
    assert output.splitlines()[-1] == "1 finished, 1 running, 1 submitted"
    assert errors.count("\n") == 1
    assert "SLURM_CONF is not set" in errors
    assert 'eval "$(python -m slurm local-cluster up)"' in errors
    assert "resolve_ctls" not in errors
    assert main(["cancel", str(sweep)]) == 2
    assert capsys.readouterr().err.startswith("error: squeue reaches no SLURM controller")
    monkeypatch.setenv("SLURM_CONF", "/c/slurm.conf")
    with pytest.raises(SlurmError, match=r"SLURM_CONF=/c/slurm\.conf: does it still run\?"):
        jobs(["5"])


def test_a_queue_that_cannot_be_asked_says_nothing_about_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="squeue is not on this machine"):
        jobs(["5"])


def test_commands(stand_ins, capsys):
    sweep = stand_ins / "sweep"
    sweep.mkdir()
    assert main(["status", str(sweep)]) == 2
    assert "holds no runs" in capsys.readouterr().err
    manifest.append(sweep, [submission("a", "5_0"), submission("b", "5_1")])
    (stand_ins / "queue").write_text("5_0|RUNNING|None|node0\n5_1|COMPLETED|None|node0\n")
    record(sweep, "b", "finished", 2)
    assert main(["status", str(sweep), "--json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["running", "finished"]
    assert main(["cancel", str(sweep)]) == 0
    assert (stand_ins / "cancelled").read_text() == "5_0\n"
    assert [row.state for row in sweep_status(sweep)] == ["cancelling", "finished"]
    (stand_ins / "queue").write_text("")  # SLURM has forgotten them
    assert [row.state for row in sweep_status(sweep)] == ["cancelled", "finished"]
    manifest.append(sweep, [submission("a", "7")])
    assert [row.state for row in sweep_status(sweep)] == ["lost", "finished"]
    assert main(["status", "no-such-sweep"]) == 2
