import json
import os
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from analysis.metrics import plain_training_rows, rows_by_kind
from analysis.runs import find_records, load_run, load_runs, load_samples, load_timelines
from analysis.statistics import Spread
from experiments.records import RunRecord
from experiments.summary import summarise
from tests.analysis.records import timeline, write_record


def test_a_finished_run_reads_from_its_summary(tmp_path):
    run = load_run(write_record(tmp_path, "a"))
    assert (run.run_id, run.schedule, run.model, run.world_size, run.batch_size) == ("a", "spdkfac", "resnet20", 2, 32)
    assert run.iteration_s == Spread(0.2, 0.1, 0.3, 3)
    assert (run.loss, run.accuracy, run.iterations, run.host) == (1.25, 0.75, 4, "node1")
    assert run.breakdown_s["BP"] == 0.04
    assert run.samples_s() == [0.2, 0.1, 0.3]


def test_a_run_without_summary_is_summarised_from_metrics_and_timelines(tmp_path):
    times_s = (9.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    path = write_record(tmp_path, "a", status="interrupted", summary=False, times_s=times_s, timelines=2)
    run = load_run(path)
    found = run.iteration_s
    assert (found.median, found.q25, found.q75, found.n) == pytest.approx((0.3, 0.2, 0.4, 5))
    # The two recorded iterations take 0.1 and 0.2 s; see the layout of the timeline in records.py.
    expected = {"FF": 0.03, "BP": 0.06, "FactorComm": 0.015, "InverseComp": 0.03, "Other": 0.015}
    assert {k: s for k, s in run.breakdown_s.items() if s} == pytest.approx(expected)
    assert run.hidden_s["FactorComm"] == pytest.approx(0.045)
    assert run.status == "interrupted"


def test_after_a_resume_the_last_row_of_an_iteration_counts(tmp_path):
    path = write_record(tmp_path, "a", summary=False, status="running", times_s=(9.0, 0.1, 0.2))
    with (path / "metrics.jsonl").open("a") as file:
        for i, s in ((2, 0.5), (3, 0.7)):
            file.write(json.dumps({"kind": "train", "iter": i, "loss": 1.0, "iteration_s": s}) + "\n")
    run = load_run(path)
    assert run.samples_s() == [0.1, 0.5, 0.7]
    assert run.iterations == 4


def test_a_torn_last_line_is_dropped_and_a_damaged_line_is_named(tmp_path):
    path = write_record(tmp_path, "a", status="running", summary=False)
    whole = load_run(path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "it')
    assert load_run(path) == whole
    lines = (path / "metrics.jsonl").read_text().split("\n")
    for damaged, reason in ((lines[1][:10], "line 2"), ('{"loss": 1}', "without kind or iter")):
        (path / "metrics.jsonl").write_text("\n".join([lines[0], damaged, *lines[2:]]))
        with pytest.raises(ValueError, match=reason):
            load_run(path)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("run.json", '{"run_id": "b", ', "no run record"),
        ("run.json", '{"schema": 1, "run_id": "b", "status": "finished"}', "no 'schedule'"),
        ("run.json", '{"schema": 99}', "schema 99"),
        ("run.json", "[]", "damaged"),
        ("config.json", None, "no config.json"),
        ("summary.json", None, "no summary.json"),
        ("summary.json", '{"iterations": 3, "iteration_s": {"median": 1}}', "no 'q25'"),
        ("run.json", '{"schema": 1}', "run.json is damaged"),
        ("summary.json", '{"iterations": "many"}', "summary.json is damaged: .*many"),
        ("summary.json", '{"iterations": 3, "iteration_s": {"median": "x", "q25": 1, "q75": 1, "n": 1}}', "got 'x'"),
        ("summary.json", '{"iterations": 3, "iteration_s": {"median": 0, "q25": 0, "q75": 0, "n": 1}}', "positive"),
        ("summary.json", '{"iterations": 3, "iteration_s": {"median": NaN, "q25": 1, "q75": 1, "n": 1}}', "finite"),
        ("summary.json", '{"iterations": 3, "iteration_s": {"median": 1, "q25": 2, "q75": 3, "n": 1}}', "order"),
        ("summary.json", '{"iterations": 3, "breakdown_s": {"FF": "x"}}', "summary.json is damaged: .*'x'"),
        ("summary.json", '{"iterations": Infinity}', "summary.json is damaged"),
    ],
)
def test_damaged_and_incomplete_records_are_skipped_and_named(tmp_path, file, text, reason):
    write_record(tmp_path, "good")
    bad = write_record(tmp_path, "bad")
    (bad / file).unlink()
    if text is not None:
        (bad / file).write_text(text)
    runs, problems = load_runs([tmp_path])
    assert [run.run_id for run in runs] == ["good"]
    (problem,) = problems
    assert problem.path == bad
    assert re.search(reason, problem.reason)
    assert str(bad) in str(problem)


def test_a_damaged_timeline_of_an_unfinished_run_is_named(tmp_path):
    path = write_record(tmp_path, "a", status="failed", summary=False)
    for text in ("{", '{"traceEvents": []}'):
        (path / "timelines" / "iter000000.rank1.json").write_text(text)
        runs, problems = load_runs([tmp_path])
        assert not runs
        assert str(path / "timelines" / "iter000000.rank1.json") in problems[0].reason


def test_a_file_that_is_no_timeline_does_not_count(tmp_path):
    path = write_record(tmp_path, "a", status="failed", summary=False)
    whole = load_run(path)
    (path / "timelines" / "iterfoo.rank0.json").write_text("{")
    assert load_run(path) == whole


@pytest.mark.parametrize("row", ['{"kind": "train", "iter": 1}', '{"kind": "train", "iter": 1, "iteration_s": 0}', "{"])
def test_damaged_metrics_of_a_finished_run_cost_only_its_interval(tmp_path, row):
    write_record(tmp_path, "good")
    bad = write_record(tmp_path, "bad")
    with (bad / "metrics.jsonl").open("a") as file:
        file.write(row + "\n")
    runs, problems = load_runs([tmp_path])
    assert (len(runs), problems) == (2, [])
    samples_s, (problem,) = load_samples(runs)
    assert list(samples_s.values()) == [[0.2, 0.1, 0.3]]
    assert str(bad / "metrics.jsonl") in str(problem)


def test_the_quick_reading_of_metrics_never_says_anything_else_than_the_thorough_one(tmp_path):
    """It may leave a file to the thorough one; what it returns must be the same."""
    path = write_record(tmp_path, "a", times_s=[0.1 + i / 1000 for i in range(12)])
    file = path / "metrics.jsonl"
    whole = file.read_bytes()
    assert plain_training_rows(file) == rows_by_kind(path)["train"] != []  # the file as runs write it
    random, quick = Random(1), 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 2)):
            place = random.randrange(len(damaged))
            match random.randrange(4):
                case 0:
                    damaged[place] = random.choice(b'{}[],:"\n 01.e-a\xff\x00')
                case 1:
                    del damaged[place : place + random.choice((1, 5, 120))]
                case 2:
                    damaged[place:place] = random.choice(
                        (b"\n", b",", b"},{", b"null\n", b"[]\n", b'{"kind": "train"}\n')
                    )
                case 3:
                    damaged += damaged[place:]
        file.write_bytes(damaged)
        if (found := plain_training_rows(file)) is not None:
            assert found == rows_by_kind(path)["train"]
            quick += 1
    assert quick > 20


def test_a_folder_that_cannot_be_listed_is_named_and_links_are_not_followed(tmp_path, monkeypatch):
    path = write_record(tmp_path / "a", "x")
    (tmp_path / "closed").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    real = os.scandir

    def scandir(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    runs, problems = load_runs([tmp_path])
    assert [run.path for run in runs] == [path]
    assert [str(problem) for problem in problems] == [
        f"skipped {tmp_path / 'closed'}: it cannot be listed: Permission denied"
    ]


def test_records_are_found_at_any_depth_but_not_inside_records(tmp_path):
    outer = write_record(tmp_path, "a")
    (outer / "checkpoint").mkdir()
    (outer / "checkpoint" / "run.json").write_text("{}")
    assert list(find_records(tmp_path)) == [outer]
    assert list(find_records(outer)) == [outer]


def test_a_run_below_several_folders_counts_once(tmp_path):
    paths = [write_record(tmp_path / "sweep", name) for name in "ab"]
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    (damaged := write_record(tmp_path / "sweep", "c") / "run.json").write_text("{")
    found, problems = load_runs([tmp_path / "sweep", tmp_path, tmp_path / "link", paths[0]])
    assert [run.path for run in found] == paths
    assert [problem.path for problem in problems] == [damaged.parent]


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_runs([tmp_path / "nowhere"])


def test_timelines_of_all_ranks_merge_by_iteration(tmp_path):
    timelines = load_timelines(write_record(tmp_path, "a", world_size=3, timelines=2))
    assert list(timelines) == [0, 1]
    assert timelines[1].ranks == (0, 1, 2)
    assert timelines[1].iteration_s == pytest.approx(0.2)


def test_a_real_record_reads_the_same_here_and_by_the_code_that_summarises_it(tmp_path):
    facts = {"schedule": "dkfac", "model": "resnet20", "data": "digits", "world_size": 2, "seed": 3}
    record = RunRecord.open(tmp_path / "r", run_id="r", name="r", facts=facts, config={"warmup": 2, "batch_size": 8})
    record.begin_segment()
    for i, s in enumerate((9.0, 5.0, 0.25, 0.3, 0.2, 0.4)):
        record.log({"kind": "train", "iter": i, "epoch": 0, "loss": 1.0, "accuracy": 0.5, "lr": 0.1, "iteration_s": s})
    record.log({"kind": "eval", "iter": 5, "epoch": 0, "loss": 0.5, "accuracy": 0.9})
    for i in (3, 5):
        for rank in (0, 1):
            record.timeline_path(i, rank).parent.mkdir(exist_ok=True)
            timeline(rank, 0.01 * (i + rank)).to_chrome_trace(record.timeline_path(i, rank))
    record.end_segment("interrupted")
    record.close()
    here, there = load_run(tmp_path / "r"), summarise(record, 2)
    assert here.iteration_s.n == there["iteration_s"]["n"] == 4
    for name in ("median", "q25", "q75"):
        assert getattr(here.iteration_s, name) == pytest.approx(there["iteration_s"][name])
    assert here.breakdown_s == pytest.approx(there["breakdown_s"])
    assert here.hidden_s == pytest.approx(there["hidden_s"])
    assert (here.loss, here.accuracy) == (there["eval_loss"], there["eval_accuracy"])
    assert (here.schedule, here.world_size, here.status) == ("dkfac", 2, "interrupted")
    assert here.machine()["cpus"] >= 1


def test_a_finished_run_is_read_from_three_files(tmp_path, monkeypatch):
    """Thousands of runs are read in seconds only if nothing is opened that the summary makes needless."""
    for i in range(20):
        write_record(tmp_path, f"r{i}")
    opened = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self.name) or real(self, *a, **k))
    runs, problems = load_runs([tmp_path])
    assert (len(runs), problems) == (20, [])
    assert Counter(opened) == {"run.json": 20, "config.json": 20, "summary.json": 20}
