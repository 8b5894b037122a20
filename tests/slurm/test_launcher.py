"""Which jobs a sweep becomes; SLURM's programs are stand-ins here."""

import json
import pickle
from pathlib import Path

import pytest

from experiments.config import TrainConfig
from experiments.settings import ConfigError
from kfac.planning.shipped_profiles import load_shipped_cluster
from slurm import launcher, manifest
from slurm.plan import present_code
from slurm.queue import SlurmError
from slurm.status import sweep_status
from tests.slurm.conftest import compose


def request(runs, *overrides):
    small = ("model=mlp", "cluster=default", "iterations=2", "tracking=none", "sweep=s", "site=slurm")
    return compose(runs, *small, *overrides)


def scripts(folder):
    return [path.read_text() for path in sorted(folder.glob("script*"))]


def test_one_array_for_jobs_that_ask_for_the_same(stand_ins, capsys):
    sweep = stand_ins / "s"
    site = ("site.partition=main", "tasks_per_node=2", "site.array_parallelism=2", "site.setup=[echo ready]")
    wanted = [request(stand_ins, f"schedule={name}", f"world_size={size}", *site)
              for size in (2, 4) for name in ("dkfac", "mpdkfac", "spdkfac")]  # fmt: skip
    submissions = launcher.submit(sweep, wanted)
    assert [s.job_id for s in submissions] == ["101_0", "101_1", "101_2", "102_0", "102_1", "102_2"]
    two, four = scripts(stand_ins)
    for script, nodes in ((two, 1), (four, 2)):
        assert "#SBATCH --array=0-2%2" in script
        assert f"#SBATCH --nodes={nodes}\n" in script
        assert "#SBATCH --ntasks-per-node=2" in script
        assert "#SBATCH --partition=main" in script
        assert "--kill-on-bad-exit=1" in script
        assert "\necho ready\n" in script
    assert list(manifest.read(sweep).submissions.values()) == submissions
    assert "as job 102_2 (4 ranks on 2 nodes)" in capsys.readouterr().out


def test_a_job_holds_plain_data_and_its_place(stand_ins, monkeypatch):
    monkeypatch.chdir(stand_ins)
    (submission,) = launcher.submit(stand_ins / "runs" / "s", [request("runs", "seed=7")])
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
    first = launcher.submit(sweep, [one, two, three, one])
    assert len(first) == 3  # a repetition is one run
    (sweep / one.config.run_id).mkdir()
    (sweep / one.config.run_id / "run.json").write_text('{"status": "finished"}')
    (stand_ins / "queue").write_text(f"{first[1].job_id}|RUNNING|None|node0\n{first[2].job_id}|FAILED|None|node1\n")
    again = launcher.submit(sweep, [one, two, three])
    assert [s.run_id for s in again] == [three.config.run_id]
    output = capsys.readouterr().out
    assert f"skipped    {one.config.run_id}: finished" in output
    assert f"skipped    {two.config.run_id}: running as job {first[1].job_id}" in output
    over = request(stand_ins, "seed=0", "rerun=true")
    assert [s.run_id for s in launcher.submit(sweep, [over])] == [one.config.run_id]


def test_a_sweep_that_does_not_fit_submits_nothing(stand_ins):
    wanted = [request(stand_ins, f"world_size={size}", "nodes=2") for size in (2, 3)]
    with pytest.raises(ConfigError, match="world_size=3"):
        launcher.submit(stand_ins / "s", wanted)
    assert scripts(stand_ins) == []


def test_without_slurm_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="local-cluster up"):
        launcher.submit(tmp_path / "s", [request(tmp_path)])


def test_a_refused_job_is_told_in_sbatch_s_words(stand_ins, capsys):
    (stand_ins / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match=r"sbatch failed: .*invalid partition"):
        launcher.submit(stand_ins / "s", [request(stand_ins, "site.partition=nowhere")])
    assert manifest.read(stand_ins / "s").submissions == {}
    assert capsys.readouterr().err == ""  # it is told once
    words = "sbatch: error: resolve_ctls_from_dns_srv: Unknown host\nCould not establish a configuration source"
    (stand_ins / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    with pytest.raises(SlurmError, match=r"^sbatch reaches no SLURM controller \(SLURM_CONF"):
        launcher.submit(stand_ins / "s", [request(stand_ins)])


def test_waiting_ends_when_all_are_over_and_tells_failures(stand_ins, capsys):
    sweep = stand_ins / "s"
    wanted = [request(stand_ins, f"seed={seed}") for seed in range(2)]
    first, second = launcher.submit(sweep, wanted)
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


def test_a_dry_run_shows_plan_script_and_cost_and_does_nothing(stand_ins, capsys):
    site = ("gpus_per_node=4", "site.time_min=90", "site.account=optim", "nodes=null")
    wanted = [request(stand_ins, f"world_size={size}", f"seed={seed}", *site) for size in (2, 8) for seed in (0, 1)]
    text = launcher.dry_run(stand_ins / "s", wanted)
    assert "array of 2: 2 ranks on 1 node (2 each), 2 GPUs, 90 min at most" in text
    assert "array of 2: 8 ranks on 2 nodes (4 each), 8 GPUs, 90 min at most" in text
    assert "4 runs, at most 30 GPU-hours, 30 core-hours" in text  # 2 * (2 + 8) GPUs * 1.5 h
    assert text.count("#SBATCH --account=optim") == 2
    assert "#SBATCH --array=0-1%2" in text
    assert not (stand_ins / "s").exists()
    launcher.submit(stand_ins / "s", wanted)
    shown = text.split("\n\n#!/bin/bash")[1].replace("PYTHONPATH=CODE", "PYTHONPATH=X")
    (submission, *_) = manifest.read(stand_ins / "s").submissions.values()
    assert f"#!/bin/bash{shown}".strip() == scripts(stand_ins)[0].replace(submission.code, "X").strip()
    text = launcher.dry_run(stand_ins / "s", wanted)  # squeue knows nothing of them: lost before they began
    assert text.startswith(f"submit {wanted[0].config.run_id}: lost, starts over")


def test_interrupted_runs_continue_and_other_code_is_told(stand_ins, capsys):
    sweep = stand_ins / "s"
    one, two = (request(stand_ins, f"seed={seed}") for seed in range(2))
    launcher.submit(sweep, [one, two])
    code = present_code()
    for wanted, status, identity in ((one, "interrupted", code), (two, "finished", {**code, "commit": "other"})):
        folder = sweep / wanted.config.run_id
        folder.mkdir()
        segment = {"code": {key: identity[key] for key in identity if key != "patch"}, "patch": code["patch"]}
        head = {"status": status, "iterations": 2, "segments": [segment]}
        (folder / "run.json").write_text(json.dumps(head))
        (folder / "metrics.jsonl").write_text('{"kind": "train", "iter": 0, "iteration_s": 0.5}\n')
    capsys.readouterr()
    again = launcher.submit(sweep, [one, two])
    assert [s.run_id for s in again] == [one.config.run_id]
    output = capsys.readouterr().out
    assert "interrupted after 1 iterations, continues" in output
    assert f"skipped    {two.config.run_id}: finished by other code than this (rerun=true starts it over)" in output
    assert [row.state for row in sweep_status(sweep, {})] == ["interrupted", "finished"]


def test_a_profile_that_is_edited_while_its_job_waits_changes_nothing(stand_ins):
    profile = stand_ins / "own.json"
    load_shipped_cluster("paper64").save(profile)
    before = profile.read_text()
    wanted = request(stand_ins, f"cluster={profile}", "world_size=2")
    run_id = wanted.config.run_id
    (submission,) = launcher.submit(stand_ins / "s", [wanted])
    profile.write_text("")
    config = TrainConfig.from_dict(submission.config)
    assert config.run_id == run_id == submission.run_id
    assert Path(config.cluster).read_text() == before


def test_a_sweep_after_another_waits_for_its_jobs(stand_ins):
    first = launcher.submit(stand_ins / "s", [request(stand_ins, f"seed={seed}") for seed in range(2)])
    (stand_ins / "queue").write_text("".join(f"{s.job_id}|PENDING|Priority|\n" for s in first))
    later = request(stand_ins, "sweep=t", "site.after=s")
    launcher.submit(stand_ins / "t", [later])
    assert "#SBATCH --dependency=afterok:101_0:101_1" in scripts(stand_ins)[1]
    assert "#SBATCH --kill-on-invalid-dep=yes" in scripts(stand_ins)[1]
    (stand_ins / "queue").write_text(f"{first[0].job_id}|FAILED|None|node0\n")
    with pytest.raises(ConfigError, match=r"site.after=s: .* is failed"):
        launcher.submit(stand_ins / "u", [request(stand_ins, "sweep=u", "site.after=s")])


def test_failed_runs_are_handed_over_again_as_they_were_asked_for(stand_ins):
    sweep = stand_ins / "s"
    wanted = [request(stand_ins, f"seed={seed}", "site.partition=gpu", "site.time_min=7") for seed in range(3)]
    first = launcher.submit(sweep, wanted)
    states = ("FAILED", "RUNNING", "CANCELLED")
    queue = [f"{s.job_id}|{state}|None|\n" for s, state in zip(first, states, strict=True)]
    (stand_ins / "queue").write_text("".join(queue))
    assert [s.run_id for s in launcher.resubmit(sweep, {"failed"})] == [first[0].run_id]
    assert "#SBATCH --time=7" in scripts(stand_ins)[1]
    assert "#SBATCH --partition=gpu" in scripts(stand_ins)[1]
    assert launcher.resubmit(sweep, set()) == []
