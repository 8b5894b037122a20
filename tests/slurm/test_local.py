"""The same command without SLURM: a grid on this machine, a few runs at a time."""

import json
import os
import signal
import subprocess
import sys

from experiments.records import RunRecord
from slurm import manifest
from slurm.local import is_local, jobs
from slurm.status import sweep_status
from tests.slurm.conftest import ROOT, command
from tests.slurm.test_status import submission
from tests.slurm.test_survival import until

TINY = (
    "model=mlp", "model.hidden=[8]", "data.image_size=8", "cluster=default", "batch_size=16",
    "tracking=none", "timeline.count=0", "evaluation.every=1000", "progress=1", "schedule=kfac",
)  # fmt: skip


def test_a_grid_is_run_once_watched_and_interrupted_and_continued(tmp_path):
    overrides = ("-m", *TINY, "iterations=800", "seed=0,1", f"runs={tmp_path}", "sweep=s", "site=local")
    overrides += ("site.parallel=2",)
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *overrides], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    sweep = tmp_path / "s"
    until(lambda: len(list(sweep.glob("*/metrics.jsonl"))) == 2)
    assert {row.state for row in sweep_status(sweep)} == {"running"}
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert {row.state for row in sweep_status(sweep)} == {"interrupted"}
    process = command("experiments.train", *overrides)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("iterations, continues") == 2
    assert {row.state for row in sweep_status(sweep)} == {"finished"}
    for path in sweep.glob("*/run.json"):
        record = RunRecord.load(path.parent)
        assert [row["iter"] for row in record.rows() if row["kind"] == "train"] == list(range(800))
    assert all(is_local(s.job_id) for s in manifest.read(sweep).submissions.values())


def test_a_crash_is_tried_again_and_a_mistake_is_not(tmp_path):
    place = (f"runs={tmp_path}", "sweep=s", "site=local", "site.retries=1")
    done = command("experiments.train", "-m", *TINY, "iterations=3", "optimizer.lr=1e30", *place)
    assert done.returncode == 1
    (row,) = sweep_status(tmp_path / "s")
    assert row.state == "failed"
    assert "NonFiniteError" in row.reason
    (submission_,) = manifest.read(tmp_path / "s").submissions.values()
    attempts = (tmp_path / "s" / submission_.logs / "attempts.jsonl").read_text().splitlines()
    assert len(attempts) == 1  # it would fail again
    assert json.loads(attempts[0])["outcome"] == "failed"


def test_a_local_job_is_alive_as_long_as_its_process(tmp_path):
    import socket

    from slurm.local import job_id

    mine = submission("a", job_id())
    assert jobs([mine], {"a": "running"})[mine.job_id].state == "RUNNING"
    assert jobs([mine], {"a": None})[mine.job_id].state == "PENDING"
    gone = submission("a", f"local:{socket.gethostname()}:{os.getpid()}:0")
    assert jobs([gone], {"a": "running"}) == {}
    elsewhere = submission("a", "local:elsewhere:1:1")
    assert jobs([elsewhere], {"a": "running"})["local:elsewhere:1:1"].state == "RUNNING"
    assert jobs([elsewhere], {"a": "failed"}) == {}
