"""What people mistype and what disks lose: one line before any process starts, and never a hole in a record."""

import logging
import signal
import subprocess
import sys
import time

import pytest
import torch

from experiments.arguments import check_arguments
from experiments.command import RunFailedError
from experiments.config import TrainConfig
from experiments.launch import LaunchError, RankFailure
from experiments.ranks import Rank
from experiments.records import RunRecord
from experiments.settings import ConfigError
from experiments.train import begin, end, run_here
from experiments.training import train
from tests.experiments.conftest import ROOT, SMALL
from tests.experiments.test_config import compose, mistake

HUGE = "9" * 30


@pytest.mark.parametrize(
    "override",
    [
        *(f"{key}={value}" for key in ("world_size", "seed", "epochs") for value in ("nan", "inf", "1e30", HUGE)),
        *("batch_size=1e12", "threads=4097", "data.image_size=5000", "iterations=1e15", "world_size=65537"),
        *(
            "evaluation.batch_size=1e9",
            "timeline.count=1e9",
            "optimizer.decay_epochs=[1,-1]",
            f"optimizer.lr={'9' * 400}",
        ),
        *(f"kfac.factor_interval={HUGE}", f"schedule.lbp_rule={HUGE}", "kfac.include=[1]", "kfac.exclude=5"),
        *("sweep=..", "sweep=a/b", 'sweep=" "', "name=..", "name=a/b", 'name=""', "schedule.name=a/b", 'runs=""'),
        *("~optimizer", "~model", "~optimizer.lr"),
    ],
)
def test_impossible_values_are_one_line_that_names_the_key(override):
    assert override.lstrip("~").partition("=")[0] in mistake(override)


def test_simulate_has_the_same_limits():
    for override in ("world_size=65537", "world_size=nan", 'output=""', "schedule.name=a/b"):
        assert override.partition("=")[0] in mistake(override, name="simulate")
    compose("world_size=65536", name="simulate")


@pytest.mark.parametrize(
    "argument",
    [
        "model=null",
        "schedule=[dkfac,spdkfac]",
        "schedule=dkfac,null",
        "+kfac=[paper]",
        "tracking=3",
        "data=true",
        "=1",
        "~=1",
    ],
)
def test_groups_take_names(argument):
    with pytest.raises(ConfigError, match=r"is not one of: \w+|has no key"):
        check_arguments([argument])
    check_arguments(
        [
            "model=mlp",
            "-m",
            "schedule=dkfac,spdkfac",
            "schedule=glob(*)",
            "tracking=none",
            "site=null",
            "seed=1",
            "~site",
        ]
    )


@pytest.mark.parametrize("override", ["name=a b(c", "name=x=y", "name='", "runs=a;b{"])
def test_special_characters_are_to_be_quoted(override):
    assert f"cannot read {override} (" in mistake(override)
    assert "quote a value with special characters" in mistake(override)
    assert mistake("-x") == "unknown option -x (--help shows the options)"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=null"], "model=null is not one of: autoencoder"),
        (["site=slurm"], "site=slurm takes sweeps, also of one run: add -m"),
        (["kfac.exclude=[nothing.*]"], "kfac.exclude: no module of model=mlp matches 'nothing.*'"),
        (["kfac.overrides=[{pattern: conv*, lr: 1}]"], "kfac.overrides: no module of model=mlp matches 'conv*'"),
        (["kfac.layers=[embedding]"], "model=mlp: K-FAC finds no layer to precondition"),
        (["world_size=2", "cluster=paper64", "model_profile=resnet50"], "the plan or profile is of another model"),
    ],
)
def test_commands_end_with_one_line(command, overrides, words):
    done = command("train", *SMALL, "iterations=1", *overrides, check=False)
    assert (done.returncode, done.stderr.count("\n"), done.stdout.count("Traceback")) == (2, 1, 0), done.stderr
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


@pytest.mark.parametrize("after_s", [0.3, 1.0])
def test_ctrl_c_while_libraries_load_is_quiet(tmp_path, after_s):
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.simulate"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 130


class StopAfter:
    """Asks to stop at the report after a number of iterations."""

    def __init__(self, count):
        self.count = count

    def listen(self):
        return self

    @property
    def asked(self):
        self.count -= 1
        return self.count == 0


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs a configuration in this process, and stops it after some iterations."""

    def run(runs, stop_after=0):
        monkeypatch.setattr("experiments.training.StopRequest", lambda: StopAfter(stop_after))
        keys = ("iterations=7", "progress=1", "checkpoint.every=2", "evaluation.every=3", "timeline.start=1")
        config = TrainConfig.from_dict(compose(*SMALL, *keys, "device=cpu", f"runs={tmp_path / runs}"))
        record = begin(config)
        me = Rank(rank=0, world_size=1, local_rank=0, init_method="")
        end(record, train(config, me, lambda _: RunRecord.load(config.record_path)))
        record.close()
        return RunRecord.load(config.record_path)

    return run


def rows(record):
    return [(row["kind"], row["iter"], row["loss"]) for row in record.rows()]


@pytest.mark.parametrize(
    ("keep_rows", "from_iteration"), [(None, 5), (5, 4), (4, 0), (0, 0), ("deleted", 0), ("damaged", 0)]
)
def test_a_run_with_lost_rows_goes_on_before_the_hole(start, caplog, keep_rows, from_iteration):
    """Rows: train 0 to 2, eval 2, train 3 and 4; checkpoints before 4 and 5."""
    caplog.set_level(logging.INFO, "experiments")
    reference = start("reference")
    record = start("lost", stop_after=5)
    assert record.status == "interrupted"
    metrics = record.path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    if keep_rows == "deleted":
        metrics.unlink()
    else:
        lines[1] = b"\xff\n" if keep_rows == "damaged" else lines[1]
        metrics.write_bytes(b"".join(lines[: keep_rows if isinstance(keep_rows, int) else None]))
    (record.path / "timelines" / "iter000001.rank0.json").write_text("")
    (record.path / "timelines" / "iterx.rank0.json").write_text("[]")
    caplog.clear()
    record = start("lost")
    assert record.status == "finished"
    assert rows(record) == rows(reference)
    assert record.read("summary.json")["iterations"] == 7
    ours, theirs = (torch.load(r.path / "model.pt", weights_only=True) for r in (record, reference))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (f"from the checkpoint before iteration {from_iteration}" in caplog.text) == (from_iteration > 0)
    assert ("are lost" in caplog.text) == (from_iteration < 5)


def test_a_checkpoint_of_other_code_is_one_line(start, monkeypatch):
    start("old", stop_after=3)
    monkeypatch.setattr("kfac.state.STATE_VERSION", 1)
    with pytest.raises(ConfigError, match=r"old/.*before iteration 3 does not fit.*version 2.*1 to 1.*rerun=true"):
        start("old")
    monkeypatch.setattr("kfac.state.STATE_VERSION", 2)
    assert start("old").status == "finished"


def test_a_record_that_cannot_be_written_does_not_hide_why_the_run_failed(tmp_path, monkeypatch, capsys, caplog):
    config = TrainConfig.from_dict(compose(*SMALL, "device=cpu", f"runs={tmp_path}"))

    def fail(*_, **__):
        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("experiments.records.os.fsync", full)
        raise LaunchError(RankFailure(1, "failed: OSError: the rank's own", "Traceback"))

    monkeypatch.setattr("experiments.train.launch", fail)
    with pytest.raises(RunFailedError):
        run_here(config)
    assert "rank 1 failed: OSError: the rank's own" in capsys.readouterr().err
    assert [r.message for r in caplog.records if "could not be noted: [Errno 28]" in r.message]
    assert not list(tmp_path.rglob("*.tmp"))
