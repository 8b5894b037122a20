"""Two starts of one job, and a file system that is away."""

import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from experiments.checkpoints import Checkpoints
from experiments.locks import RecordInUseError, take_lock
from experiments.patience import patiently
from experiments.records import RunRecord
from kfac.communication import LocalCommunicator


def as_job(monkeypatch, restart, job="5"):
    for name, value in {"JOB_ID": "7", "ARRAY_JOB_ID": job, "ARRAY_TASK_ID": "2", "RESTART_COUNT": restart}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def open_record(path):
    return RunRecord.open(path, run_id="a", name="a", facts={}, config={})


def test_a_restarted_job_takes_the_record_from_its_first_copy(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("experiments.locks.TAKE_OVER_S", 0.5)
    as_job(monkeypatch, 0)
    first = open_record(tmp_path / "r")
    first.begin_segment()
    first.check_ours()
    as_job(monkeypatch, 0)
    with pytest.raises(RecordInUseError, match="job 5_2 restart 0"):
        open_record(tmp_path / "r")  # the same start
    as_job(monkeypatch, 1, job="6")
    with pytest.raises(RecordInUseError):
        open_record(tmp_path / "r")  # another job
    as_job(monkeypatch, 1)
    second = open_record(tmp_path / "r")
    assert "which SLURM took for dead" in caplog.text
    second.check_ours()
    with pytest.raises(RecordInUseError, match="continued by a later start"):
        first.check_ours()
    first.close()
    second.check_ours()


def test_a_copy_that_ends_by_itself_is_waited_for(tmp_path, monkeypatch, caplog):
    code = """
    import os, sys, time
    from pathlib import Path
    from experiments.locks import take_lock
    os.environ |= {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "0"}
    lock = take_lock(Path(sys.argv[1]))
    print("locked", flush=True)
    time.sleep(1)
    """
    first = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"locked\n"
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take_lock(tmp_path).close()
    assert "taken over" not in caplog.text
    assert first.wait() == 0


def test_rows_and_checkpoints_wait_for_the_file_system(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    record = open_record(tmp_path / "there" / "r")
    record.patience_s = 20
    checkpoints = Checkpoints(record.path / "checkpoint", LocalCommunicator(), patience_s=20)
    record.log({"kind": "train", "iter": 0})
    record.close()
    (tmp_path / "there").rename(tmp_path / "away")
    back = threading.Timer(1.0, lambda: (tmp_path / "away").rename(tmp_path / "there"))
    back.start()
    record.log({"kind": "train", "iter": 1})
    assert not back.is_alive()
    (tmp_path / "there").rename(tmp_path / "away")
    back = threading.Timer(1.0, lambda: (tmp_path / "away").rename(tmp_path / "there"))
    back.start()
    checkpoints.save(2, {}, {})
    assert [row["iter"] for row in record.rows()] == [0, 1]
    assert checkpoints.load("cpu")[0] == 2
    assert caplog.text.count("trying again") == 2
    assert "is possible again" in caplog.text


def test_a_row_that_was_cut_by_a_full_disk_is_written_once(tmp_path, monkeypatch):
    record = open_record(tmp_path / "r")
    record.patience_s = 5
    record.log({"kind": "train", "iter": 0})

    class Full:
        """Takes half a line, and then nothing."""

        def __init__(self, file):
            self.file = file

        def write(self, text):
            self.file.write(text[: len(text) // 2])

        def flush(self):
            self.file.flush()
            raise OSError(28, "No space left on device")

        def close(self):
            self.file.close()

    record._metrics = Full(record._metrics)
    record.log({"kind": "train", "iter": 1})
    record.log({"kind": "train", "iter": 2})
    assert [row["iter"] for row in record.rows()] == [0, 1, 2]  # strict: a damaged row would raise


def test_patience_ends(tmp_path):
    calls = []

    def fail():
        calls.append(1)
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        patiently(fail, "writing", 0.6)
    assert len(calls) in (2, 3)
    with pytest.raises(OSError, match="away"):
        patiently(fail, "writing", 0.0)
    assert os.path.isdir(tmp_path)
