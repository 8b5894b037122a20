"""What else kept a machine busy: counted by the kernel, recorded per rank, and told where times are doubtful."""

import json
import os
import subprocess
import sys

import pytest

from experiments.load import doubt, most_of_others, note_load, of_hosts, part_of_rank, read_load, worst_load
from experiments.records import RunRecord
from experiments.summary import summarise
from tests.experiments.conftest import SMALL

SPIN = "import time, sys\nend = time.process_time() + float(sys.argv[1])\nwhile time.process_time() < end: pass"


def spin(cpu_s):
    return subprocess.Popen([sys.executable, "-c", SPIN, str(cpu_s)])


def part(rank=0, host="a", cores=(0, 1), busy_s=2.0, own_s=1.0, seconds=2.0):
    return {
        "rank": rank, "host": host, "cores": list(cores), "seconds": seconds, "own_s": own_s,
        "loadavg_start": [0.5, 0.4, 0.3], "loadavg_end": [1.5, 0.4, 0.3],
        "busy_s": dict.fromkeys(cores, busy_s / len(cores)) if busy_s else {},
    }  # fmt: skip


def test_descendants_are_the_runs_own_and_strangers_are_not():
    before = read_load()
    child = spin(0.6)
    child.wait()
    mine = part_of_rank(3, before, read_load())
    assert mine["own_s"] >= 0.55
    assert sum(mine["busy_s"].values()) >= 0.5, "counted by the kernel"
    assert len(mine["loadavg_start"]) == len(mine["loadavg_end"]) == 3
    assert mine["cores"] == sorted(os.sched_getaffinity(0))
    assert mine["rank"] == 3
    stranger = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN!r}, '0.6'], start_new_session=True)"
    )
    before = read_load()
    subprocess.run([sys.executable, "-c", stranger], check=True)  # its parent is gone
    while sum((mine := part_of_rank(0, before, read_load()))["busy_s"].values()) < 0.6:
        pass
    assert mine["own_s"] < 0.55 + mine["seconds"], "only what this test has used itself"
    assert mine["own_s"] < sum(mine["busy_s"].values())


@pytest.mark.parametrize(
    ("cores", "needed", "most"), [(2, 2, 0.2), (2, 1, 0.5), (16, 2, 7.0), (64, 64, 6.4), (1, 1, 0.1)]
)
def test_others_may_have_half_of_what_is_to_spare(cores, needed, most):
    assert most_of_others(cores, needed) == pytest.approx(most)


def test_ranks_of_a_host_are_taken_together():
    (host,) = of_hosts([part(0, own_s=1.0), part(1, own_s=0.9)], threads=1)
    assert host == {"host": "a", "cores": 2, "run_cores": pytest.approx(0.95), "other_cores": pytest.approx(0.05),
                    "doubtful": False}  # fmt: skip
    quiet, busy = of_hosts([part(0, "a", own_s=2.0), part(1, "b", own_s=1.0, busy_s=3.0)], threads=1)
    assert not quiet["doubtful"]
    assert (busy["other_cores"], busy["doubtful"]) == (1.0, True)
    (apart,) = of_hosts([part(0, cores=[0], busy_s=2.0, own_s=2.0), part(1, cores=[5], busy_s=2.0, own_s=2.0)], 1)
    assert (apart["cores"], apart["other_cores"]) == (2, 0.0), "ranks bound to cores of their own"
    assert of_hosts([part(busy_s=3.0)], 1)[0]["doubtful"]
    assert not of_hosts([part(busy_s=0.3, own_s=0.1, seconds=0.2)], 1)[0]["doubtful"], "too short to be judged"
    (untold,) = of_hosts([part(busy_s=0.0)], 1)
    assert (untold["other_cores"], untold["doubtful"]) == (None, False)


@pytest.fixture
def record(tmp_path):
    facts = {"schedule": "dkfac", "model": "mlp", "data": "digits", "world_size": 1, "seed": 0}
    record = RunRecord.open(tmp_path / "run", run_id="run", name="run", facts=facts, config={})
    yield record
    record.close()


def test_the_worst_of_all_starts_is_told(record):
    assert worst_load(record) is None
    assert "load" not in summarise(record, 0)
    note_load(record, [part(own_s=2.0)], threads=1)
    assert doubt(summarise(record, 0)["load"]) == ""
    note_load(record, [part(host="b", busy_s=3.0)], threads=1)
    note_load(record, [part(own_s=2.0)], threads=1)
    assert len(record.read("load.json")) == 3
    text = doubt(summarise(record, 0)["load"])
    assert "on b other processes kept 1.0 of 2 cores busy meanwhile, this run 0.5" in text
    assert "site.parallel=1" in text


@pytest.mark.parametrize("text", ["{", "[1]", "[{}]", '[{"hosts": [3]}]', '{"a": 1}'])
def test_a_damaged_file_ends_no_run(record, text):
    (record.path / "load.json").write_text(text)
    assert worst_load(record) is None
    note_load(record, [part()], threads=1)
    assert len(record.read("load.json")) == 1


def test_a_run_tells_of_another_one(command, tmp_path):
    """The control: what others use while nothing is timed does not count."""
    run = (*SMALL, "schedule=dkfac", "world_size=2", "timeline.count=0", "evaluation.every=1000")
    others = [spin(1000) for _ in os.sched_getaffinity(0)]
    try:
        told = command("train", *run, "iterations=500").stdout
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert "these times are doubtful: on " in told
    path = next((tmp_path / "runs").rglob("load.json"))
    (entry,) = json.loads(path.read_text())
    assert [part["rank"] for part in entry["ranks"]] == [0, 1]
    assert all(len(part["loadavg_start"]) == len(part["loadavg_end"]) == 3 for part in entry["ranks"])
    assert entry["hosts"][0]["other_cores"] > most_of_others(len(others), 2)
