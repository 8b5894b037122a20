"""A sweep on a real SLURM, by the command lines that users type."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from experiments.config import TrainConfig
from experiments.records import RunRecord
from experiments.settings import ConfigError
from slurm import launcher
from slurm.status import sweep_status
from tests.slurm.conftest import ROOT, command, compose, scontrol

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ITERATIONS = 4
SCHEDULES = ("dkfac", "mpdkfac", "spdkfac")
TINY = (
    "model=mlp", "model.hidden=[16]", "data.image_size=8", "cluster=default", f"iterations={ITERATIONS}",
    "batch_size=16", "world_size=2", "tracking=none",
)  # fmt: skip
SLURM = ("site=local_cluster", "site.array_parallelism=1")


@pytest.fixture
def sweep(tmp_path):
    return tmp_path / "comparison"


def train(sweep, environment, *overrides):
    place = (f"runs={sweep.parent}", f"sweep={sweep.name}")
    return command("experiments.train", "-m", *TINY, *place, *SLURM, *overrides, environment=environment)


def records(sweep):
    return {record.head["schedule"]: record for record in map(RunRecord.load, sorted(sweep.glob("mlp-*")))}


def status(sweep, environment):
    done = command("slurm", "status", str(sweep), "--json", environment=environment)
    return [(row["state"], row["reason"]) for row in json.loads(done.stdout)], done.returncode


def test_three_schedules_end_to_end(sweep, slurm_environment):
    done = train(sweep, slurm_environment, f"schedule={','.join(SCHEDULES)}", "site.wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("submitted ") == 3
    assert (
        len({line.split()[4].split("_")[0] for line in done.stdout.splitlines() if "submitted" in line}) == 1
    )  # array

    found = records(sweep)
    assert sorted(found) == sorted(SCHEDULES)
    for record in found.values():
        assert record.status == "finished"
        assert record.head["world_size"] == 2
        rows = record.rows()
        assert [row["iter"] for row in rows if row["kind"] == "train"] == list(range(ITERATIONS))
        assert any(row["kind"] == "eval" for row in rows)
    losses = {name: [row["loss"] for row in record.rows()] for name, record in found.items()}
    assert losses["mpdkfac"] == pytest.approx(losses["dkfac"], rel=1e-4)  # one algorithm under three schedules
    assert losses["spdkfac"] == pytest.approx(losses["dkfac"], rel=1e-4)
    assert status(sweep, slurm_environment) == ([("finished", "")] * 3, 0)

    comparison = command("analysis", str(sweep))
    assert comparison.returncode == 0, comparison.stderr
    assert all(name in comparison.stdout for name in SCHEDULES)

    again = train(sweep, slurm_environment, f"schedule={','.join(SCHEDULES)}")
    assert again.returncode == 0
    assert again.stdout.count("skipped ") == 3
    assert "submitted" not in again.stdout


def test_a_waiting_job_keeps_its_configuration(sweep, slurm_environment, tmp_path):
    group = tmp_path / "conf" / "model"
    group.mkdir(parents=True)
    (group / "own.yaml").write_text("name: mlp\nhidden: [24]\n")
    own = ("--config-dir", str(tmp_path / "conf"), "model=own", "+site.extra.hold=true")
    place = (f"runs={sweep.parent}", f"sweep={sweep.name}")
    rest = tuple(line for line in TINY if not line.startswith("model"))
    done = command("experiments.train", "-m", *own, *rest, *place, *SLURM, environment=slurm_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split(" as job ")[1].split()[0]
    assert status(sweep, slurm_environment) == ([("pending", "JobHeldUser")], 0)  # so it returned at once

    (group / "own.yaml").write_text("name: mlp\nhidden: [48]\n")
    scontrol("release", job, environment=slurm_environment)
    while status(sweep, slurm_environment)[0][0][0] in ("pending", "running"):
        pass
    (record,) = records(sweep).values()
    assert record.status == "finished"
    assert record.read("config.json")["model"]["hidden"] == [24]


def test_a_failed_training_fails_everywhere(sweep, slurm_environment):
    done = train(sweep, slurm_environment, "optimizer.lr=1e30", "site.wait=true")
    assert done.returncode == 1
    assert "NonFiniteError: step 1" in done.stdout
    job = done.stdout.split(" as job ")[1].split()[0]
    assert "JobState=FAILED" in scontrol("show", "job", job, environment=slurm_environment)
    (state,), code = status(sweep, slurm_environment)
    assert state[0] == "failed"
    assert code == 1
    (record,) = records(sweep).values()
    assert record.status == "failed"


def test_cancel(sweep, slurm_environment):
    train(sweep, slurm_environment, "+site.extra.hold=true", "seed=0,1")
    assert [state for state, _ in status(sweep, slurm_environment)[0]] == ["pending"] * 2
    assert command("slurm", "cancel", str(sweep), environment=slurm_environment).stdout == "cancelled 2 jobs\n"
    assert [state for state, _ in status(sweep, slurm_environment)[0]] == ["cancelled"] * 2


def test_an_impossible_combination_submits_nothing(sweep, slurm_environment):
    done = train(sweep, slurm_environment, "schedule=dkfac,nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("error: schedule=nonsense is not one of: ")
    done = train(sweep, slurm_environment, "nodes=3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "world_size=2 does not spread evenly over nodes with nodes=3" in done.stderr
    assert not (sweep / "manifest.jsonl").exists()


def with_seeds(request, count):
    data = request.config.to_dict()
    return [replace(request, config=TrainConfig.from_dict({**data, "seed": seed})) for seed in range(count)]


@pytest.fixture(scope="module")
def warm_python(tmp_path_factory):
    """A command that behaves as ``python -m`` and starts at once (on this machine)."""
    script, path = ROOT / "tests" / "slurm" / "warm_python.py", tmp_path_factory.mktemp("warm") / "socket"
    server = subprocess.Popen(
        [sys.executable, str(script), str(path), "serve"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert server.stdout.readline() == b"ready\n"
    yield f"{sys.executable} -S {script} {path}"
    server.stdin.close()
    server.wait()


def test_a_sweep_after_another(tmp_path, slurm_in_process, warm_python):
    """The dependent job sees what all jobs before it left; it never starts where one of them fails."""
    small = (*TINY, "timeline.count=0", "schedule=dkfac", "site=local_cluster", f"site.python='{warm_python}'")

    def submit(name, *overrides, seeds=1):
        request = compose(tmp_path, *small, f"sweep={name}", *overrides)
        return tmp_path / name, launcher.submit(tmp_path / name, with_seeds(request, seeds))

    first, before = submit("first", "site.array_parallelism=1", seeds=2)
    look = f"site.setup=['cat {first}/*/summary.json >{tmp_path}/seen']"
    second, after = submit("second", look, "site.after=first")
    broken, _ = submit("broken", "optimizer.lr=1e30")
    never, jobs = submit("never", "site.after=broken")
    assert [row.state for row in sweep_status(never)] == ["pending"]

    assert [row.state for row in launcher.wait(second, after)] == ["finished"]
    assert [row.state for row in sweep_status(first)] == ["finished"] * 2
    paths = sorted(first.glob("*/summary.json"))
    assert (tmp_path / "seen").read_text() == "".join(path.read_text() for path in paths)
    ends = [RunRecord.load(first / one.run_id).head["finished"] for one in before]
    assert RunRecord.load(second / after[0].run_id).head["segments"][0]["start"] >= max(ends)

    (row,) = launcher.wait(never, jobs)
    assert (row.state, row.reason) == ("cancelled", "the sweep of site.after did not finish")
    assert [row.state for row in sweep_status(broken)] == ["failed"]
    assert not list(never.glob("*/run.json"))
    with pytest.raises(ConfigError, match=r"site\.after=broken: .* is failed"):
        launcher.resubmit(never, {"cancelled"})


def test_ranks_that_do_not_meet_end_soon_and_say_why(tmp_path, slurm_in_process, warm_python):
    python = tmp_path / "python"  # whose second rank hangs where it would import
    hangs = '[ "$SLURM_PROCID" = 1 ] && [ -z "${*##*submitit*}" ] && exec sleep 600'
    python.write_text(f'#!/bin/sh\n{hangs}\nexec {warm_python} "$@"\n')
    python.chmod(0o755)
    small = (*TINY, "schedule=dkfac", "site=local_cluster", "tasks_per_node=1")
    found = {}
    for name, *site in (
        ("interface", f"site.python='{warm_python}'", "site.interface=ib9", "site.retries=1"),
        ("absent", f"site.python={python}", "site.start_timeout_s=3", "site.retries=0"),
    ):
        submissions = launcher.submit(tmp_path / name, [compose(tmp_path, *small, f"sweep={name}", *site)])
        found[name] = (tmp_path / name, submissions)
    rows = {name: launcher.wait(*sweep)[0] for name, sweep in found.items()}
    assert {row.state for row in rows.values()} == {"failed"}
    assert "site.interface=ib9: " in rows["interface"].reason
    assert "of 2 ranks these did not come within 3 s: 1." in rows["absent"].reason
    tried = {name: scontrol("show", "job", row.job_id) for name, row in rows.items()}
    assert "Restarts=1 " in tried["interface"]  # and no more
    assert "Restarts=0 " in tried["absent"]  # also where srun tells of the terminated rank


def test_a_hundred_tiny_jobs_in_one_array(tmp_path, slurm_in_process, warm_python):
    one_rank = tuple(line for line in TINY if not line.startswith(("world_size", "iterations")))
    small = (*one_rank, "iterations=1", "schedule=sgd", "timeline.count=0", "sweep=s", "site=local_cluster")
    site = (f"site.python='{warm_python}'", "site.array_parallelism=6")
    requests = with_seeds(compose(tmp_path, *small, *site), 100)
    sweep = tmp_path / "s"
    submissions = launcher.submit(sweep, requests)
    assert {s.job_id.split("_")[0] for s in submissions} == {submissions[0].job_id.split("_")[0]}
    rows = launcher.wait(sweep, submissions)
    assert [row.state for row in rows] == ["finished"] * 100
    found = [RunRecord.load(sweep / request.config.run_id) for request in requests]
    assert [record.head["seed"] for record in found] == list(range(100))
    assert all([row["kind"] for row in record.rows()] == ["train", "eval"] for record in found)
    assert len({record.head["segments"][0]["job"] for record in found}) == 100
    assert launcher.submit(sweep, requests) == []
