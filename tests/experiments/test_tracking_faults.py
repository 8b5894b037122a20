"""A sink that raises, hangs or does not start is switched off with one warning; the run goes on and ends in time."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.tracking import open_tracker
from experiments.tracking.guard import Guard
from experiments.tracking.tracker import Tracker
from tests.experiments.tracked import Recording, open_record, patient, train_row, write_run

ROOT = Path(__file__).parents[2]


class Failing:
    def __init__(self):
        self.calls = 0

    def log(self, rows):
        self.calls += 1
        raise ConnectionResetError("the service is gone")

    summary = timeline = finish = table = files = alert = log


class Hanging:
    def __init__(self):
        self.released = threading.Event()

    def log(self, rows):
        self.released.wait(60)

    summary = finish = timeline = table = files = alert = log


def test_a_sink_that_raises_is_switched_off_with_one_warning_and_the_others_go_on(caplog):
    failing, other = Failing(), Recording()
    with caplog.at_level(logging.WARNING):
        tracker = Tracker({"bad": lambda: failing, "good": lambda: other}, patient())
        for i in range(3):
            tracker.log(train_row(i))
            tracker.flush()
        tracker.summary({})
        tracker.finish("finished")
    assert failing.calls == 1
    assert [name for name, *_ in other.calls] == ["log", "log", "log", "summary", "finish"]
    assert tracker.working == ("good",)
    assert len(caplog.records) == 1
    assert "bad failed (ConnectionResetError: the service is gone); it is switched off" in caplog.text


def test_a_sink_that_hangs_costs_its_time_limit_once(caplog):
    sink = Hanging()
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracker = Tracker({"slow": lambda: sink}, patient(call_timeout_s=0.3))
        for i in range(5):
            tracker.log(train_row(i))
            tracker.flush()
        tracker.finish("finished")
    assert 0.3 <= time.monotonic() - start < 5
    assert [record.getMessage() for record in caplog.records] == [
        "tracking: slow did not take rows within 0.3 s; it is switched off, the run record is complete"
    ]
    sink.released.set()


@pytest.mark.parametrize("opening", [lambda: 1 / 0, lambda: time.sleep(60)])
def test_a_sink_that_does_not_start_is_left_out(opening, caplog):
    start = time.monotonic()
    guard = Guard("x", opening)
    guard.wait(0.3, "start")
    assert time.monotonic() - start < 5
    assert not guard.works
    guard.post(lambda sink: None)
    guard.wait(0.3)
    assert len(caplog.records) == 1


def test_a_run_that_fails_ends_soon_although_a_sink_hangs(monkeypatch):
    monkeypatch.setattr("experiments.tracking.tracker.LAST_WORDS_S", 0.3)
    sink = Hanging()
    tracker = Tracker({"slow": lambda: sink}, patient(finish_timeout_s=600.0, call_timeout_s=600.0))
    start = time.monotonic()
    tracker.failed(RuntimeError("out of memory"))
    tracker.finish("failed")
    assert time.monotonic() - start < 5
    sink.released.set()


def test_a_process_ends_although_a_sink_hangs():
    code = (
        "import time\nfrom experiments.tracking.tracker import Tracker\n"
        "from experiments.tracking.settings import TrackingSettings\n"
        "class S:\n    def __getattr__(self, name): return lambda *a: time.sleep(600)\n"
        "t = Tracker({'s': S}, TrackingSettings(call_timeout_s=0.2, finish_timeout_s=0.2))\n"
        "t.log({'kind': 'train', 'iter': 0}); t.flush(); t.finish('finished')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("sink", "module"),
    [({"wandb": "offline"}, "wandb"), ({"tensorboard": True}, "tensorboardX"), ({"trackio": True}, "trackio")],
)
def test_a_sink_that_is_not_installed_is_one_warning_with_the_remedy(tmp_path, sink, module, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("TRACKIO_DIR", "")
    record = open_record(tmp_path)
    with caplog.at_level(logging.WARNING):
        tracker = open_tracker(patient(**sink), record)
        tracker.log(train_row(0))
        tracker.finish("finished")
    assert tracker.working == ()
    assert len(caplog.records) == 1
    assert f"needs {module} (pip install 'spdkfac[" in caplog.text


def test_everything_but_wandb_works_without_wandb(tmp_path):
    write_run(tmp_path)
    code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("wandb", "wandb_workspaces", "plotly", "tensorboardX", "trackio"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import experiments.train, experiments.training, experiments.simulate, slurm, paper_figures
from analysis.__main__ import main
assert main([sys.argv[1]]) == 0
assert main(["report", sys.argv[1]]) == 0
assert main(["sync", sys.argv[1]]) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sync needs wandb: pip install 'spdkfac[wandb]'" in done.stderr
