"""The speed benchmark: its arithmetic and goals on numbers made by hand, what it keeps, and one quick run."""

import json
from dataclasses import replace

import pytest

from benchmarks import __main__ as program
from benchmarks.speed import command, parts
from benchmarks.speed.measure import channel_ratio, rate_for, rotated, strategies, summary
from benchmarks.speed.parts import UNLIMITED, Part, Store, code_digest, matrix
from benchmarks.speed.variants import AUTO, BASELINE, FEW, KAISA, PAPER, TITLES, VARIANTS
from kfac.planning.schedule_config import CHOICES
from kfac.schedules import resolve_schedule
from kfac.timeline import KINDS, OTHER, Timeline

NOTHING = dict.fromkeys((*KINDS, OTHER), 0.0)


# ---------------------------------------------------------------------- the table of variants


def test_every_variant_is_a_schedule_and_every_switch_is_varied():
    found = [resolve_schedule(switches) for name, switches in VARIANTS.items() if name != AUTO]
    assert len(set(found)) == len(found)
    assert set(TITLES) == {*VARIANTS, KAISA}
    for switch, values in CHOICES.items():
        missing = set(values) - {getattr(schedule, switch) for schedule in found if schedule.curvature}
        assert missing <= {"greedy", "planned"}, (switch, missing)  # planned: only where auto takes it
    baseline = resolve_schedule(VARIANTS[BASELINE])
    assert not baseline.gradient_pipelining
    assert baseline.pipelining == "none"


def test_the_ablation_has_its_four_cells():
    cells = [
        resolve_schedule(VARIANTS[name]) for name in ("mpdkfac", "pipelined_round_robin", "lbp_after_backward", PAPER)
    ]
    assert [(cell.pipelining, cell.placement) for cell in cells] == [
        ("none", "seq_dist"),
        ("layerwise", "seq_dist"),
        ("none", "lbp"),
        ("layerwise", "lbp"),
    ]


# ---------------------------------------------------------------------- parts and what is kept


def test_the_matrix():
    found = matrix(None, ("resnet20", "gpt", "resnet18"), (2, 4))
    assert len(found) == 18
    assert len({part.name for part in found}) == 18
    assert {part.workers for part in found if part.workload == "resnet18"} == {2}
    unseen = found[14:]
    assert [part.name for part in unseen] == [
        f"{name}-{n}-DenseNet-201" for n in (2, 4) for name in ("resnet20", "gpt")
    ]
    assert all(
        part.rounds >= 7 and set(part.variants) == set(VARIANTS) for part in found[:14] if part.workload != "resnet18"
    )
    assert [part.name for part in matrix(None, ("vit",), (2, 4))] == [
        "vit-2-ResNet-50",
        "vit-2-DenseNet-201",
        "vit-4-DenseNet-201",
    ]
    assert [round(part.ratio, 2) if part.ratio else None for part in found[:3]] == [0.68, 1.95, None]
    beside_kaisa = matrix({"version": "1", "commit": "abc"}, ("resnet20", "gpt", "resnet18"), (2, 4))
    assert 30 * 60 < sum(part.estimate_s for part in beside_kaisa) < 75 * 60
    assert all(a.estimate_s < b.estimate_s for a, b in zip(found[:14], beside_kaisa[:14], strict=True))
    assert beside_kaisa[14:] == unseen, "predictions need nothing of it"


def test_the_rest_takes_as_long_as_the_estimates_were_wrong():
    pace = command.Pace([10.0, 20.0, 30.0])
    assert pace.left_s == 60.0
    pace.took(20.0)  # twice the estimate
    assert pace.left_s == 100.0
    pace.took(25.0)
    assert pace.left_s == pytest.approx(30 * 45 / 30)
    pace.took(1.0)
    assert pace.left_s == 0.0
    assert (command.minutes(80), command.minutes(150)) == ("80 s", "2 min")


def test_a_kept_part_counts_for_its_setting_and_code_only(tmp_path):
    store, part = Store(tmp_path / "speed"), Part("tiny", 2, UNLIMITED, FEW)
    assert store.load(part, "code")[1] == "not measured yet"
    store.save(part, {"key": part.key(), "code": {"digest": "code"}, "seconds": 1 / 3})
    result, why = store.load(part, "code")
    assert result["seconds"] == 0.3333333
    assert why == "measured already"
    for other in (replace(part, rounds=9), replace(part, variants=FEW[1:]), replace(part, kaisa={"commit": "abc"})):
        assert other.name == part.name
        assert store.load(other, "code") == (None, "measured with another setting")
    assert store.load(part, "new") == (None, "the code has changed since it was measured (from code to new)")
    assert store.load(replace(part, workers=4), "code")[1] == "not measured yet"
    store.path(part).write_text("{")
    assert store.load(part, "code")[1].endswith("is no result")


def test_a_switch_of_a_variant_belongs_to_the_setting(tmp_path, monkeypatch):
    store, part = Store(tmp_path), Part("tiny", 2, UNLIMITED, FEW)
    store.save(part, {"key": part.key(), "code": {"digest": "code"}})
    monkeypatch.setitem(parts.VARIANTS, PAPER, {"name": "spdkfac", "fusion": "none"})
    assert store.load(part, "code") == (None, "measured with another setting")


def test_the_code_is_what_is_measured(tmp_path, monkeypatch):
    for path in ("kfac/a.py", "benchmarks/speed/worker.py", "benchmarks/speed/report.py", "tests/kfac/b.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    before = code_digest()
    (tmp_path / "tests/kfac/b.py").write_text("2")
    (tmp_path / "benchmarks/speed/report.py").write_text("2")
    assert code_digest() == before
    (tmp_path / "kfac/a.py").write_text("2")
    assert code_digest() != before


def test_only_what_is_missing_is_measured(tmp_path, monkeypatch):
    measured, said = [], []

    def measure(part, network, kaisa, pictures, say):
        measured.append(part.name)
        if part.workers == 3:
            raise RuntimeError("no luck")
        return {"key": part.key()}

    class Nothing:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "emulated_network", lambda workers: Nothing())
    three = [Part("tiny", workers, UNLIMITED, FEW) for workers in (2, 3, 4)]
    with pytest.raises(RuntimeError, match="no luck"):
        command.run(three, Store(tmp_path), None, tmp_path, said.append)
    assert measured == ["tiny-2-unlimited", "tiny-3-unlimited"]
    command.run([three[0], three[2]], Store(tmp_path), None, tmp_path, said.append)
    assert measured[2:] == ["tiny-4-unlimited"]  # the first was kept
    assert "tiny-2-unlimited: measured already" in said
    monkeypatch.setattr(command, "code_digest", lambda: "new")
    command.run(three[:1], Store(tmp_path), None, tmp_path, said.append)
    assert measured[3:] == ["tiny-2-unlimited"]
    assert any("the code has changed since" in line for line in said)


# ---------------------------------------------------------------------- measuring


def test_the_rate_gives_the_ratio():
    # 1 MB in half a second of computing at ratio 0.8: 0.4 s for 8 Mbit are 20 Mbit/s.
    assert rate_for(1e6, 0.5, 0.8) == pytest.approx(20.0)
    busy = {**NOTHING, "FF": 1.0, "BP": 2.0, "FactorComp": 1.0, "FactorComm": 1.5, "GradComm": 0.5, "InverseComm": 9.0}
    assert channel_ratio({**busy, "InverseComp": 9.0}) == 0.5


def test_everyone_begins_a_round():
    assert [rotated(list("abc"), number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_summaries_are_medians_and_keep_every_round():
    turns = [{"seconds": s, "sent_bytes": b, "busy_s": {"FF": s}} for s, b in ((3.0, 1), (1.0, 5), (2.0, 3))]
    assert summary(turns) == {"seconds": [3.0, 1.0, 2.0], "sent_bytes": 3, "busy_s": {"FF": 2.0}}


def test_strategies_of_kaisa():
    two, four = strategies(2), strategies(4)
    assert [options["grad_worker_fraction"] for options in two.values()] == [1.0] * 4 + [0.5] * 4
    assert {options["grad_worker_fraction"] for options in four.values()} == {1.0, 0.5, 0.25}
    for switch in ("symmetry_aware", "allreduce_bucket_cap_mb"):
        assert sum(bool(options[switch]) for options in four.values()) == 6


# ---------------------------------------------------------------------- the command


def test_users_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KAISA", str(tmp_path))
    assert program.main(["speed", "--quick"]) == 1
    assert "no checkout of kfac-pytorch" in capsys.readouterr().err
    monkeypatch.delenv("KAISA")
    assert program.main(["speed", "--workloads", "nothing"]) == 1
    assert "no such workload(s): nothing" in capsys.readouterr().err
    assert program.main(["speed", "--links", "unlimited,fast"]) == 1
    assert "no such link(s): fast; choose from: ResNet-50, ResNet-152, DenseNet-201" in capsys.readouterr().err
    setting = command.Setting(("resnet20", "vit"), (2, 4), links=("DenseNet-201",))
    assert [part.name for part in setting.parts] == [
        f"{name}-{workers}-DenseNet-201" for workers in (2, 4) for name in ("resnet20", "vit")
    ]
    assert program.main(["speed", "--workers", "1"]) == 1
    assert "at least 2" in capsys.readouterr().err


FAKE_KAISA = """
class KFACPreconditioner:
    def __init__(self, model, **options):
        import sys
        assert "kfac.config" not in sys.modules  # this project's
        assert options["compute_method"] == "inverse"
        self._layers = {m: (n, None) for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv2d")}

    def step(self):
        pass
"""


@pytest.mark.netns
def test_quick_run_beside_a_stand_in_for_kaisa(tmp_path, monkeypatch, capsys):
    package = tmp_path / "checkout" / "kfac"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "preconditioner.py").write_text(FAKE_KAISA)
    monkeypatch.setenv("KAISA", str(package.parent))
    output = tmp_path / "speed"
    assert program.main(["speed", "--quick", "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "tiny-2-ResNet-50: not measured yet, will take about" in printed.err
    found = json.loads((output / "tiny-2-ResNet-50.json").read_text())
    assert list(found["variants"]) == [*FEW, KAISA]
    assert all(len(value["seconds"]) == 2 for value in found["variants"].values())
    for name in FEW:
        value = found["variants"][name]
        assert sum(value["exposed_s"].values()) == pytest.approx(value["recorded_s"], rel=0.3)  # medians of two
        assert (output / "tiny-2-ResNet-50" / f"{name}.png").is_file()
        drawn = Timeline.from_chrome_trace(output / "tiny-2-ResNet-50" / f"{name}.trace.json")
        assert (drawn.ranks, drawn.source) == ((0, 1), "measured")
    elements = 68_000 + 272_474  # order of magnitude of packed triangles and gradients
    assert found["variants"][BASELINE]["sent_bytes"] > 4 * elements
    assert found["variants"]["sgd"]["sent_bytes"] < found["variants"][BASELINE]["sent_bytes"]
    assert set(found["kaisa"]["tried_s"]) == set(strategies(2))
    assert "auto / D-KFAC" in printed.out
    assert program.main(["speed", "--quick", "--output", str(output)]) == 0
    again = capsys.readouterr()
    assert "tiny-2-ResNet-50: measured already" in again.err
    assert again.out == printed.out
