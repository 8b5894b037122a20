"""A record such as a short run leaves, for the tests of what gets a copy of it."""

import json
import threading

from experiments.records import RunRecord
from experiments.summary import render_timelines, summarise
from experiments.tracking import TrackingSettings
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model
from kfac.schedules import NAMED_SCHEDULES, make_plan
from kfac.timeline import Span, Timeline

CONFIG = {
    "model": {"name": "resnet50"},
    "kfac": {"damping": 0.03},
    "tracking": {"project": "p", "tags": ["t"]},
    "batch_size": 32,
    "warmup": 0,
    "seed": 0,
}
RUN_ID = "resnet50-spdkfac-w2-s0-01234567"


class Recording:
    """A sink that remembers what it was told, and on which thread."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments, threading.current_thread().name))

        return call


def patient(**options):
    """Settings whose time limits a busy machine keeps."""
    return TrackingSettings(**{"init_timeout_s": 30.0, "call_timeout_s": 20.0, "finish_timeout_s": 20.0, **options})


def train_row(iteration, **more):
    row = {"kind": "train", "iter": iteration, "epoch": round(iteration / 10, 4), "loss": 1 / (iteration + 1)}
    return {**row, "accuracy": 0.5, "lr": 0.1, "iteration_s": 0.01 + iteration / 1000, **more}


def eval_row(iteration):
    return {"kind": "eval", "iter": iteration, "epoch": iteration / 10, "loss": 0.5, "accuracy": 0.75}


def open_record(runs, run_id=RUN_ID, sweep="s"):
    """A new record, or the one that is there, with a segment begun."""
    facts = {"schedule": "spdkfac", "model": "resnet50", "data": "digits", "world_size": 2, "seed": 0}
    record = RunRecord.open(runs / sweep / run_id, run_id=run_id, name=run_id, facts=facts, config=CONFIG)
    record.begin_segment()
    return record


def write_timelines(record, iterations=(1, 3)):
    for iteration in iterations:
        for rank in range(2):
            spans = (
                Span(rank, "compute", "FF", "forward", 0, 1e-3),
                Span(rank, "communication", "FactorComm", "A message 0", 5e-4, 2e-3),
                Span(rank, "compute", "InverseComp", "invert", 2e-3, 3e-3),
            )
            path = record.timeline_path(iteration, rank)
            path.parent.mkdir(exist_ok=True)
            Timeline(spans, total_s=4e-3 + iteration / 1000).to_chrome_trace(path)


def write_plan(record):
    """Plan and profiles, so that the run can be simulated."""
    model, cluster = load_shipped_model("resnet50"), load_shipped_cluster("paper64").at(2)
    record.write("model_profile.json", model.to_dict())
    record.write("cluster_profile.json", cluster.to_dict())
    record.write("plan.json", make_plan(NAMED_SCHEDULES["spdkfac"], model, cluster).to_dict())


def write_run(runs, iterations=6, status="finished", **options):
    """A whole record with metrics, timelines, plan and summary; closed."""
    record = open_record(runs, **options)
    for i in range(iterations):
        record.log(train_row(i))
    record.log(eval_row(iterations - 1))
    write_timelines(record)
    write_plan(record)
    if status == "finished":
        record.write("summary.json", summarise(record, 0))
        render_timelines(record)
    if status != "running":
        record.end_segment(status)
    record.close()
    return RunRecord.load(record.path)


def text_of(folder):
    """Everything that lies in a folder, as one text."""
    return "".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*")) if path.is_file())


def dumps(data):
    return json.dumps(data, sort_keys=True)
