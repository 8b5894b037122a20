"""Whole runs: complete records, one result whatever the schedule, bitwise continuation, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from experiments.records import find_records
from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.timeline import Timeline
from tests.experiments.conftest import ROOT, SMALL

NORMALISED = ("model=resnet20", "data.image_size=8", "batch_size=8", "optimizer.lr=0.02", "tracking=none")
LONG = (*NORMALISED, "world_size=2", "iterations=50", "kfac.inverse_interval=3", "progress=1", "checkpoint.every=10",
        "timeline.every=10", "timeline.count=3")  # fmt: skip


def only_record(folder):
    (record,) = find_records(folder)
    return record


def model(record):
    return torch.load(record.path / "model.pt", weights_only=True)


def losses(record):
    return {(row["kind"], row["iter"]): row["loss"] for row in record.rows()}


def in_background(folder, *overrides):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *overrides],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(process):
    """Process numbers of a launcher's ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == process.pid and "experiments.worker" in words:
            found[int(words[words.index("experiments.worker") + 2])] = int(folder.name)
    return found


def wait_for_rows(folder, count):
    end = time.monotonic() + 120
    while sum(len(path.read_text().splitlines()) for path in folder.rglob("metrics.jsonl")) < count:
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """An uninterrupted run that measures the machine first."""
    folder = tmp_path_factory.mktemp("measured")
    process = in_background(folder, *LONG, "cluster=measure", "profiling.iterations=2", "profiling.repeats=2")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return only_record(folder), output


def test_the_record_is_complete(measured):
    record, output = measured
    head, config = record.head, record.read("config.json")
    assert (head["status"], head["schedule"], head["model"], head["data"]) == (
        "finished",
        "spdkfac",
        "resnet20",
        "digits",
    )
    assert record.path.name == head["run_id"]
    assert (config["world_size"], config["schedule"]["placement"], config["kfac"]["inverse_interval"]) == (2, "lbp", 3)
    assert head["code"].keys() & {"commit", "version"}
    assert record.read("environment.json")["packages"]["torch"] == torch.__version__.partition("+")[0]
    plan = Plan.from_dict(record.read("plan.json"))
    assert (plan.world_size, len(plan.factors)) == (2, 78)
    assert ModelProfile.load(record.path / "model_profile.json").provenance["kind"] == "measured"
    assert ClusterProfile.load(record.path / "cluster_profile.json").world_size == 2
    rows = record.rows()
    assert [row["iter"] for row in rows if row["kind"] == "train"] == list(range(50))
    assert rows[-1]["kind"] == "eval"
    assert rows[-1]["iter"] == 49
    assert {"iter", "epoch", "loss", "accuracy", "lr", "iteration_s"} < rows[0].keys()
    assert "iteration 50/50" in output
    assert "ms per iteration" in output
    assert not (record.path / "checkpoint").exists()


def test_timelines_and_summary_agree(measured):
    record, _ = measured
    paths = record.timeline_paths()
    assert {i: len(p) for i, p in paths.items()} == {5: 2, 15: 2, 25: 2}
    # Iteration 15 updates factors and inverses; 5 and 25 are inside an inverse interval.
    merged = {i: Timeline.merge(map(Timeline.from_chrome_trace, p)) for i, p in paths.items()}
    everything = {"FF", "BP", "GradComm", "FactorComp", "FactorComm", "InverseComp", "InverseComm", "Precondition"}
    assert {span.kind for span in merged[15].spans} == everything
    assert {span.kind for span in merged[5].spans} == everything - {"InverseComp", "InverseComm"}
    summary = record.read("summary.json")
    mean_s = sum(timeline.iteration_s for timeline in merged.values()) / 3
    assert sum(summary["breakdown_s"].values()) == pytest.approx(mean_s)
    times = sorted(row["iteration_s"] for row in record.rows() if row["kind"] == "train" and row["iter"] >= 3)
    assert summary["iteration_s"]["n"] == len(times) == 47
    assert summary["iteration_s"]["median"] == times[23]
    assert summary["eval_loss"] == losses(record)["eval", 49]
    assert (record.path / "timeline.png").stat().st_size > 5000
    assert (record.path / "timeline.html").stat().st_size > 5000


def test_interrupted_killed_and_continued_is_bitwise_the_same(measured, tmp_path):
    """Also: measuring first changes nothing, as the continued run plans from the shipped profile."""
    command = (*LONG, "cluster=default")
    process = in_background(tmp_path, *command)
    wait_for_rows(tmp_path, 5)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    record = only_record(tmp_path)
    assert record.status == "interrupted"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    stopped = len(record.rows())
    assert (record.path / "checkpoint" / f"iter{stopped:06d}" / "commit.json").exists()

    process = in_background(tmp_path, *command)
    wait_for_rows(tmp_path, max(15, stopped + 3))
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert f"continuing from the checkpoint before iteration {stopped}" in output
    assert output.count("rank 1 was killed by SIGKILL") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    record = only_record(tmp_path)
    assert (record.status, record.head["error"]["rank"]) == ("failed", 1)

    process = in_background(tmp_path, *command)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    record = only_record(tmp_path)
    assert [segment["end_reason"] for segment in record.head["segments"]] == ["interrupted", "failed", "finished"]
    reference, _ = measured
    assert losses(record) == losses(reference)
    ours, theirs = model(record), model(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_schedules_and_splits_train_alike(command, tmp_path):
    """The whole path from images to parameters: two processes with half the batch are one with the whole."""
    small = (*SMALL, "iterations=6", "evaluation.every=6", "timeline.count=0")
    command("train", *small, "batch_size=16", "schedule=kfac", "sweep=one")
    pair = ("-m", *small, "batch_size=8", "world_size=2", "schedule=mpdkfac,sgd", "sweep=two")
    command("train", *pair)
    one = only_record(tmp_path / "runs" / "one")
    mpdkfac, sgd = find_records(tmp_path / "runs" / "two")
    assert [record.head["schedule"] for record in (mpdkfac, sgd)] == ["mpdkfac", "sgd"]
    assert losses(mpdkfac) == pytest.approx(losses(one), rel=1e-4)
    assert losses(sgd)["train", 5] != pytest.approx(losses(one)["train", 5], rel=1e-2)
    assert not list(tmp_path.glob("outputs*")) + list(tmp_path.glob("multirun*"))

    assert command("train", *pair).stdout.count("has finished before: skipped") == 2


def test_a_failing_run_shows_its_error_once(command, tmp_path):
    done = command("train", *SMALL, "world_size=2", "iterations=5", "optimizer.lr=1e30", check=False)
    assert done.returncode == 1
    assert done.stderr.count("NonFiniteError: step") == 2  # in the message and at the traceback's end
    assert done.stderr.count("Traceback") == 1
    record = only_record(tmp_path)
    assert record.status == "failed"
    assert "NonFiniteError" in record.head["error"]["message"]


def test_ranks_that_slurm_started(tmp_path):
    overrides = (*SMALL, "world_size=2", "iterations=4", "timeline.start=2")
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "5",
        "SLURM_RESTART_COUNT": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "experiments.train", *overrides],
            cwd=tmp_path,
            env={**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    record = only_record(tmp_path)
    assert record.status == "finished"
    assert record.head["segments"][0]["restart"] == 1
    assert len(record.timeline_paths()[2]) == 2
    assert "iteration 4/4" in outputs[0]
    assert "iteration" not in outputs[1]
