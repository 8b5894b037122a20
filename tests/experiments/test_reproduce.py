"""What the main job leaves out when it is started again, and how it ends when it is interrupted."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from experiments import reproduce
from experiments.config import TrainConfig
from experiments.records import RunRecord
from tests.experiments.conftest import ROOT
from tests.experiments.test_config import compose


def test_a_finished_training_is_not_started_again(tmp_path, monkeypatch, capsys):
    overrides = ("model=mlp", "cluster=default", f"runs={tmp_path}")
    config = TrainConfig.from_dict(compose(*overrides))
    record = RunRecord.open(config.record_path, run_id=config.run_id, name="n", facts={}, config=config.to_dict())
    started = []

    class Process:
        def __init__(self, command):
            started.append(command)

        def wait(self):
            return 0

    monkeypatch.setattr(reproduce.subprocess, "Popen", Process)
    todo = [reproduce.Step("train", "experiments.train", overrides)]
    for status, runs in (("interrupted", 1), ("finished", 0)):
        record.end_segment(status)
        started.clear()
        assert reproduce.run(todo) == 0
        assert len(started) == runs
        assert (" done before  train\n" in capsys.readouterr().out) == (runs == 0)
    record.close()
    assert reproduce.finished_record((*overrides, "rerun=true")) is None
    assert reproduce.finished_record((*overrides, "seed=1")) is None
    assert reproduce.finished_record((*overrides, "optimizer.lr=-1")) is None


@pytest.mark.parametrize("signals", [1, 3])
def test_ctrl_c_ends_without_a_traceback(tmp_path, signals):
    """A step that is deaf to Ctrl-C is waited for the first time, and ended the second."""
    (tmp_path / "slow.py").write_text(
        "import signal, time, pathlib\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path('started').touch()\ntime.sleep({2 if signals == 1 else 60})\n"
    )
    code = """
        import sys
        from experiments.reproduce import Step, run
        sys.exit(run([Step("slow", "slow", ())]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "\nstopping ...\ninterrupted in step 1; the same command goes on from here\n"
