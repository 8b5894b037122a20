"""Which jobs a sweep becomes; SLURM's programs are stand-ins here."""

import json
import pickle

import hydra
import pytest

from experiments.command import plain
from experiments.config import TrainConfig
from experiments.settings import ConfigError
from slurm import launcher, manifest
from slurm.queue import SlurmError
from slurm.resources import Resources


def request(runs, *overrides):
    small = ["model=mlp", "cluster=default", "iterations=2", "tracking=none", f"runs={runs}", "sweep=s"]
    with hydra.initialize_config_module("experiments.conf", version_base="1.3"):
        config = hydra.compose("train", [*small, *overrides])
    return launcher.Request(TrainConfig.from_dict(plain(config)), overrides)


def scripts(folder):
    return [path.read_text() for path in sorted(folder.glob("script*"))]


def test_one_array_for_jobs_that_ask_for_the_same(stand_ins, capsys):
    sweep = stand_ins / "s"
    wanted = [request(stand_ins, f"schedule={name}", f"world_size={size}")
              for size in (2, 4) for name in ("dkfac", "mpdkfac", "spdkfac")]  # fmt: skip
    resources = Resources(partition="main", tasks_per_node=2, array_parallelism=2, setup=("echo ready",))
    submissions = launcher.submit(sweep, wanted, resources)
    assert [s.job_id for s in submissions] == ["101_0", "101_1", "101_2", "102_0", "102_1", "102_2"]
    two, four = scripts(stand_ins)
    for script, nodes in ((two, 1), (four, 2)):
        assert "#SBATCH --array=0-2%2" in script
        assert f"#SBATCH --nodes={nodes}\n" in script
        assert "#SBATCH --ntasks-per-node=2" in script
        assert "#SBATCH --partition=main" in script
        assert "--kill-on-bad-exit=1" in script
        assert "\necho ready\n" in script
    assert list(manifest.read(sweep).values()) == submissions
    assert "as job 102_2 (4 ranks on 2 nodes)" in capsys.readouterr().out


def test_a_job_holds_plain_data_and_its_place(stand_ins, monkeypatch):
    monkeypatch.chdir(stand_ins)
    (submission,) = launcher.submit(stand_ins / "runs" / "s", [request("runs", "seed=7")], Resources())
    pickles = list((stand_ins / "runs" / "s" / submission.logs).glob("*_submitted.pkl"))
    job = pickle.loads(pickles[0].read_bytes()).function
    assert job.config["seed"] == 7
    assert json.loads(json.dumps(job.config)) == job.config
    assert TrainConfig.from_dict(job.config).run_id == submission.run_id
    monkeypatch.chdir("/")  # wherever the job starts
    assert TrainConfig.from_dict(job.config).record_path == stand_ins / "runs" / "s" / submission.run_id


def test_what_is_finished_or_under_way_is_not_submitted_again(stand_ins, capsys):
    sweep = stand_ins / "s"
    one, two, three = (request(stand_ins, f"seed={seed}") for seed in range(3))
    first = launcher.submit(sweep, [one, two, three, one], Resources())
    assert len(first) == 3  # a repetition is one run
    (sweep / one.config.run_id).mkdir()
    (sweep / one.config.run_id / "run.json").write_text('{"status": "finished"}')
    (stand_ins / "queue").write_text(f"{first[1].job_id}|RUNNING|None|node0\n{first[2].job_id}|FAILED|None|node1\n")
    again = launcher.submit(sweep, [one, two, three], Resources())
    assert [s.run_id for s in again] == [three.config.run_id]
    output = capsys.readouterr().out
    assert f"skipped    {one.config.run_id}: finished" in output
    assert f"skipped    {two.config.run_id}: running as job {first[1].job_id}" in output
    over = request(stand_ins, "seed=0", "rerun=true")
    assert [s.run_id for s in launcher.submit(sweep, [over], Resources())] == [one.config.run_id]


def test_a_sweep_that_does_not_fit_submits_nothing(stand_ins):
    wanted = [request(stand_ins, "world_size=2"), request(stand_ins, "world_size=3")]
    with pytest.raises(ConfigError, match="world_size=3"):
        launcher.submit(stand_ins / "s", wanted, Resources(nodes=2))
    assert scripts(stand_ins) == []


def test_without_slurm_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="local-cluster up"):
        launcher.submit(tmp_path / "s", [request(tmp_path)], Resources())


def test_a_refused_job_is_told_in_sbatch_s_words(stand_ins, capsys):
    (stand_ins / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match=r"sbatch failed: .*invalid partition"):
        launcher.submit(stand_ins / "s", [request(stand_ins)], Resources(partition="nowhere"))
    assert manifest.read(stand_ins / "s") == {}
    assert capsys.readouterr().err == ""  # it is told once
    words = "sbatch: error: resolve_ctls_from_dns_srv: Unknown host\nCould not establish a configuration source"
    (stand_ins / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match=r"^sbatch reaches no SLURM controller \(SLURM_CONF"):
        launcher.submit(stand_ins / "s", [request(stand_ins)], Resources())


def test_waiting_ends_when_all_are_over_and_tells_failures(stand_ins, capsys):
    sweep = stand_ins / "s"
    wanted = [request(stand_ins, f"seed={seed}") for seed in range(2)]
    first, second = launcher.submit(sweep, wanted, Resources())
    (sweep / first.run_id).mkdir()
    (sweep / first.run_id / "run.json").write_text('{"status": "finished"}')
    (sweep / second.logs / f"{second.job_id}_1_log.err").write_text("Traceback\nValueError: no luck\n")
    (stand_ins / "queue").write_text(f"{second.job_id}|FAILED|NonZeroExitCode|node1\n")
    rows = launcher.wait(sweep, [first, second], poll_s=0.01)
    assert [row.state for row in rows] == ["finished", "failed"]
    text = launcher.failures(sweep, [first, second], rows)
    assert text.startswith(f"failed: {second.run_id} (job {second.job_id})")
    assert text.endswith("    ValueError: no luck")
    assert f"failed     {second.run_id}" in capsys.readouterr().out
