"""Runs that plan anew: the decision in record and tracking, and continuation under the Plan that was chosen."""

from __future__ import annotations

import json
import shutil
import signal

import torch

from kfac.planning import ClusterProfile, ModelProfile, Plan
from tests.experiments.conftest import SMALL
from tests.experiments.test_training import LONG, in_background, losses, only_record, wait_for_rows

ALONE = ("schedule.replan_turns=0",)  # no turns are taken
RUN = (*LONG, "schedule=auto", "schedule.replan_after=6", *ALONE, "profiling.repeats=2", "iterations=18")
RUN = (*RUN, "checkpoint.every=8")


def read(record, name):
    return json.loads((record.path / name).read_text())


def test_a_run_plans_anew_and_continues_with_that_plan(tmp_path):
    process = in_background(tmp_path, *RUN, "tracking=tensorboard")
    wait_for_rows(tmp_path, 11)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    record = only_record(tmp_path)
    chosen = read(record, "choice.json")
    assert "measuring this machine" not in output
    assert "planning anew from the run's own times after 6 iterations" in output
    assert output.index("estimated model profile") < output.index("planned anew after 6 steps"), "why, from the start"
    assert "named schedules: " in output
    assert chosen["replanned"]["step"] == 6
    kept = chosen["replanned"]["kept"]
    assert kept in (chosen["plan"], chosen["replanned"]["before"])
    assert kept == Plan.from_dict(read(record, "plan.json")).fingerprint
    assert chosen["iteration_s"] <= min(chosen["named_s"][name] for name in ("dkfac", "mpdkfac", "spdkfac"))
    assert ModelProfile.load(record.path / "model_profile.json").provenance["how"] == "the run's own iterations"
    assert ClusterProfile.load(record.path / "cluster_profile.json").world_size == 2
    stopped = len(record.rows())
    saved = torch.load(record.path / "checkpoint" / f"iter{stopped:06d}" / "shared.pt", weights_only=True)
    assert saved["replanner"] == {"done": True}
    assert Plan.from_dict(saved["kfac"]["plan"]).fingerprint == kept
    uninterrupted = losses(record)
    shutil.rmtree(record.path / "checkpoint" / f"iter{stopped:06d}")

    process = in_background(tmp_path, *RUN, "tracking=none")
    again, _ = process.communicate(timeout=120)
    assert process.returncode == 0, again
    assert "continuing from the checkpoint before iteration 8" in again
    assert "planned anew" not in again
    assert "the fastest of" not in again, "of a decision that is no more"
    record = only_record(tmp_path)
    assert read(record, "choice.json") == chosen
    assert Plan.from_dict(read(record, "plan.json")).fingerprint == kept
    assert min(record.timeline_paths()) == 7, "pictures are of the plan that stays"
    assert record.read("summary.json")["iteration_s"]["n"] == 18 - 7
    continued = losses(record)
    both = [key for key in uninterrupted if key[1] >= 8]
    assert len(both) >= 3
    assert {key: continued[key] for key in both} == {key: uninterrupted[key] for key in both}


def test_a_given_profile_is_explained_at_once(command, tmp_path):
    done = command("train", *SMALL, "schedule=auto", "world_size=2", "iterations=2")
    chosen = read(only_record(tmp_path), "choice.json")
    assert chosen["sources"] == {"model": "estimated", "cluster": "estimated"}
    assert "replanned" not in chosen
    assert chosen["plan"] == Plan.from_dict(read(only_record(tmp_path), "plan.json")).fingerprint
    assert "named schedules: " in done.stdout


def test_simulate_says_what_auto_chooses(command, tmp_path):
    done = command("simulate", "model=resnet50", "schedule=auto", "cluster=paper64", "world_size=64")
    assert "the fastest of" in done.stdout
    assert "spdkfac 467.0 ms" in done.stdout
    chosen = json.loads((tmp_path / "simulated" / "resnet50-auto-w64.choice.json").read_text())
    assert chosen["named_s"]["spdkfac"] == max(chosen["named_s"]["spdkfac"], chosen["iteration_s"])
