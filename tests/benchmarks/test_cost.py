"""The cost benchmark: its arithmetic, its processes on a tiny model, and that it imports the right K-FAC."""

import json
from dataclasses import astuple
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import cost
from benchmarks.checkout import kaisa_identity
from benchmarks.cost_report import Ratio, goals, of_kaisa, over_sgd, report, step_s, table
from benchmarks.pages import BEGIN, END, into_page, quartiles

ROOT = Path(cost.__file__).parent.parent

FAKE_KAISA = """
class KFACPreconditioner:
    def __init__(self, model, *, factor_update_steps, inv_update_steps, damping, kl_clip, lr, compute_method):
        import importlib.metadata
        import sys
        assert importlib.metadata.version("kfac-pytorch") and compute_method == "inverse"
        assert "kfac.config" not in sys.modules  # this project's
        kinds = {kinds}
        self._layers = {{m: (n, None) for n, m in model.named_modules() if type(m).__name__ in kinds}}
        self.steps = 0

    def step(self):
        self.steps += 1
"""


@pytest.fixture
def kaisa(tmp_path):
    """A checkout that stands in for kfac-pytorch."""

    def make(kinds):
        package = tmp_path / "kfac"
        package.mkdir()
        (package / "__init__.py").write_text(
            "import importlib.metadata\nv = importlib.metadata.version('kfac-pytorch')"
        )
        (package / "preconditioner.py").write_text(FAKE_KAISA.format(kinds=kinds))
        return tmp_path

    return make


def result(*, kaisa: bool) -> dict:
    """Two rounds, the second five times as slow: SGD takes 10 ms, K-FAC twice that, KAISA six times that."""
    times = {"sgd": [10.0], "ours/1": [20.0], "ours_all/1": [22.0], "kaisa/1": [60.0]}
    times |= {"ours/10": [20.0] + [10.0] * 9, "ours_all/10": [22.0] + [10.0] * 9, "kaisa/10": [55.0] + [10.5] * 9}
    return {
        key: {
            "turns": [[t * slow / 1e3 for t in turn] for slow in (1, 5)],
            "sgd_s": [0.01, 0.05],
            "peak_bytes": int(1e8 + 1e6 * max(turn)),
        }
        for key, turn in times.items()
        if kaisa or not key.startswith("kaisa")
    }


def test_ratios_are_to_sgd_at_the_same_time():
    measured = result(kaisa=True)
    assert step_s(measured, "ours/10") == pytest.approx([0.011, 0.055])
    assert over_sgd(measured, "ours/10") == pytest.approx([0.1, 0.1])
    assert astuple(of_kaisa(measured, "ours", 1)) == pytest.approx((0.2, 0.2, 0.2))
    assert astuple(of_kaisa(measured, "ours", 10)) == pytest.approx((1 / 4.95,) * 3)
    # Negative control: not so with what SGD took at another time.
    measured["ours/1"]["sgd_s"].reverse()
    assert of_kaisa(measured, "ours", 1).value != pytest.approx(0.2)


def test_ratios_of_what_is_lost_in_the_noise():
    """Differences of measured times may be negative: quotients are then ordered by value, unbounded, or meaningless."""
    assert str(Ratio.of((0.1, 0.2, 0.3), (0.2, 0.4, 0.5))) == "0.50 (0.20 to 1.50)"
    assert str(Ratio.of((-0.1, 0.2, 0.3), (0.2, 0.4, 0.5))) == "0.50 (-0.50 to 1.50)"
    assert str(Ratio.of((-0.2, -0.1, -0.04), (0.1, 0.2, 0.4))) == "-0.50 (-2.00 to -0.10)"
    assert str(Ratio.of((0.1, 0.2, 0.3), (-0.2, 0.1, 0.5))) == "2.00 (unbounded)"
    assert str(Ratio.of((0.1, 0.2, 0.3), (-0.2, -0.1, 0.5))) == "not resolved"
    measured = result(kaisa=True)
    measured["kaisa/10"]["turns"] = [[0.5 * s for s in turn] for turn in measured["sgd"]["turns"]]  # below SGD's
    line = goals("resnet20", measured)[1]
    assert line == "- extra time at interval 10 at most 0.6 of KAISA's: not resolved"  # a negative ratio is not "met"


def test_quartiles():
    assert quartiles([3.0, 1.0, 2.0, 5.0, 4.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_table_and_goals():
    measured = result(kaisa=True)
    rows = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in table(measured).split("\n")
    }
    assert rows["SGD"] == ["30", "20 to 40", "", "", "", "110", ""]
    assert rows["K-FAC, every step"] == ["60", "40 to 80", "+30 ms", "+100%", "0.20 (0.20 to 0.20)", "120", "+10"]
    assert rows["KAISA, every step"][-2:] == ["160", "+50"]
    assert len({len(row) for row in table(measured).split("\n")}) == 1
    assert [line.rsplit(", ", 1)[1] for line in goals("resnet20", measured)] == ["met"] * 5
    assert len(goals("gpt", measured)) == 4  # the goal over SGD is ResNet-20's
    for turn in measured["ours/10"]["turns"]:
        turn[0] *= 2
    measured["ours/10"]["peak_bytes"] = 2 * measured["kaisa/10"]["peak_bytes"]
    assert [line.rsplit(", ", 1)[1] for line in goals("resnet20", measured)] == [
        "met",
        "not met",
        "not met",
        "met",
        "not met",
    ]


def test_without_kaisa_its_rows_say_not_measured():
    measured = result(kaisa=False)
    rows = [row for row in table(measured).split("\n") if "KAISA," in row]
    assert len(rows) == 2
    assert all("not measured" in row for row in rows)
    lines = goals("resnet20", measured)
    assert [line.endswith("not measured") for line in lines] == [True, True, False, True, True]


def test_quick_run_without_kaisa(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KAISA", raising=False)
    monkeypatch.setattr(cost, "VARIANTS", [v for v in cost.VARIANTS if v.key in ("sgd", "ours/1", "ours_all/10")])
    output = tmp_path / "cost.json"
    assert program.main(["cost", "--quick", "--rounds", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "KAISA=PATH" in printed
    results = json.loads(output.read_text())
    assert "not measured" in printed
    measured = results["workloads"]["tiny"]
    assert [len(value["sgd_s"]) for value in measured.values()] == [3, 1, 1]
    assert {key: len(value["turns"][0]) for key, value in measured.items()} == {
        "sgd": 5,
        "ours/1": 3,
        "ours_all/10": 10,
    }
    assert all(value["peak_bytes"] > 2**26 for value in measured.values())
    assert set(results["provenance"]) == {
        *("python", "packages", "cpu", "cpus", "commit", "dirty", "date", "rounds", "threads", "kaisa")
    }


def test_kaisa_comes_from_its_checkout_in_a_process_of_its_own(kaisa, monkeypatch):
    variants = [v for v in cost.VARIANTS if v.key in ("sgd", "ours/10", "kaisa/10")]
    monkeypatch.setattr(cost, "VARIANTS", variants)
    checkout = kaisa(("Linear", "Conv2d"))
    measured = cost.measure("tiny", cost.Setting(("tiny",), rounds=1, kaisa=checkout))
    assert list(measured) == ["sgd", "ours/10", "kaisa/10"]
    assert kaisa_identity(checkout)["version"] == "?"


def test_k_facs_that_cover_different_layers_are_not_compared(kaisa, monkeypatch):
    monkeypatch.setattr(cost, "VARIANTS", [v for v in cost.VARIANTS if v.key in ("ours/10", "kaisa/10")])
    with pytest.raises(cost.CostError, match="only one of the K-FACs preconditions fc"):
        cost.measure("tiny", cost.Setting(("tiny",), rounds=1, kaisa=kaisa(("Conv2d",))))


def test_a_process_that_fails_says_why(kaisa, monkeypatch):
    checkout = kaisa(("Linear",))
    (checkout / "kfac" / "preconditioner.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.setattr(cost, "VARIANTS", [v for v in cost.VARIANTS if v.key == "kaisa/1"])
    with pytest.raises(cost.CostError, match=r"(?s)kaisa/1 on tiny ended with exit status 1:.*no luck"):
        cost.measure("tiny", cost.Setting(("tiny",), rounds=1, kaisa=checkout))


def test_users_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KAISA", str(tmp_path))
    assert program.main(["cost", "--quick"]) == 1
    assert "no checkout of kfac-pytorch" in capsys.readouterr().err
    monkeypatch.delenv("KAISA")
    assert program.main(["cost", "--workloads", "nothing"]) == 1
    assert "no such workload(s): nothing" in capsys.readouterr().err
    assert program.main(["nothing"]) == 2
    assert "no benchmark 'nothing'; choose from: speed, cost, gpu" in capsys.readouterr().err


def test_the_page_holds_what_was_measured():
    """The published figures are those of the raw numbers that stand beside them."""
    page, raw = ROOT / "docs" / "cost.md", ROOT / "docs" / "cost.json"
    assert into_page(page.read_text(), report(json.loads(raw.read_text()))) == page.read_text()
    with pytest.raises(ValueError, match="the page has no"):
        into_page(f"{END} {BEGIN}", "")
