"""W&B's real client online, against a stand-in server that also misbehaves: one run per run of ours, ended in time."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.tracking import TrackingSettings, open_tracker, tracking_id
from tests.experiments.tracked import eval_row, open_record, train_row, write_plan, write_timelines
from tests.wandb_server import DROP
from tests.wandb_server.fixtures import KEY

ROOT = Path(__file__).parents[2]
ONLINE = TrackingSettings(
    wandb="online", project="p", tags=("t",), init_timeout_s=20, call_timeout_s=20, finish_timeout_s=20
)
IMPATIENT = TrackingSettings(wandb="online", project="p", init_timeout_s=3, call_timeout_s=5, finish_timeout_s=2)


def log(tracker, record, iterations):
    for i in iterations:
        record.log(train_row(i))
        tracker.log(train_row(i))
    tracker.flush()


def held(run, key="train/loss"):
    return [(row["iter"], row[key]) for row in run.rows() if key in row]


def test_everything_arrives(tmp_path, server):
    record = open_record(tmp_path)
    write_timelines(record)
    write_plan(record)
    tracker = open_tracker(ONLINE, record)
    log(tracker, record, range(3))
    tracker.log(eval_row(2))
    tracker.summary({"iteration_s": {"median": 0.25}})
    tracker.timelines(record)
    tracker.finish("finished")
    assert tracker.working == ("W&B",)

    run = server.run
    assert (run.name, run.project, run.group, run.job_type) == (tracking_id(record), "p", "s", "spdkfac")
    assert (run.state, run.tags, run.summary["end_reason"]) == ("finished", ["t"], "finished")
    assert run.config["kfac"]["value"] == {"damping": 0.03}
    assert run.summary["iteration_s/median"] == 0.25
    assert held(run) == [(i, 1 / (i + 1)) for i in range(3)]
    assert held(run, "eval/accuracy") == [(2, 0.75)]
    assert held(run, "recorded_iteration_s") == [(1, pytest.approx(0.005)), (3, pytest.approx(0.007))]
    axes = [metric for metric in run.config["_wandb"]["value"]["m"] if metric.get("2") == "*"]
    assert axes, "define_metric('*', step_metric='iter') is part of the configuration"
    media = {row[key]["path"] for row in run.rows() for key in ("timeline", "timeline_page") if key in row}
    assert len(media) == 4
    assert media < set(run.files)
    assert {"record/run.json", "record/plan.json", "record/timelines/iter000003.rank0.json"} <= set(run.files)
    traces = [a for a in run.artifacts if a.type == "profile"]
    assert [(a.state, list(a.files)) for a in traces] == [
        ("COMMITTED", [f"iter00000{i}.pt.trace.json"]) for i in (1, 3)
    ]
    assert KEY not in json.dumps([run.config, run.summary, run.history]) + repr(run.files)


def test_a_requeued_run_is_one_run_and_restarts_are_noted(tmp_path, server):
    record = open_record(tmp_path)
    tracker = open_tracker(ONLINE, record)
    log(tracker, record, range(5))
    tracker.finish("interrupted")
    record.end_segment("interrupted")
    assert (server.run.state, server.run.summary["end_reason"]) == ("preempted", "interrupted")

    record.begin_segment()
    tracker = open_tracker(ONLINE, record)
    log(tracker, record, range(3, 7))  # from the last checkpoint on
    tracker.finish("finished")
    run = server.run  # there is one
    assert (run.state, run.starts, run.summary["end_reason"], run.summary["restarts"]) == ("finished", 2, "finished", 1)
    assert [i for i, _ in held(run)] == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert held(run, "restarts") == [(0, 0), (3, 1)]
    ends = [segment["end_reason"] for segment in json.loads(run.config["segments"]["value"])]
    assert ends == ["interrupted", None]


WRITER = """
import sys
from pathlib import Path
from tests.experiments.test_tracking_online import ONLINE, log
from tests.experiments.tracked import open_record
from experiments.tracking import open_tracker
record = open_record(Path(sys.argv[1]))
tracker = open_tracker(ONLINE, record)
log(tracker, record, range(3))
print("logged", flush=True)
sys.stdin.read()
"""


def test_a_killed_run_is_neither_finished_nor_failed_and_goes_on(tmp_path, server):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "logged\n"
        process.send_signal(signal.SIGKILL)
    assert (server.run.state, server.run.exit_code, server.run.summary.get("end_reason")) in (
        ("running", None, "running"),
        ("running", None, None),  # its first summary was still on the way
    )
    record = open_record(tmp_path)
    tracker = open_tracker(ONLINE, record)
    log(tracker, record, range(3, 5))
    tracker.finish("finished")
    assert server.run.state == "finished"
    ends = [segment["end_reason"] for segment in json.loads(server.run.config["segments"]["value"])]
    assert ends == ["killed", None]
    assert {i for i, _ in held(server.run)} >= {3, 4}


def test_a_failed_run_alerts(tmp_path, server, monkeypatch):
    record = open_record(tmp_path)
    tracker = open_tracker(ONLINE, record)
    log(tracker, record, range(2))
    monkeypatch.setenv("SOME_TOKEN", "t0psecret-value")
    tracker.failed(RuntimeError("loss is not finite (t0psecret-value)"))
    tracker.finish("failed")
    assert server.run.state == "failed"
    assert server.run.alerts == [
        {"title": "failed: RuntimeError", "text": "loss is not finite (***)", "severity": "ERROR"}
    ]


def test_all_ranks_share_one_run(tmp_path, server):
    record = open_record(tmp_path)
    everybody = TrackingSettings(wandb="online", project="p", all_ranks=True)
    first = open_tracker(everybody, record)
    code = (
        "import sys\nfrom pathlib import Path\nfrom experiments.records import RunRecord\n"
        "from experiments.tracking import TrackingSettings, open_tracker\n"
        "t = open_tracker(TrackingSettings(wandb='online', project='p', all_ranks=True),"
        " RunRecord.load(Path(sys.argv[1])), rank=1)\n"
        "t.log({'kind': 'rank1', 'iter': 0, 'iteration_s': 0.5})\nt.finish('finished')\n"
    )
    # On its own, as ranks are: this process's W&B service would be inherited otherwise.
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    subprocess.run([sys.executable, "-c", code, str(record.path)], cwd=ROOT, check=True, env=environ)
    assert server.run.state == "running"  # the first rank ends it
    log(first, record, range(1))
    first.finish("finished")
    assert server.run.state == "finished"
    assert held(server.run, "rank1/iteration_s") == [(0, 0.5)]
    assert held(server.run) == [(0, 1.0)]


def no_stream(answer):
    return lambda request: answer if request.path.endswith("/file_stream") else None


@pytest.mark.parametrize(
    "fault", [no_stream(429), no_stream(500), no_stream(DROP), "dies"], ids=["429", "500", "dropped", "dies"]
)
def test_a_server_that_fails_during_a_run_neither_stops_nor_delays_it(tmp_path, server, fault, caplog):
    record = open_record(tmp_path)
    tracker = open_tracker(IMPATIENT, record)
    log(tracker, record, range(2))
    if fault == "dies":
        server.close()
    else:
        server.fault = fault
    start = time.monotonic()
    for i in range(2, 8):
        log(tracker, record, [i])
    assert time.monotonic() - start < 5  # the client queues what it cannot send
    tracker.finish("finished")
    assert time.monotonic() - start < 15  # finish_timeout_s=2, and 5 to spare for the client's own
    assert [row["iter"] for row in record.rows()] == list(range(8))


def test_slow_answers_cost_the_run_nothing(tmp_path, server):
    record = open_record(tmp_path)
    tracker = open_tracker(ONLINE, record)
    server.delay_s = 0.3
    start = time.monotonic()
    for i in range(20):
        log(tracker, record, [i])
    assert time.monotonic() - start < 3  # not 20 * 0.3
    tracker.finish("finished")
    assert len(held(server.run)) == 20


@pytest.mark.parametrize("answer", [500, 429, DROP], ids=["500", "429", "dropped"])
def test_a_server_that_fails_at_the_start_leaves_an_offline_run(tmp_path, server, answer, caplog):
    server.fault = lambda request: answer
    record = open_record(tmp_path)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracker = open_tracker(IMPATIENT, record)
    assert time.monotonic() - start < 30
    log(tracker, record, range(2))
    tracker.finish("finished")
    assert "tracking offline now, for python -m analysis sync" in caplog.text
    assert len(list((record.path / "wandb").glob("offline-run-*"))) == 1
    assert server.store.runs == {}


def test_without_a_login_it_says_how_to_log_in(tmp_path, server, caplog, monkeypatch, wandb_client):
    monkeypatch.delenv("WANDB_API_KEY")
    wandb_client.teardown()
    with caplog.at_level(logging.WARNING):
        open_tracker(IMPATIENT, open_record(tmp_path)).finish("failed")
    assert "not logged in to W&B (wandb login, or choose tracking=offline): tracking offline" in caplog.text


def test_a_service_that_dies_is_switched_off(tmp_path, server, caplog):
    record = open_record(tmp_path)
    before = services()
    tracker = open_tracker(IMPATIENT, record)
    log(tracker, record, range(2))
    for pid in services() - before:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    with caplog.at_level(logging.WARNING):
        for i in range(2, 6):
            log(tracker, record, [i])
        tracker.finish("finished")
    assert tracker.working == ()
    assert sum("is switched off" in entry.getMessage() for entry in caplog.records) == 1
    assert len(record.rows()) == 6


def services():
    """W&B's own processes below this one."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name.startswith("wandb-core") and int(rest.split()[1]) == os.getpid():
            found.add(int(status.parent.name))
    return found


def test_a_process_ends_although_the_server_never_takes_its_rows(tmp_path, server):
    server.fault = no_stream(429)
    code = (
        "import sys\nfrom pathlib import Path\nfrom experiments.tracking import open_tracker\n"
        "from tests.experiments.test_tracking_online import IMPATIENT, log\n"
        "from tests.experiments.tracked import open_record\n"
        "record = open_record(Path(sys.argv[1]))\ntracker = open_tracker(IMPATIENT, record)\n"
        "log(tracker, record, range(3))\ntracker.finish('finished')\n"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    assert time.monotonic() - start < 40


def test_the_server_names_what_it_does_not_know(server):
    import urllib.error
    import urllib.request

    body = json.dumps({"query": "query Weather { viewer { id temperature } }", "variables": {}}).encode()
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/graphql", body))
    assert server.unknown == ["GraphQL field Weather.viewer.temperature"]
    server.unknown.clear()
