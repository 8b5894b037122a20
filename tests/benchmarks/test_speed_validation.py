"""Predictions of the speed benchmark's results: results that the simulator itself made must be found again."""

import copy
import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pages import into_page
from benchmarks.speed import command
from benchmarks.speed.parts import ROOT
from benchmarks.speed.twins import same_plans, spreads
from benchmarks.speed.validation import (
    COMPONENTS,
    FITTED,
    LINK,
    Prediction,
    along_the_ring,
    calibrate,
    configurations,
    predictions,
)
from benchmarks.speed.validation_report import Ratio, paper_ratios, quality, report, scatter
from benchmarks.speed.variants import VARIANTS
from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, Plan, PolynomialCost
from kfac.planning.profiles import NO_INTERFERENCE, DisturbedCluster, Interference
from kfac.schedules import make_plan
from kfac.simulation import simulate
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE

NAMES = ("sgd", "dkfac", *FITTED, "optimal_fusion", "pipelined_round_robin", "early_inversion")
TRUTH = Interference(slowdown=0.3, message_s=0.7e-3, element_s=2e-8, wait_s=5e-3)
OF_FOUR = Interference(slowdown=0.3, message_s=2.1e-3, element_s=3e-8, wait_s=5e-3)  # 6 steps for 2, 3/2 of the bytes


def model(slower=1.0):
    layers = tuple(
        LayerProfile(
            name=f"layer{k}",
            a_dim=50 + 30 * k,
            g_dim=40 + 10 * k,
            gradient_elements=(50 + 30 * k) * (40 + 10 * k),
            forward_s=2e-3 * slower,
            backward_s=3e-3 * slower,
            a_statistics_s=2e-3 * slower,
            g_statistics_s=1e-3 * slower,
            precondition_s=0.2e-3 * slower,
        )
        for k in range(8)
    )
    return ModelProfile(name="toy", layers=layers, loss_s=0.5e-3 * slower, update_s=1e-3 * slower)


def result(workload="resnet20", link=LINK, workers=2, slower=1.0, beta=1.5e-7, truth=TRUTH, names=NAMES):
    """What a machine that is as ``truth`` says would measure."""
    cost = LinearCost(1e-3, beta)
    inverse = PolynomialCost((1e-4 * slower, 0.0, 5e-3 * slower), unit_dim=1000.0)
    cluster = ClusterProfile(world_size=workers, all_reduce=cost, reduce=cost, broadcast=cost, inverse=inverse)
    plans, variants = {}, {}
    for name in names:
        plan = make_plan(VARIANTS[name], model(), cluster)
        wait_s = truth.wait_s * slower if plan.schedule.curvature else 0.0
        there = DisturbedCluster.disturbed(cluster, replace(truth, wait_s=wait_s))
        timeline = simulate(plan, model(slower), there)
        plans[name] = plan.to_dict()
        variants[name] = {
            "seconds": [timeline.iteration_s * f for f in (0.99, 1.0, 1.01)],
            "exposed_s": timeline.breakdown_s(),
            "busy_s": timeline.busy_s(),
        }
    return {
        "key": {"workload": workload, "workers": workers, "link": link},
        "machine": {"cpus": 2},
        "model_profile": model().to_dict(),
        "cluster_profile": cluster.to_dict(),
        "plans": plans,
        "variants": variants,
    }


def test_what_the_simulator_made_is_found_again_on_other_links_and_at_other_speeds():
    results = [result(), result(link="unlimited", beta=2e-8), result(link="ResNet-152", slower=1.3, beta=4e-7)]
    fitted = calibrate(results).interference
    assert fitted.slowdown == pytest.approx(TRUTH.slowdown, abs=0.02)
    assert fitted.message_s == pytest.approx(TRUTH.message_s, rel=0.1)
    assert fitted.element_s == pytest.approx(TRUTH.element_s, rel=0.1)
    found = predictions(results)
    used = {link: {one.variant for one in found if one.calibrated and one.link == link} for link in (LINK, "unlimited")}
    # On such links nothing is fused: one of the fitted plans has another name, and is no prediction either.
    assert used == {LINK: {"sgd", "dkfac", *FITTED}, "unlimited": {"sgd", *FITTED, "optimal_fusion"}}
    assert {one.variant for one in found if one.calibrated and one.link == "ResNet-152"} == {"sgd"}
    q = quality(found)
    assert q.count == 3 * len(NAMES) - 5 - 5 - 1
    assert q.high < 0.01
    assert q.simple["without interference"] > 0.03
    assert q.pairs[2][0] == q.pairs[2][1] > 15
    assert all(error < 0.03 for error, _, _ in q.components.values())
    assert "goal 3.0%: met" in report(results)


def test_more_workers_pay_for_every_step_of_the_ring():
    results = [result(), result(link="unlimited", beta=2e-8), result(link="unlimited", workers=4, truth=OF_FOUR)]
    assert max(abs(one.error) for one in predictions(results) if one.workers == 4) < 0.01
    results[-1] = result(link="unlimited", workers=4)  # a machine on which they do not
    assert max(abs(one.error) for one in predictions(results) if one.workers == 4) > 0.03
    assert along_the_ring(TRUTH, 2) == TRUTH
    assert along_the_ring(TRUTH, 4).message_s == pytest.approx(OF_FOUR.message_s)
    assert along_the_ring(TRUTH, 4).element_s == pytest.approx(OF_FOUR.element_s)


def test_a_new_model_has_no_say_in_what_predicts_it():
    known = [result(), result(link="unlimited", beta=2e-8)]
    late = [result("vit"), result("vit", link="DenseNet-201", beta=3e-7), result(link="DenseNet-201", beta=3e-7)]
    assert calibrate([*known, *late]).interference == calibrate(known).interference
    found = [one for one in predictions([*known, *late]) if one.workload == "vit" or one.link == "DenseNet-201"]
    assert {(one.workload, one.link, one.variant) for one in found if one.calibrated} == {
        ("vit", LINK, "sgd"),
        ("vit", LINK, "dkfac"),
        ("vit", "DenseNet-201", "sgd"),
        ("resnet20", "DenseNet-201", "sgd"),
    }
    assert max(abs(one.error) for one in found) < 0.01
    page = report([*known, *late])
    blocks = [line for line in page.splitlines() if "configurations that nothing was calibrated on" in line]
    assert [line[:40] for line in blocks] == [
        "On two workers, with a core each: 6 conf",
        "Measured after the simulator's form was ",
    ]
    assert f"{len(found) - 4} configurations" in blocks[1]


def test_a_machine_that_changes_its_ways_is_not_predicted():
    other = Interference(slowdown=0.9, message_s=2e-3, wait_s=5e-3)
    results = [result(), result(link="ResNet-152", truth=other)]
    q = quality(predictions(results))
    assert q.high > 0.06
    assert "**not met**" in report(results)


def test_another_batch_takes_the_profile_and_a_model_with_few_variants_fits_with_the_others():
    few = ("sgd", "dkfac", "mpdkfac", "spdkfac")
    results = [result(), result("resnet20_b16", slower=0.5), result("resnet18", names=few)]
    calibration = calibrate(results)
    assert set(calibration.models) == {"resnet20", "resnet18"}
    found = predictions(results)
    of_18 = {one.variant: one for one in found if one.workload == "resnet18"}
    assert of_18["dkfac"].calibrated
    assert of_18["spdkfac"].calibrated
    assert not of_18["mpdkfac"].calibrated
    assert abs(of_18["spdkfac"].error) < 0.01
    assert not any(one.calibrated for one in found if one.workload == "resnet20_b16" and one.variant != "sgd")
    # Inversions and what no span explains do not shrink with the batch here, and did in this "measurement".
    assert max(abs(one.error) for one in found if one.workload == "resnet20_b16") < 0.12


def test_without_the_parts_that_calibrate_there_is_nothing(tmp_path):
    results = [result(link="unlimited")]
    assert predictions(results) == []
    assert predictions([]) == []
    assert report(results) == "Not measured."
    with pytest.raises(ValueError, match="left to predict"):
        quality([])


def test_the_picture_is_drawn(tmp_path):
    scatter(predictions([result(), result(link="unlimited")]), tmp_path / "images" / "validation.png")
    assert (tmp_path / "images" / "validation.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """Pages of a folder of their own, without results."""
    folder = tmp_path / "docs"
    (folder / "images").mkdir(parents=True)
    for name in ("speed.md", "validation.md"):
        (folder / name).write_text("# Title\n\n<!-- measured: begin -->\nformer text\n<!-- measured: end -->\n\nEnd.\n")
    monkeypatch.setattr(command, "DOCS", folder)
    return folder


def test_the_docs_are_written_from_stored_results(docs, tmp_path, monkeypatch):
    """What a page says beside its results stays."""
    output = tmp_path / "output"
    monkeypatch.setattr(command, "report", lambda results: f"{len(results)} parts")
    setting = command.Setting(("resnet20",), (2,))
    store = command.Store(output)
    for part, beta in zip(setting.parts[:2], (1.5e-7, 2e-7), strict=True):
        store.path(part).parent.mkdir(parents=True, exist_ok=True)
        store.path(part).write_text(json.dumps(result(link=part.link, beta=beta)))
    assert command.main(setting, output, docs=True, measuring=False) == "2 parts"
    assert (docs / "speed.md").read_text().split("\n\n") == [
        "# Title",
        "<!-- measured: begin -->",
        "2 parts",
        "<!-- measured: end -->",
        "End.\n",
    ]
    page = (docs / "validation.md").read_text()
    assert page.startswith("# Title")
    assert "SPD-KFAC, optimal fusion" in page
    assert "former text" not in page
    copy = published(docs)
    assert [one["key"]["link"] for one in copy] == ["ResNet-50", "ResNet-152"]
    assert copy == [json.loads(store.path(part).read_text()) for part in setting.parts[:2]], "plans and profiles, too"
    assert (docs / "images" / "validation.png").is_file()


def published(docs):
    return json.loads(gzip.decompress((docs / "speed.json.gz").read_bytes()))


def test_docs_keep_parts_that_were_measured_elsewhere(docs, tmp_path, monkeypatch):
    """In a clone the docs' results are all there is: the pages are made from them, and new parts take their places."""
    output = tmp_path / "output"
    monkeypatch.setattr(
        command, "report", lambda results: " ".join(f"{one['key']['link']}:{one['n']}" for one in results)
    )
    setting = command.Setting(("resnet20",), (2,))
    store, (first, second, third, _) = command.Store(output), setting.parts

    def report(**options):
        return command.main(options.pop("setting", setting), output, measuring=False, **options)

    with pytest.raises(
        ValueError, match=f"nothing to report: neither {output} nor .*speed.json.gz has .* resnet20-2-Res"
    ):
        report(docs=True)
    assert "former text" in (docs / "speed.md").read_text()
    there = [json.loads(json.dumps({**result(link=part.link), "n": 1})) for part in (first, second)]
    (docs / "speed.json.gz").write_bytes(gzip.compress(json.dumps(there).encode()))
    assert report() == report(docs=True) == "ResNet-50:1 ResNet-152:1"
    assert published(docs) == there
    output.mkdir()
    for part in (first, third):
        store.path(part).write_text(json.dumps({**result(link=part.link), "n": 2}))
    assert report(docs=True) == "ResNet-50:2 ResNet-152:1 unlimited:2"
    assert [one["n"] for one in published(docs)] == [2, 1, 2]
    gpt = command.Setting(("gpt",), (2,))
    assert report(setting=gpt, docs=True) == "ResNet-50:2 ResNet-152:1 unlimited:2", "the pages hold all there is"
    with pytest.raises(ValueError, match="nothing to report"):
        report(setting=gpt)
    for name, damage in (("docs/speed.json.gz", b"\x1f\x8bgone"), (f"output/{first.name}.json", b"{}")):
        path = tmp_path / name
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=f"{path.name} holds no results"):
            report(docs=True)
        path.unlink()


def test_the_page_holds_what_was_measured():
    """Whoever has a clone can redo every prediction: from the plans and profiles that stand beside the page."""
    page = (ROOT / "docs" / "validation.md").read_text()
    measured = published(ROOT / "docs")
    assert into_page(page, report(measured)) == page
    measured[0]["variants"]["mpdkfac"]["seconds"] = [1.0]
    assert into_page(page, report(measured)) != page


def prediction(measured_s, predicted_s, variant="a", noise=0.01, part=("resnet20", 2, "unlimited"), **other):
    return Prediction(
        *part,
        variant,
        measured_s=measured_s,
        noise=noise,
        predicted_s=predicted_s,
        ideal_s=other.get("ideal_s", predicted_s),
        parts_s=other.get("parts_s", predicted_s),
        overlap_s=other.get("overlap_s", predicted_s),
        components=dict.fromkeys(COMPONENTS, (0.0, 0.0)) | other.get("components", {}),
        calibrated=other.get("calibrated", False),
    )


def test_quality_by_hand():
    found = [
        prediction(1.00, 0.98, "a", components={"passes": (0.5, 0.6), "inversions": (0.04, 1.0)}, parts_s=1.5),
        prediction(1.05, 1.05, "b", components={"passes": (0.5, 0.5)}, overlap_s=0.5),
        prediction(1.10, 1.04, "c", components={"passes": (0.5, 0.9)}, ideal_s=0.55),
        prediction(2.00, 1.80, "sgd", calibrated=True),
    ]
    q = quality(found)
    assert (q.count, q.bias, q.median) == (3, pytest.approx(-0.02), pytest.approx(0.02))
    assert q.halves is None
    again = [
        replace(one, rounds_s=rounds)
        for one, rounds in zip(found, ((1, 2, 3), (2, 1, 2), (9, 3, 9), (1,)), strict=True)
    ]
    # Medians 2, 2, 9 against 2, 1, 3: two pairs agree, one is even in the first half.
    assert quality(again).halves == pytest.approx((2 / 6**0.5, 2 / 6**0.5))
    assert q.with_sgd == pytest.approx((0.02 + 0.06 / 1.1) / 2)
    assert q.simple == pytest.approx(
        {"without interference": 0.02, "nothing overlaps": 0.06 / 1.1, "everything overlaps": 0.06 / 1.1}
    )
    assert q.components["passes"] == pytest.approx((0.2, np.percentile([0.2, 0.0, 0.8], 95), 3))
    assert q.components["inversions"] == (0.0, 0.0, 0), "below a twentieth of the iteration it is not compared"
    # a-b differ by 0.05 and noise sums to 0.0205, b-c by 0.05 of 0.0215, a-c by 0.1 of 0.021: 2, 2 and 4 times.
    assert q.pairs == {2: (2, 3), 1: (2, 3), 0: (2, 3)}, "b and c are in the wrong order"
    assert quality([replace(one, noise=0.013) for one in found]).pairs == {2: (1, 1), 1: (2, 3), 0: (2, 3)}
    assert quality([replace(one, noise=0.05) for one in found]).pairs == {2: (0, 0), 1: (0, 0), 0: (2, 3)}


def test_one_plan_by_two_names_is_one_configuration():
    """Named otherwise, planned otherwise, but the same work: further rounds of one configuration, and its noise."""
    one = result()
    both = copy.deepcopy(one)
    twin = copy.deepcopy(both["plans"]["early_inversion"])
    twin["schedule"] |= {"placement": "seq_dist", "fusion": "none", "lbp_rule": 1400}
    both["plans"]["optimized"] = twin
    both["variants"]["optimized"] = copy.deepcopy(both["variants"]["early_inversion"])
    slower = [1.2 * s for s in both["variants"]["early_inversion"]["seconds"]]
    both["variants"]["optimized"]["seconds"] = slower
    assert same_plans(one) == []
    assert same_plans(both) == [("early_inversion", "optimized")]
    assert spreads([one, both]) == pytest.approx([0.2])
    found = predictions([both])
    merged = configurations(found)
    assert len(merged) == len(found) - 1 == len(NAMES)
    (pooled,) = (p for p in merged if p.variant == "early_inversion")
    every = sorted(s for name in ("early_inversion", "optimized") for s in both["variants"][name]["seconds"])
    assert pooled.measured_s == pytest.approx((every[2] + every[3]) / 2)
    assert sorted(pooled.rounds_s) == every
    assert pooled.noise > 5 * max(p.noise for p in found)
    assert quality(found).count == quality(predictions([one])).count
    page = report([both])
    assert "1 pairs of variants are one plan by two names" in page
    assert "SPD-KFAC, optimized placement (the plan of: optimal, optimized, inversions as soon as sums arrive)" in page
    # What is done differently is no twin, whatever it is called.
    for other in ({"inverse_broadcast": "after_all"}, {"message_dtype": "bfloat16"}, {"inverse_start": "after_all"}):
        both["plans"]["optimized"]["schedule"] = {**twin["schedule"], **other}
        assert same_plans(both) == []
    # Nor is anything predicted of a plan that was fitted.
    both["plans"]["optimized"] = copy.deepcopy(both["plans"]["spdkfac"])
    assert [p.calibrated for p in predictions([both]) if p.variant == "optimized"] == [True]


def test_the_papers_ratio_takes_all_measurements_of_both_plans():
    results = [result(), result(link="unlimited", beta=2e-8)]
    twin = copy.deepcopy(results[1])
    twin["plans"]["lbp_after_backward"] = copy.deepcopy(twin["plans"]["dkfac"])
    seconds = twin["variants"]["dkfac"]["seconds"]
    twin["variants"]["lbp_after_backward"] = {**twin["variants"]["dkfac"], "seconds": [0.5 * s for s in seconds]}
    before, after = (paper_ratios(some, predictions(some))[0] for some in (results, [results[0], twin]))
    assert after.measured == pytest.approx(before.measured / 0.75)
    assert after.predicted == before.predicted


def test_simple_predictions_by_hand():
    """Of one schedule that overlaps nothing and one whose messages are all beside the passes."""
    results = [result()]
    calibration = calibrate(results)
    model, alone = calibration.models["resnet20"], replace(NO_INTERFERENCE, wait_s=calibration.waits_s["resnet20"])
    for one in predictions(results):
        timeline = simulate(
            Plan.from_dict(results[0]["plans"][one.variant]),
            model,
            DisturbedCluster.disturbed(
                replace(
                    ClusterProfile.from_dict(results[0]["cluster_profile"]), inverse=calibration.inverses["resnet20"]
                ),
                alone if one.variant != "sgd" else NO_INTERFERENCE,
            ),
        )
        fixed_s = model.update_s + (alone.wait_s if one.variant != "sgd" else 0)
        lanes = {lane: [s for s in timeline.spans if s.lane == lane] for lane in (COMPUTE_LANE, COMMUNICATION_LANE)}
        count = len(timeline.ranks)
        computing_s, messages_s = (sum(s.duration_s for s in spans) / count for spans in lanes.values())
        assert one.parts_s == pytest.approx(computing_s + messages_s + fixed_s)
        assert one.overlap_s == pytest.approx(max(computing_s, messages_s) + fixed_s)
        assert one.overlap_s - 1e-9 <= one.ideal_s


def test_the_papers_ratio_is_judged_by_parts_that_did_not_calibrate():
    results = [result(), result(link="unlimited", beta=2e-8), result(link="ResNet-152", beta=4e-7)]
    found = predictions(results)
    rows = paper_ratios(results, found)
    assert [row.part[2] for row in rows] == ["unlimited", "ResNet-152"]
    seconds = {one.variant: one for one in found if one.link == "unlimited"}
    assert rows[0].predicted == seconds["spdkfac"].predicted_s / seconds["dkfac"].predicted_s
    assert rows[0].measured == pytest.approx(seconds["spdkfac"].measured_s / seconds["dkfac"].measured_s)
    assert "2 of 2 are within 0.03 of what was measured (goal all: met)" in report(results)
    off = Ratio(rows[0].part, low=0.9, measured=0.95, high=0.99, predicted=1.02)
    assert off.wrong
    assert off.off == pytest.approx(0.07)
    assert not replace(off, high=1.01).wrong, "noise decides"
    assert not replace(off, predicted=0.7).wrong
    assert replace(off, low=1.05, measured=1.1, high=1.2, predicted=0.99).wrong
