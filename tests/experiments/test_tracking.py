"""Sinks get a copy of the record, chosen by name, several at once, in batches that cost a step next to nothing."""

import os
import statistics
import threading
import time

import pytest

from experiments.config import TrainConfig
from experiments.records import RunRecord
from experiments.tracking import open_tracker, tracking_id
from experiments.tracking.facts import KILLED, RunFacts
from experiments.tracking.interface import WHEN
from experiments.tracking.tracker import Tracker
from tests.experiments.test_config import compose
from tests.experiments.tracked import Recording, open_record, patient, train_row


def chosen(*overrides):
    return TrainConfig.from_dict(compose(*overrides)).tracking


@pytest.mark.parametrize(
    ("choice", "wandb", "tensorboard", "trackio"),
    [
        ("none", "off", False, False),
        ("offline", "offline", False, False),
        ("wandb", "online", False, False),
        ("[offline,tensorboard]", "offline", True, False),
        ("[wandb,tensorboard,trackio]", "online", True, True),
    ],
)
def test_sinks_are_chosen_by_name(choice, wandb, tensorboard, trackio):
    found = chosen(f"tracking={choice}", "tracking.project=other")
    assert (found.wandb, found.tensorboard, found.trackio, found.project) == (wandb, tensorboard, trackio, "other")


def test_nothing_reaches_a_sink_between_flushes():
    sink = Recording()
    tracker = Tracker({"x": lambda: sink}, patient())
    tracker.log(train_row(0))
    tracker.log(train_row(1))
    time.sleep(0.05)
    assert sink.calls == []  # a timed iteration may be running
    tracker.flush()
    ((name, (rows,), _),) = sink.calls
    assert name == "log"
    assert [{**row, WHEN: 0} for row in rows] == [{**train_row(i), WHEN: 0} for i in range(2)]
    assert rows[1][WHEN] <= time.time() - 0.05  # of the step, not of the handing over
    assert sink.calls[0][2] != threading.current_thread().name
    tracker.finish("finished")
    assert [name for name, *_ in sink.calls] == ["log", "finish"]


def test_rows_are_handed_over_in_order_when_the_first_has_waited_or_there_are_many(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("experiments.tracking.tracker.time.monotonic", lambda: now_s[0])
    sink = Recording()
    tracker = Tracker({"x": lambda: sink}, patient())
    for i in range(25):  # a step a second, offered each second
        now_s[0] += 1
        tracker.log(train_row(i))
        tracker.offer()
    batches = [[row["iter"] for row in rows] for name, (rows,), _ in sink.calls if name == "log"]
    assert batches == [list(range(11)), list(range(11, 22))]  # each when its first row is 10 s old
    for i in range(25, 2000):  # all at one moment
        tracker.log(train_row(i))
        tracker.offer()
    batches = [[row["iter"] for row in rows] for name, (rows,), _ in sink.calls if name == "log"]
    assert batches[2:] == [list(range(22, 1022))]
    tracker.finish("finished")
    held = [row["iter"] for name, arguments, _ in sink.calls if name == "log" for row in arguments[0]]
    assert held == list(range(2000))


def test_a_step_costs_little(tmp_path, wandb_client):
    tracker = open_tracker(patient(wandb="offline", tensorboard=True), open_record(tmp_path))
    costs_s = []
    for i in range(2000):
        start_s = time.perf_counter()
        tracker.log(train_row(i))
        if i % 10 == 9:
            tracker.offer()
        costs_s.append(time.perf_counter() - start_s)
    tracker.finish("finished")
    assert statistics.median(costs_s) < 2e-4


def test_ids_last_through_restarts_and_change_when_a_run_starts_over(tmp_path):
    record = open_record(tmp_path)
    first = tracking_id(record)
    assert tracking_id(RunRecord.load(record.path)) == first
    record.begin_segment()
    assert tracking_id(record) == first
    record.head["created"] = "2030-01-01T00:00:00+00:00"
    assert tracking_id(record) != first


def test_facts_tell_a_killed_start_from_one_that_ended(tmp_path):
    record = open_record(tmp_path)
    record.end_segment("interrupted")
    record.begin_segment()  # is killed
    record.begin_segment()
    facts = RunFacts.of(record)
    assert [segment["end_reason"] for segment in facts.segments] == ["interrupted", KILLED, None]
    assert (facts.restarts, facts.group, facts.job_type) == (2, "s", "spdkfac")
    assert facts.config["kfac"] == {"damping": 0.03}


def test_only_rank_0_has_sinks_unless_all_are_asked_for(tmp_path):
    record = open_record(tmp_path)
    tracker = open_tracker(patient(tensorboard=True, wandb="offline"), record, rank=1)
    assert tracker.working == ()
    tracker.log(train_row(0))
    tracker.finish("finished")
    assert not (record.path / "tensorboard").exists()


def test_none_writes_nothing(tmp_path):
    record = open_record(tmp_path)
    before = set(os.listdir(record.path))
    tracker = open_tracker(chosen("tracking=none"), record)
    tracker.log(train_row(0))
    tracker.finish("finished")
    assert set(os.listdir(record.path)) == before
