"""A sweep on a real SLURM, by the command lines that users type."""

import json
import subprocess

import pytest

from experiments.records import RunRecord
from tests.slurm.conftest import command

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

ITERATIONS = 4
SCHEDULES = ("dkfac", "mpdkfac", "spdkfac")
TINY = (
    "model=mlp", "model.hidden=[16]", "data=digits", "cluster=default", f"iterations={ITERATIONS}", "batch_size=16",
    "world_size=2", "tracking=none",
)  # fmt: skip
SLURM = ("hydra/launcher=slurm", "hydra.launcher.partition=main", "hydra.launcher.array_parallelism=1")


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


def scontrol(environment, *arguments):
    from slurm.local_cluster.cluster import client_environment

    variables = {**client_environment(), **environment}
    return subprocess.run(["scontrol", *arguments], env=variables, capture_output=True, text=True, check=True).stdout


def test_three_schedules_end_to_end(sweep, slurm_environment):
    done = train(sweep, slurm_environment, f"schedule={','.join(SCHEDULES)}", "hydra.launcher.wait=true")
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
    own = ("--config-dir", str(tmp_path / "conf"), "model=own", "+hydra.launcher.extra.hold=true")
    place = (f"runs={sweep.parent}", f"sweep={sweep.name}")
    rest = tuple(line for line in TINY if not line.startswith("model"))
    done = command("experiments.train", "-m", *own, *rest, *place, *SLURM, environment=slurm_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split(" as job ")[1].split()[0]
    assert status(sweep, slurm_environment) == ([("pending", "JobHeldUser")], 0)  # so it returned at once

    (group / "own.yaml").write_text("name: mlp\nhidden: [48]\n")
    scontrol(slurm_environment, "release", job)
    while status(sweep, slurm_environment)[0][0][0] in ("pending", "running"):
        pass
    (record,) = records(sweep).values()
    assert record.status == "finished"
    assert record.read("config.json")["model"]["hidden"] == [24]


def test_a_failed_training_fails_everywhere(sweep, slurm_environment):
    done = train(sweep, slurm_environment, "optimizer.lr=1e30", "hydra.launcher.wait=true")
    assert done.returncode == 1
    assert "NonFiniteError: step 1" in done.stdout
    job = done.stdout.split(" as job ")[1].split()[0]
    assert "JobState=FAILED" in scontrol(slurm_environment, "show", "job", job)
    (state,), code = status(sweep, slurm_environment)
    assert state[0] == "failed"
    assert code == 1
    (record,) = records(sweep).values()
    assert record.status == "failed"


def test_cancel(sweep, slurm_environment):
    train(sweep, slurm_environment, "+hydra.launcher.extra.hold=true", "seed=0,1")
    assert [state for state, _ in status(sweep, slurm_environment)[0]] == ["pending"] * 2
    assert command("slurm", "cancel", str(sweep), environment=slurm_environment).stdout == "cancelled 2 jobs\n"
    assert [state for state, _ in status(sweep, slurm_environment)[0]] == ["cancelled"] * 2


def test_an_impossible_combination_submits_nothing(sweep, slurm_environment):
    done = train(sweep, slurm_environment, "schedule=dkfac,nonsense")
    assert done.returncode == 2
    assert done.stderr.startswith("error: schedule=nonsense is not one of: ")
    done = train(sweep, slurm_environment, "hydra.launcher.nodes=3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "world_size=2 does not spread evenly over nodes with hydra.launcher.nodes=3" in done.stderr
    assert not (sweep / "manifest.jsonl").exists()
