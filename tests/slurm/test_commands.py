"""``python -m slurm``: what it shows, and how long that takes for a thousand jobs."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from experiments.command import options_first
from experiments.train import main as train
from slurm import commands, manifest
from slurm.__main__ import main
from tests.slurm.test_status import record, submission

RUNS = 1000


@pytest.fixture
def sweep(stand_ins):
    folder = stand_ins / "runs" / "s"
    folder.mkdir(parents=True)
    manifest.note_grid(folder, overrides=["seed=0,1,2", "sweep=s", "runs=runs"], runs=3)
    manifest.append(folder, [submission("mlp-a", "5_0"), submission("mlp-b", "5_1"), submission("cnn-a", "6")])
    record(folder, "mlp-a", "finished", 2)
    record(folder, "mlp-b", "failed", 1, {"message": "no luck"})
    (stand_ins / "queue").write_text("6|RUNNING|None|node0\n")
    logs = folder / ".jobs" / "5_1"
    logs.mkdir(parents=True)
    (logs / "5_1_0_log.out").write_text("one\ntwo\nthree\n")
    (logs / "5_1_1_log.err").write_text("Traceback\nValueError: no luck\n")
    return folder


def test_ls_and_status_from_anywhere(sweep, capsys, monkeypatch):
    monkeypatch.chdir(sweep.parents[1])
    assert main(["ls"]) == 0
    line = capsys.readouterr().out
    assert line.split() == ["s", "1", "failed,", "1", "finished,", "1", "running", "seed=0,1,2"]
    assert main(["ls", "--json", "--runs", str(sweep.parent)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["states"] == {"failed": 1, "finished": 1, "running": 1}
    assert main(["status", "s"]) == 1
    assert "no luck" in capsys.readouterr().out
    assert main(["ls", "--runs", "nowhere"]) == 0


def test_watching_ends_when_all_are_over(sweep, capsys, monkeypatch):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        (sweep.parents[1] / "queue").write_text("")

    monkeypatch.setattr("slurm.commands.time", SimpleNamespace(sleep=pause))
    assert main(["status", str(sweep), "--watch", "3"]) == 1
    assert pauses == [3.0]
    assert "1 running" in (output := capsys.readouterr().out)
    assert output.splitlines()[-1] == "1 failed, 1 finished, 1 lost"


def test_logs_of_a_run_by_part_of_its_name_or_its_job(sweep, capsys):
    assert main(["logs", str(sweep), "mlp-b", "-n", "2"]) == 0
    text = capsys.readouterr().out
    assert "two\nthree\n" in text
    assert "one" not in text
    assert main(["logs", str(sweep), "5_1", "--errors"]) == 0
    text = capsys.readouterr().out
    assert "ValueError: no luck" in text
    assert "three" not in text
    assert main(["logs", str(sweep), "mlp"]) == 0
    assert "==> mlp-a (job 5_0) has written nothing yet" in capsys.readouterr().out
    assert main(["logs", str(sweep), "vit"]) == 2
    assert "has no run or job vit" in capsys.readouterr().err


def test_retry_says_which(sweep, capsys):
    assert main(["retry", str(sweep)]) == 2
    assert "retry --failed" in capsys.readouterr().err


def test_a_thousand_jobs_are_shown_within_two_seconds(stand_ins, capsys):
    """CPU time of this process: what the machine's other work takes does not count."""
    sweep = stand_ins / "many"
    sweep.mkdir()
    manifest.append(sweep, [submission(f"run{k:04}", f"5_{k}") for k in range(RUNS)])
    for k in range(RUNS):
        record(sweep, f"run{k:04}", "running", 40)
    (stand_ins / "queue").write_text("".join(f"5_{k}|RUNNING|None|node0\n" for k in range(RUNS)))
    start_cpu_s = time.process_time()
    assert main(["status", str(sweep)]) == 0
    cpu_s = time.process_time() - start_cpu_s
    assert capsys.readouterr().out.splitlines()[RUNS + 2] == f"{RUNS} running"
    assert cpu_s < 2


def test_what_only_the_owner_can_do(sweep, capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(sweep / "manifest.jsonl"))

    monkeypatch.setattr("slurm.manifest.note_cancelled", refuse)
    assert main(["cancel", str(sweep)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: no permission to write {sweep}/manifest.jsonl: its owner alone can do this\n"
    )
    assert not (sweep.parents[1] / "cancelled").exists()


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("a=1 -m b=2,3", "-m a=1 b=2,3"),
        ("a=1 --config-dir x=y +b=2 -m ~c", "--config-dir x=y -m a=1 +b=2 ~c"),
        ("--help", "--help"),
        ("", ""),
    ],
)
def test_options_may_stand_anywhere(typed, read):
    assert options_first(["train", *typed.split()]) == ["train", *read.split()]


def test_a_key_of_the_site_without_its_prefix_is_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", "-m", "site=slurm", "gpus_per_node=4", "cpus_per_task=4"])
    with pytest.raises(SystemExit) as end:
        train()
    assert "HYDRA_FULL_ERROR" not in os.environ  # or all later commands of this process would end in tracebacks
    assert end.value.code == 2
    assert "unknown key cpus_per_task (did you mean site.cpus_per_task?)" in capsys.readouterr().err


def test_a_grid_is_composed_once_and_only_shown(tmp_path, monkeypatch, capsys):
    composed = []

    def compose(self, master_config, sweep_overrides, *, real=ConfigLoaderImpl.load_sweep_config):
        composed.append(tuple(sweep_overrides))
        return real(self, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", compose)
    grid = ["--dry-run", "model=mlp", "cluster=default", "site=slurm", "seed=0,1,2", f"runs={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["train", *grid])
    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 0
    assert [text for line in composed for text in line if "seed" in text] == ["seed=0", "seed=1", "seed=2"]
    assert "3 runs, at most 3 core-hours" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_with_read_access_sees_the_same(sweep, capsys):
    reading, writing = os.pipe()
    for folder in (sweep, *sweep.parents):  # pytest's temporary folders are private
        if folder.stat().st_uid == 0 and folder != folder.parent and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            rows, _ = commands.states(sweep)
            os.write(writing, json.dumps([row.state for row in rows]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert json.loads(answer.read()) == ["finished", "failed", "running"]
