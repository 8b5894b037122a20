"""Runs that only W&B knows become records: ours as they were, others' by names that are guessed or given."""

import dataclasses
import json
import struct
import subprocess
import sys
import zlib

import pytest

from analysis.__main__ import main
from analysis.importing import ForeignRun, from_api, from_offline, import_run, rows_of
from analysis.runs import load_run, load_runs, load_timelines
from analysis.wandb_file import HEADER, read_offline_run
from experiments.tracking import TrackingSettings, open_tracker, tracking_id
from tests.experiments.tracked import open_record, train_row, write_run


def tracked(tmp_path, mode, iterations=5):
    record = write_run(tmp_path, iterations)
    tracker = open_tracker(TrackingSettings(wandb=mode, project="p"), record)
    for row in record.rows():
        tracker.log(row)
    tracker.summary(record.read("summary.json"))
    tracker.timelines(record)
    tracker.finish("finished")
    return record


def check_equal(record, path):
    """An imported record is the one that was tracked."""
    ours, theirs = load_run(record.path), load_run(path)
    for name in ("schedule", "model", "data", "world_size", "seed", "status", "iterations", "iteration_s"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert theirs.config["kfac"] == {"damping": 0.03}
    assert theirs.samples_s() == ours.samples_s()
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert rows == record.rows()
    of_ours, of_theirs = load_timelines(record.path), load_timelines(path)
    assert of_ours.keys() == of_theirs.keys()
    assert of_theirs[3].breakdown_s() == pytest.approx(of_ours[3].breakdown_s())
    assert json.loads((path / "run.json").read_text())["imported"]["from"]


def test_an_offline_run_becomes_the_record_it_was(tmp_path, wandb_client):
    record = tracked(tmp_path / "runs", "offline")
    (run,) = from_offline([record.path / "wandb"])
    check_equal(record, import_run(run, tmp_path / "imported"))
    with pytest.raises(ValueError, match="holds a record already"):
        import_run(run, tmp_path / "imported")


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_a_record_that_was_saved_before_the_end_ends_as_the_run_did(tmp_path, wandb_client, status):
    """Trackers get run.json while it still says running."""
    record = tracked(tmp_path / "runs", "offline")
    (run,) = from_offline([record.path / "wandb"])
    early = {**json.loads(run.files["run.json"]), "status": "running"}
    files = {**run.files, "run.json": json.dumps(early).encode()}
    path = import_run(dataclasses.replace(run, files=files, status=status), tmp_path / status)
    assert load_run(path).status == status


def test_a_run_on_the_server_becomes_the_record_it_was(tmp_path, server, capsys):
    record = tracked(tmp_path / "runs", "online")
    assert main(["import", "team/p", "--into", str(tmp_path / "imported")]) == 0
    check_equal(record, tmp_path / "imported" / tracking_id(record))
    (run,) = from_api(f"team/p/{tracking_id(record)}")
    assert (run.job_type, run.group) == ("spdkfac", "s")


def test_the_restarts_of_an_offline_run_are_one_run(tmp_path, wandb_client):
    record = open_record(tmp_path)
    for rows in (range(3), range(2, 5)):
        tracker = open_tracker(TrackingSettings(wandb="offline"), record)
        for i in rows:
            tracker.log(train_row(i, loss=100 + i if rows.start else i))
        tracker.finish("finished" if rows.start else "interrupted")
        record.end_segment("interrupted")
        record.begin_segment()
    (run,) = from_offline([record.path])
    path = import_run(run, tmp_path / "imported")
    assert [row["loss"] for row in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())] == [
        *(0, 1, 2),
        *(102, 103, 104),
    ]
    assert load_run(path).iterations == 5


SOMEBODY = """
import sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], project="theirs", config={"arch": "resnet18", "dataset": "cifar",
    "optimizer": "adam", "n_gpus": 4, "seed": 7, "bs": 64})
for i in range(10):
    run.log({"loss/total": 3.0 - i / 10, "acc": i / 10, "step_time": 0.1 + i / 1000})
    if i % 5 == 4:
        run.log({"val_loss": 2.0 - i / 10, "val_acc": 0.5})
run.finish()
"""


def test_a_run_of_somebody_else_appears_in_our_tables(tmp_path, wandb_client, capsys):
    subprocess.run([sys.executable, "-c", SOMEBODY, str(tmp_path)], check=True)
    into = tmp_path / "imported"
    command = ["import", str(tmp_path / "wandb"), "--into", str(into), "--column", "train.loss=loss/total"]
    assert main(command) == 0
    (run,), problems = load_runs([into])
    assert problems == []
    assert (run.schedule, run.model, run.data, run.world_size, run.seed) == ("adam", "resnet18", "cifar", 4, 7)
    assert (run.iterations, run.status, run.accuracy) == (10, "finished", 0.5)
    assert run.loss == pytest.approx(1.1)
    assert run.iteration_s.median == pytest.approx(0.1045)
    assert main([str(into)]) == 0
    assert "adam" in capsys.readouterr().out


def test_seconds_that_nobody_logged_are_those_between_the_rows():
    history = [{"_step": 10 * i, "_timestamp": 100.0 + 5 * i, "loss": 1.0} for i in range(4)]
    rows = rows_of(history, {})
    assert [row["iteration_s"] for row in rows] == [0.5, 0.5, 0.5, 0.5]
    logged = rows_of([{"_step": 0, "_timestamp": 1.0, "loss": 1.0, "iter_time": 0.25}], {})
    assert [row["iteration_s"] for row in logged] == [0.25]


def test_mistakes_name_the_column_and_the_choices(tmp_path):
    history = [{"_step": 0, "loss": 1.0}]
    with pytest.raises(ValueError, match="the run has no such column; it has: _step, loss"):
        rows_of(history, {"train.loss": "total"})
    with pytest.raises(ValueError, match=r"unknown column loss; columns: iter, train\.loss"):
        rows_of(history, {"loss": "loss"})
    run = ForeignRun("x", "id", "n", "", "", {"world_size": "many"}, history, {}, "finished", "")
    with pytest.raises(ValueError, match="world_size='many' is no whole number"):
        import_run(run, tmp_path)
    with pytest.raises(ValueError, match="unknown fact ranks"):
        import_run(run, tmp_path, facts={"ranks": "2"})
    assert main(["import", str(tmp_path), "--column", "x"]) == 2


@pytest.mark.parametrize("name", ["../up", "/tmp/abs", "a/b", "..", ".", ""])
def test_an_id_that_leads_elsewhere_is_no_folder(tmp_path, name):
    run = ForeignRun("x", name, "n", "", "", {}, [], {}, "finished", "")
    with pytest.raises(ValueError, match="is no name of a folder"):
        import_run(run, tmp_path / "in")
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_run_stay_in_its_record(tmp_path):
    outside = tmp_path / "outside.txt"
    files = {"../../outside.txt": b"1", str(outside): b"2", "..": b"3", "fine/x.txt": b"4"}
    path = import_run(ForeignRun("x", "id", "n", "", "", {}, [], {}, "failed", "", files), tmp_path / "in")
    assert not outside.exists()
    assert [p.name for p in tmp_path.rglob("*.txt")] == ["x.txt"]
    assert (path / "fine" / "x.txt").read_bytes() == b"4"


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"{", b"\xff", b"[" * 100_000], ids=["list", "number", "cut", "no-text", "deep"]
)
@pytest.mark.parametrize("file", ["run.json", "config.json"])
def test_a_record_saved_in_pieces_is_imported_as_anybody_elses_run(tmp_path, file, content):
    files = {"run.json": b'{"status": "finished", "schedule": "theirs"}', "config.json": b"{}"} | {file: content}
    history = [{"_step": 0, "loss": 1.0, "iter_time": 0.5}]
    run = ForeignRun("x", "id", "n", "", "", {"schedule": "ours", "model": "m"}, history, {}, "finished", "", files)
    found = load_run(import_run(run, tmp_path))
    assert (found.schedule, found.model, found.iterations) == ("ours", "m", 1)


def test_steps_that_are_no_numbers_are_left_out():
    history = [{"_step": step, "loss": 1.0, "iter_time": 0.1} for step in (float("nan"), float("inf"), "x", None, 2)]
    assert [row["iter"] for row in rows_of(history, {})] == [2]


# ---------------------------------------------------------------- the format of the files


def message(number, content):
    """A length-delimited field of Protocol Buffers."""
    tag = number << 3 | 2
    head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    return head + bytes([len(content)]) + content


def piece(kind, content):
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + content), len(content), kind) + content


def file(tmp_path, *pieces):
    path = tmp_path / "run-x.wandb"
    path.write_bytes(HEADER + b"\0" + b"".join(pieces))
    return path


RUN = message(17, message(1, b"x"))


def test_typed_values_are_read_as_well_as_json(tmp_path):
    items = [
        message(1, message(1, b"number") + bytes([6 << 3 | 1]) + struct.pack("<d", 0.5)),
        message(1, message(1, b"integer") + bytes([5 << 3, 5])),
        message(1, message(1, b"yes") + bytes([4 << 3, 1])),
        message(1, message(1, b"text") + message(7, b"t")),
        message(1, message(1, b"json") + message(8, b"[1]")),
        message(1, message(2, b"nested") + message(2, b"key") + message(16, b"2.5")),
    ]
    run = read_offline_run(file(tmp_path, piece(1, RUN), piece(1, message(2, b"".join(items)))))
    assert run.history == [
        {"number": 0.5, "integer": -3, "yes": True, "text": "t", "json": [1], "nested.key": 2.5},
    ]


def test_records_in_pieces_are_joined_and_damage_ends_the_file(tmp_path):
    row = message(2, message(1, message(1, b"loss") + message(16, b"1.0")))
    whole = [piece(1, RUN), piece(2, row[:5]), piece(3, row[5:9]), piece(4, row[9:])]
    run = read_offline_run(file(tmp_path, *whole, piece(1, row)))
    assert run.history == [{"loss": 1.0}, {"loss": 1.0}]
    assert run.whole
    torn = read_offline_run(file(tmp_path, *whole, piece(1, row)[:-1]))
    assert (torn.history, torn.whole) == ([{"loss": 1.0}], False)
    wrong = bytearray(piece(1, row))
    wrong[-1] ^= 1
    assert read_offline_run(file(tmp_path, *whole, bytes(wrong), piece(1, row))).history == [{"loss": 1.0}]


def test_long_files_cross_blocks(tmp_path, wandb_client):
    record = open_record(tmp_path)
    tracker = open_tracker(TrackingSettings(wandb="offline"), record)
    for i in range(500):
        tracker.log(train_row(i))
    tracker.finish("finished")
    (path,) = (record.path / "wandb").glob("offline-run-*/*.wandb")
    assert path.stat().st_size > 3 * 32 * 1024
    assert [row["train/loss"] for row in read_offline_run(path).history] == [1 / (i + 1) for i in range(500)]


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "no offline file"), (b"xxxxxxxxxx", "no offline file"), (HEADER + b"\0", "cut off")]
)
def test_files_that_are_none_are_named(tmp_path, content, words):
    path = tmp_path / "run-y.wandb"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_offline_run(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no run-\*\.wandb in"):
        read_offline_run(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"no offline files of W&B \(run-\*\.wandb\) below"):
        from_offline([tmp_path / "empty"])
