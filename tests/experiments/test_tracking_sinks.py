"""What each sink holds in the end is what the record holds: W&B's offline files, TensorBoard's, trackio's data base."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.wandb_file import read_offline_run
from experiments.tracking import open_tracker, tracking_id
from experiments.tracking.interface import time_shares
from kfac.timeline import Span, Timeline, chrome_trace
from tests.experiments.tracked import eval_row, open_record, patient, train_row, write_plan, write_timelines

ROOT = Path(__file__).parents[2]


def test_an_offline_run_of_wandb_holds_what_the_record_holds(tmp_path, wandb_client):
    record = open_record(tmp_path)
    write_timelines(record)
    write_plan(record)
    tracker = open_tracker(patient(wandb="offline", project="p", tags=("table3",)), record)
    rows = [train_row(0), train_row(1), train_row(2), train_row(1, loss=0.25), eval_row(2)]
    for row in rows:
        record.log(row)
        tracker.log(row)
    tracker.summary({"iteration_s": {"median": 0.25}, "iterations": 3})
    tracker.timelines(record)
    tracker.alert("failed", "out of memory")
    tracker.finish("finished")

    (folder,) = (record.path / "wandb").glob("offline-run-*")
    found = read_offline_run(folder)
    assert found.id == tracking_id(record)
    assert (found.project, found.group, found.job_type, found.tags) == ("p", "s", "spdkfac", ["table3"])
    assert found.config["kfac"] == {"damping": 0.03}
    assert found.history[0]["_timestamp"] == pytest.approx(time.time(), abs=60)
    # No explicit steps: a repeated iteration is another row, over the column "iter".
    train = [(r["iter"], r["train/loss"]) for r in found.history if "train/loss" in r]
    assert train == [(r["iter"], r["loss"]) for r in rows if r["kind"] == "train"]
    assert [(r["iter"], r["eval/accuracy"]) for r in found.history if "eval/accuracy" in r] == [(2, 0.75)]
    assert (found.summary["iteration_s/median"], found.summary["end_reason"]) == (0.25, "finished")
    assert found.alerts == ["failed"]
    # Both recorded iterations: numbers, Plotly panel, page, and a trace with the simulation beside what was measured.
    shares = {r["iter"]: r for r in found.history if "recorded_iteration_s" in r}
    assert sorted(shares) == [1, 3]
    assert shares[3]["exposed_s/FF"] == pytest.approx(1e-3)
    assert shares[3]["hidden_s/FactorComm"] == pytest.approx(0.5e-3)
    kinds = {r["timeline._type"]: r["timeline_page._type"] for r in shares.values()}
    assert kinds == {"plotly-file": "html-file"}
    panel = json.loads((folder / "files" / shares[3]["timeline.path"]).read_text())
    assert {bar["name"] for bar in panel["data"] if "name" in bar} >= {"FF", "FactorComm", "InverseComp"}
    bars = json.loads((folder / "files" / shares[3]["breakdown_bars.path"]).read_text())
    forward = next(bar for bar in bars["data"] if bar["name"] == "FF")
    assert forward["y"] == ["measured", "simulated"]
    assert forward["x"][0] == pytest.approx(1.0)  # milliseconds
    page = (folder / "files" / shares[3]["timeline_page.path"]).read_text()
    assert '"name":"simulated"' in page
    traces = [name for name in found.artifacts if name.startswith("trace-")]
    assert traces == [f"trace-{found.id}-iter00000{i}" for i in (1, 3)]
    trace = json.loads((record.path / "wandb" / "traces" / "iter000003.pt.trace.json").read_text())
    processes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {"rank 0, measured", "rank 1, measured", "rank 0, simulated"} <= processes
    assert {p.name for p in (folder / "files" / "record").glob("*")} >= {"run.json", "config.json", "plan.json"}


def test_tensorboard_holds_the_scalars_over_iterations(tmp_path):
    event = pytest.importorskip("tensorboardX.proto.event_pb2")
    record = open_record(tmp_path)
    write_timelines(record)
    tracker = open_tracker(patient(tensorboard=True), record)
    for i in range(4):
        tracker.log(train_row(i))
    tracker.log(eval_row(3))
    tracker.summary({"iterations": 4})
    tracker.timelines(record)
    tracker.finish("finished")
    assert tracker.working == ("TensorBoard",)

    scalars, tags = {}, set()
    for file in (record.path / "tensorboard").iterdir():
        data, at = file.read_bytes(), 0
        while at < len(data):  # TFRecord: length, its checksum, the message, its checksum
            length = int.from_bytes(data[at : at + 8], "little")
            message = event.Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in message.summary.value:
                tags.add(value.tag)
                if value.WhichOneof("value") == "simple_value":
                    scalars[value.tag, message.step] = value.simple_value
    assert [scalars["train/loss", i] for i in range(4)] == pytest.approx([1 / (i + 1) for i in range(4)])
    assert scalars["eval/accuracy", 3] == 0.75
    assert scalars["exposed_s/FF", 1] == pytest.approx(1e-3)
    assert {"timeline/measured", "config/text_summary", "breakdown/text_summary"} <= tags


def test_trackio_holds_the_scalars_over_iterations(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
        from pathlib import Path
        from experiments.tracking import TrackingSettings, open_tracker
        from tests.experiments.tracked import open_record, train_row, write_timelines
        record = open_record(Path({str(tmp_path)!r}))
        write_timelines(record)
        tracker = open_tracker(TrackingSettings(trackio=True, project="p"), record)
        for i in range(4):
            tracker.log(train_row(i))
        tracker.timelines(record)
        tracker.alert("failed", "out of memory")
        tracker.finish("finished")
        assert tracker.working == ("trackio",)
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=True)  # trackio reads its folder when it is imported
    import sqlite3

    (base,) = (tmp_path / "s" / "trackio").glob("*.db")
    with sqlite3.connect(base) as connection:
        stored = connection.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    rows = [(step, json.loads(text)) for step, text in stored]
    losses = {step: row["train/loss"] for step, row in rows if "train/loss" in row}
    assert losses == pytest.approx({i: 1 / (i + 1) for i in range(4)})
    assert {step for step, row in rows if "exposed_s/FF" in row} == {1, 3}


def test_offline_every_rank_may_have_a_run_of_its_own(tmp_path, wandb_client):
    record = open_record(tmp_path)
    tracker = open_tracker(patient(wandb="offline", all_ranks=True), record, rank=1)
    tracker.log({"kind": "rank1", "iter": 0, "iteration_s": 0.5})
    tracker.finish("finished")
    (folder,) = (record.path / "wandb").glob("offline-run-*")
    found = read_offline_run(folder)
    assert found.id == f"{tracking_id(record)}-r1"
    assert [row["rank1/iteration_s"] for row in found.history] == [0.5]


def test_shares_of_time_are_paths():
    spans = (Span(0, "compute", "FF", "f", 0, 1), Span(0, "communication", "GradComm", "m", 0, 3))
    shares = time_shares(Timeline(spans, total_s=4))
    assert (shares["exposed_s/FF"], shares["exposed_s/GradComm"], shares["hidden_s/GradComm"]) == (1, 2, 1)
    assert (shares["exposed_s/Other"], shares["recorded_iteration_s"]) == (1, 4)


def test_traces_of_two_timelines_share_no_process_and_no_thread():
    spans = (Span(0, "compute", "FF", "f", 0, 1), Span(1, "communication", "GradComm", "m", 0, 3))
    events = chrome_trace({"measured": Timeline(spans), "simulated": Timeline(spans)})["traceEvents"]
    named = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert sorted(named) == [
        (1, 1, "rank 0, measured"),
        (2, 2, "rank 1, measured"),
        (3, 3, "rank 0, simulated"),
        (4, 4, "rank 1, simulated"),
    ]
    assert len({(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}) == 4
