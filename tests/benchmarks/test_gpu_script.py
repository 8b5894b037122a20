"""The GPU script: its arithmetic, its whole way on the CPU, and its use of streams and events on a stand-in."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks.gpu import command, timing
from benchmarks.gpu.packings import PACKINGS
from benchmarks.gpu.parts import QUICK, Peaks, peaks
from benchmarks.gpu.timing import CudaTimer, HostTimer, precision
from kfac.planning import ClusterProfile
from kfac.planning.shipped_profiles import load_shipped_cluster
from kfac.timeline import Timeline

ROOT = Path(command.__file__).parents[2]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    command.measure(command.Setting("cpu", quick=True, limit_s=60.0), folder, tests=False)
    return folder


@pytest.fixture(scope="module")
def found(output):
    return json.loads((output / "results.json").read_text())


# ---------------------------------------------------------------------- the whole way


def test_every_part_has_its_rows_with_units(found):
    assert found["stopped"] == []
    assert set(command.SHARES) - {"tests"} <= set(found)
    assert sum(command.SHARES.values()) <= 1
    units = ("seconds", "_s", "fraction", "slowdown")
    for part in ("products", "copies", "statistics", "inverses", "packing", "beside_copies"):
        for row in found[part]:
            numbers = {key: value for key, value in row.items() if isinstance(value, float)}
            assert numbers, part
            assert all(key.endswith(units) and value > 0 for key, value in numbers.items()), row
    dims = set(QUICK.dims)
    ways = {"single", "batched", "in turn", "streams"}
    assert {(r["dim"], r["way"]) for r in found["statistics"]} == set(itertools.product(dims, ways))
    methods = {"cholesky", "eigh"}
    assert {(r["method"], r["dim"], r["way"]) for r in found["inverses"]} == set(itertools.product(methods, dims, ways))
    assert {(r["dim"], r["packing"]) for r in found["packing"]} == set(itertools.product(dims, PACKINGS))
    assert {(r["work"], r["copies"]) for r in found["beside_copies"]} == set(
        itertools.product(("product", "inverse"), ("device", "to host"))
    )


def test_nothing_is_faster_than_the_roofline_and_more_work_takes_longer(found):
    for part in ("statistics", "inverses", "packing"):
        assert all(row["fraction"] < 1.2 for row in found[part])
    eigh = {r["dim"]: r["seconds"] for r in found["inverses"] if (r["method"], r["way"]) == ("eigh", "single")}
    assert eigh[16] < eigh[64]
    slices = {r["dim"]: r["seconds"] for r in found["packing"] if r["packing"] == "row slices"}
    assert slices[16] < slices[64]
    for row in found["products"]:
        assert row["flop_per_s"] == pytest.approx(2 * row["dim"] ** 3 / row["seconds"])
    for row in found["inverses"]:
        if row["method"] == "cholesky":
            assert row["flop_per_s"] == pytest.approx(row["dim"] ** 3 / row["seconds"])


def test_the_profile_is_the_planners(output, found):
    profile, network = ClusterProfile.load(output / "cluster.json"), load_shipped_cluster("default")
    assert profile.broadcast == network.broadcast
    assert 0 < profile.inverse(16) < profile.inverse(640)
    said = profile.provenance
    assert said["kind"] == "measured"
    assert "not measured" in said["what"]
    assert said["eigh"]["dims"] == list(QUICK.dims)
    assert said["eigh"]["cost"]["type"] == "polynomial"
    assert said["torch"] == torch.__version__


def test_the_step_has_a_timeline(output, found):
    timeline = Timeline.from_chrome_trace(output / "timeline.json")
    assert {"FF", "BP", "FactorComp", "InverseComp", "Precondition"} <= {span.kind for span in timeline.spans}
    assert sum(found["step"]["seconds"].values()) == pytest.approx(found["step"]["iteration_s"], rel=0.5)


def test_the_report_names_every_way(found):
    text = command.report(found | {"stopped": ["inverses after dim 64"], "tests": {"ended": False, "limit_s": 1.0}})
    for words in ("cholesky, float32, batched", "index gather", "product of 64", "Left out", "not ended in time"):
        assert words in text


# ---------------------------------------------------------------------- arithmetic


def test_the_roofline_by_hand():
    roofline = Peaks({"float32": 1e12, "tf32": 4e12}, 1e11)
    assert roofline.fraction(2.0, 1e12, 0.0) == 0.5
    assert roofline.fraction(2.0, 1e12, 0.0, "tf32") == 0.125
    assert roofline.fraction(2.0, 1e11, 1e11) == 0.5, "bytes bind"
    products = [{"precision": "float32", "flop_per_s": rate} for rate in (1.0, 3.0, 2.0)]
    rows = [{"kind": "device", "bytes_per_s": 5.0}, {"kind": "to host", "bytes_per_s": 9.0}]
    assert peaks(products, rows) == Peaks({"float32": 3.0}, 5.0)


@pytest.mark.parametrize("dim", [1, 2, 5, 6, 9, 64])
@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing_holds_each_triangle_once_and_nothing_else(name, dim):
    make, count = PACKINGS[name]
    numbers = torch.arange(1.0, count * dim * dim + 1).view(count, dim, dim)
    out = torch.full((count * dim * (dim + 1) // 2,), float("nan"))
    make(dim, torch.device("cpu"))(numbers, out)
    upper = torch.triu(torch.ones(dim, dim, dtype=torch.bool))
    assert sorted(out.tolist()) == sorted(torch.cat([matrix[upper] for matrix in numbers]).tolist())


def test_a_part_ends_when_its_time_is_over():
    budget = command.Budget(10.0)
    budget.begun_s -= 10.0
    rows = budget.rows("statistics", ({"dim": dim, "seconds": 1.0} for dim in (1, 2, 3)))
    assert [row["dim"] for row in rows] == [1, 2]
    assert budget.stopped == ["statistics after dim 2"]
    assert len(command.Budget(10.0).rows("statistics", iter([{"dim": 1}, {"dim": 2}, {"dim": 3}]))) == 3


def test_what_takes_long_is_repeated_less():
    calls = []
    slow = HostTimer(torch.device("cpu"), 10)
    slow.seconds(lambda: (calls.append(1), time.sleep(0.3)))
    assert len(calls) == 2
    slow.seconds(lambda: calls.append(1))
    assert len(calls) == 2 + 11


def test_precisions_are_put_back():
    before = torch.get_float32_matmul_precision()
    with precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


# ---------------------------------------------------------------------- tests and command line


def test_the_tests_marked_gpu_are_found_run_and_counted():
    files = command.marked_tests(ROOT / "tests")
    assert str(ROOT / "tests" / "kfac" / "test_gpu.py") in files
    done = command.run_tests([str(ROOT / "tests" / "kfac" / "test_gpu.py")], 120)
    assert done["ended"]
    assert done["passed"] + done["skipped"] >= 7
    assert not done["failed"] + done["error"]
    assert (done["skipped"] > 0) == (not torch.cuda.is_available())
    assert command.run_tests(files, 0.01) == {"ended": False, "limit_s": 0.01}


def test_what_is_no_measurement_is_not_kept(tmp_path, capsys):
    for option in (["--docs"], ["--ship", "mine"]):
        assert program.main(["gpu", "--device", "cpu", "--output", str(tmp_path), *option]) == 1
        assert "for a measurement on a GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert program.main(["gpu"]) == 0, "nor does it fail where all benchmarks are run"
    assert "nothing was measured" in capsys.readouterr().out
    assert program.main(["gpu", "--output", str(tmp_path)]) == 1
    assert "--device cpu --quick" in capsys.readouterr().err


# ---------------------------------------------------------------------- streams and events


class Machine:
    """Stands in for torch.cuda: every stream has a clock of its own, on which actions take the seconds they say."""

    def __init__(self) -> None:
        self.default = self.current = SimpleNamespace(clock_s=0.0)

    def work(self, seconds: float):
        def action():
            self.current.clock_s += seconds

        return action

    def stream_type(self):
        machine = self

        class Stream:
            def __init__(self, device=None) -> None:
                self.clock_s = machine.default.clock_s

            def wait_stream(self, other) -> None:
                self.clock_s = max(self.clock_s, other.clock_s)

            def wait_event(self, event) -> None:
                self.clock_s = max(self.clock_s, event.at_s)

        return Stream

    def event_type(self):
        machine = self

        class Event:
            def __init__(self, enable_timing=False) -> None:
                self.at_s = 0.0

            def record(self) -> None:
                self.at_s = machine.current.clock_s

            def elapsed_time(self, end) -> float:
                return (end.at_s - self.at_s) * 1e3

        return Event

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def machine(monkeypatch):
    stand_in = Machine()
    stream_type = stand_in.stream_type()
    stand_in.default = stand_in.current = stream_type()
    cuda = SimpleNamespace(
        Stream=stream_type,
        Event=stand_in.event_type(),
        stream=stand_in.stream,
        current_stream=lambda device=None: stand_in.current,
        synchronize=lambda device=None: None,
    )
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    return stand_in


def test_events_time_what_the_device_does(machine):
    assert CudaTimer(torch.device("cuda"), 3).seconds(machine.work(0.25)) == pytest.approx(0.25)


def test_streams_run_side_by_side_and_are_awaited(machine):
    timer = CudaTimer(torch.device("cuda"), 3)
    actions = [machine.work(0.1) for _ in range(5)]
    assert timer.seconds(timer.together(actions, 1)) == pytest.approx(0.5)
    assert timer.seconds(timer.together(actions, 4)) == pytest.approx(0.2)
    assert timer.seconds(timer.together(actions, 5)) == pytest.approx(0.1)


def test_what_runs_beside_begins_before_and_ends_after(machine):
    began, beside = [], []
    timer = CudaTimer(torch.device("cuda"), 3)

    def action():
        began.append((machine.current.clock_s, beside[-1] if beside else None))
        machine.current.clock_s += 1.0

    def other():
        machine.current.clock_s += 0.1
        if machine.current is not machine.default:
            beside.append(machine.current.clock_s)

    assert timer.seconds_beside(action, other) == pytest.approx(1.0)
    start_s, copied_until_s = began[-1]
    assert copied_until_s > start_s + 3.0, "there is enough to copy for three times as long"
    assert machine.current is machine.default
