"""Records survive crashes, restarts and readers at any moment, and hold no secret."""

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from experiments.locks import RecordInUseError
from experiments.provenance import code_identity, environment_facts
from experiments.records import RunRecord, find_records, write_text
from experiments.rows import read_rows
from experiments.summary import merged_timelines, render_timelines, summarise
from kfac.timeline import Span, Timeline

FACTS = {"schedule": "spdkfac", "model": "mlp", "data": "digits", "world_size": 2, "seed": 0}


def new_record(path, run_id="mlp-x", **options):
    return RunRecord.open(path, run_id=run_id, name="x", facts=FACTS, config={"batch_size": 32}, **options)


def test_life_of_a_record(tmp_path):
    record = new_record(tmp_path / "r")
    assert record.begin_segment(why="first")
    record.log({"kind": "train", "iter": 0, "loss": 2.0})
    record.log({"kind": "train", "iter": 1, "loss": 1.0})
    record.end_segment("interrupted")
    record.close()

    record = new_record(tmp_path / "r")
    record.begin_segment()
    assert (record.status, record.restarts) == ("running", 1)
    record.log({"kind": "train", "iter": 1, "loss": 0.5})  # repeated after a resume: the last one counts
    record.log({"kind": "eval", "iter": 1, "loss": 0.4})
    record.end_segment("finished")
    record.close()

    read = RunRecord.load(tmp_path / "r")
    assert [(row["kind"], row["loss"]) for row in read.rows()] == [("train", 2.0), ("train", 0.5), ("eval", 0.4)]
    assert [segment["end_reason"] for segment in read.head["segments"]] == ["interrupted", "finished"]
    assert read.head["finished"]
    assert read.head["error"] is None
    assert read.head["schema"] == 1
    assert {**FACTS, "status": "finished"}.items() <= read.head.items()
    assert read.read("config.json") == {"batch_size": 32}
    assert [r.path for r in find_records(tmp_path)] == [tmp_path / "r"]


def test_rows_survive_a_kill_and_a_torn_row_is_cut(tmp_path):
    script = """
        import os, sys, signal
        from pathlib import Path
        from experiments.records import RunRecord
        record = RunRecord.open(Path(sys.argv[1]), run_id="a", name="a", facts={}, config={})
        record.begin_segment()
        for i in range(50):
            record.log({"kind": "train", "iter": i})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "r"
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(path)], check=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "it')
    assert len(list(read_rows(path / "metrics.jsonl"))) == 50
    record = RunRecord.open(path, run_id="a", name="a", facts={}, config={})  # the dead process holds no lock
    assert record.status == "running"
    record.log({"kind": "train", "iter": 50})
    assert [row["iter"] for row in record.rows()] == list(range(51))


def test_damage_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "iter": 0}\n{"kind"\n{"kind": "train", "iter": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2, is damaged"):
        list(read_rows(tmp_path / "metrics.jsonl"))


DAMAGED_ROWS = (b'{"kind": "tr', b"[1]", b'{"iter": 1}', b'{"kind": "train", "iter": "2"}', b"\xff\xfe")


def test_damaged_rows_are_left_out_named_and_removed_when_the_run_goes_on(tmp_path, caplog):
    new_record(tmp_path).close()
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"kind": "train", "iter": i, "loss": 1.0, "iteration_s": 0.1}).encode() for i in range(2)]
    path.write_bytes(b"\n".join([whole[0], *DAMAGED_ROWS, whole[1], b'{"torn']))
    with caplog.at_level(logging.WARNING):
        assert [row["iter"] for row in RunRecord.load(tmp_path).whole_rows()] == [0, 1]
    assert len(caplog.records) == 1
    assert "line 2, 3, 4, 5, 6" in caplog.text
    record = new_record(tmp_path)
    record.log({"kind": "train", "iter": 2})
    assert [row["iter"] for row in record.rows()] == [0, 1, 2]
    assert summarise(record, 0, {})["iterations"] == 3


def test_damaged_timelines_are_left_out_and_named(tmp_path, caplog):
    record = new_record(tmp_path)
    for iteration in (5, 15, 25):
        path = record.timeline_path(iteration, 0)
        path.parent.mkdir(exist_ok=True)
        Timeline((Span(0, "compute", "FF", "forward", 0, 1e-3),), total_s=2e-3).to_chrome_trace(path)
    record.timeline_path(25, 0).write_text("")
    record.timeline_path(35, 0).write_bytes(b"\xff{}")
    (tmp_path / "timelines" / "iterfoo.rank0.json").write_text("{}")
    (tmp_path / "timelines" / "notes.txt").write_text("")
    with caplog.at_level(logging.WARNING):
        found = merged_timelines(record)
    assert list(found) == [5, 15]
    assert len(caplog.records) == 1
    assert "iteration 25 " in caplog.text
    assert "iteration 35 " in caplog.text
    assert summarise(record, 0, found)["breakdown_s"]["FF"] == pytest.approx(1e-3)
    assert render_timelines(record, found) == found[15]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "segments": [1]}', "\xff"])
def test_a_damaged_head_is_named(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=str(tmp_path)):
        new_record(tmp_path)
    (tmp_path / "run.json").unlink()
    new_record(tmp_path).close()  # the lock is free again


def test_foreign_files_in_a_record(tmp_path):
    record = new_record(tmp_path)
    record.begin_segment()
    record.close()
    (tmp_path / "code.diff").write_bytes(b"\xff\xfe")
    record = new_record(tmp_path)
    assert not record.begin_segment()  # the code was another one, as far as one can tell
    record.close()
    (tmp_path / "logs").write_text("")
    with pytest.raises(ValueError, match="logs is no folder"):
        new_record(tmp_path)


def test_a_full_disk_leaves_no_temporary_file(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("experiments.records.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(tmp_path / "a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_two_writers_and_foreign_records_are_refused(tmp_path):
    record = new_record(tmp_path / "r")
    with pytest.raises(RecordInUseError, match=f"process {os.getpid()}"):
        new_record(tmp_path / "r")
    record.close()
    with pytest.raises(ValueError, match="holds the record of mlp-x, not of other"):
        new_record(tmp_path / "r", run_id="other")


def test_rerun_starts_over(tmp_path):
    record = new_record(tmp_path / "r")
    record.begin_segment()
    record.log({"kind": "train", "iter": 0})
    record.write("plan.json", {})
    record.close()
    record = new_record(tmp_path / "r", rerun=True)
    assert record.rows() == []
    assert record.read("plan.json") is None
    assert record.restarts == 0


def test_timelines_are_found_in_order(tmp_path):
    record = new_record(tmp_path / "r")
    for iteration, rank in [(20, 1), (5, 10), (5, 2), (20, 0)]:
        path = record.timeline_path(iteration, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    found = record.timeline_paths()
    assert list(found) == [5, 20]
    assert [path.name for path in found[5]] == ["iter000005.rank2.json", "iter000005.rank10.json"]


def test_no_secret_is_recorded():
    secret = "s3cr3t"
    environ = {
        f"{name}": secret for name in ("WANDB_API_KEY", "gh_token", "My_Secret", "DB_PASSWORD", "AWS_SECRET_ACCESS")
    }
    environ |= {"TORCH_MIRROR": f"http://user:{secret}@proxy:80", "SLURM_JWT_TOKEN": secret, "OMP_NUM_THREADS": "1"}
    facts = environment_facts(environ)
    assert secret not in json.dumps(facts)
    assert facts["variables"] == {
        "OMP_NUM_THREADS": "1",
        "SLURM_JWT_TOKEN": "***",
        "TORCH_MIRROR": "http://***@proxy:80",
    }
    assert facts["packages"]["torch"]


def test_only_variables_that_matter_are_recorded():
    matter = {
        *("MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "SLURM_JOB_ID"),
        *(
            "TORCHINDUCTOR_CACHE_DIR",
            "PYTORCH_CUDA_ALLOC_CONF",
            "GLOO_SOCKET_IFNAME",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "RANK",
        ),
    }
    others = {"HOME", "USER", "PATH", "SSH_CONNECTION", "LS_COLORS", "MAIL", "AWS_PROFILE", "FRANK", "http_proxy"}
    assert set(environment_facts(dict.fromkeys(matter | others, "1"))["variables"]) == matter


def test_code_identity_of_a_checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    clean, patch = code_identity(package)
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    assert patch == ""
    (package / "code.py").write_text("x = 2\n")
    (package / "new.py").write_text("y = 3\n")
    dirty, patch = code_identity(package)
    assert dirty["commit"] == clean["commit"]
    assert dirty["dirty"]
    assert "+x = 2" in patch
    assert "+y = 3" in patch


def test_code_identity_outside_a_checkout(tmp_path):
    identity, patch = code_identity(tmp_path)
    assert set(identity) == {"version"}
    assert patch == ""


def test_changed_code_is_noticed(tmp_path, monkeypatch):
    patches = iter(["a", "a", "b", ""])
    monkeypatch.setattr("experiments.records.code_identity", lambda: ({"commit": "c", "dirty": True}, next(patches)))
    record = new_record(tmp_path / "r")
    assert [record.begin_segment() for _ in range(4)] == [True, True, False, False]


def test_records_load_without_torch():
    code = "import sys, experiments.records; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
