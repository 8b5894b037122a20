from itertools import accumulate

import pytest

from paper_figures import published

TOLERANCE_S = 1.01e-4  # the bars are given to 1e-4 s; sums of rounded parts may differ by one of those

OF_OTHER_RUNS = {
    "resnet152": {("Naive", "FactorComm"): -0.008},
    "densenet201": {("Naive", "FactorComp"): -0.007, ("Naive", "FactorComm"): 0.056},
    "inceptionv4": {("SP w/ OTF", "FactorComp"): 0.026, ("SP w/ OTF", "FactorComm"): -0.025},
}
"""Where the pipelining figure differs from the breakdown figure, relatively: these bars are of other runs."""


@pytest.fixture(params=published.model_keys())
def key(request):
    return request.param


def packed(dims):
    return sum(d * (d + 1) // 2 for d in dims)


def test_element_counts_are_those_of_the_dimensions(key):
    model = published.model(key)
    assert (packed(model.a_dims), packed(model.g_dims)) == (model.a_elements, model.g_elements)
    assert len(model.a_dims) == len(model.g_dims) == published.load()["models"][key]["layers"]


def test_resnet50_counts_are_those_a_third_party_quotes_from_the_paper():
    model = published.model("resnet50")
    assert (round(model.a_elements / 1e6, 1), round(model.g_elements / 1e6, 1)) == (62.3, 14.6)


@pytest.mark.parametrize("algorithm", published.ALGORITHMS)
def test_bars_are_sums_of_their_parts_and_end_at_the_iteration_time(key, algorithm):
    cumulative_s = published.load()["breakdown"][key][algorithm]["cumulative_s"]
    parts_s = [float(s) for s in published.breakdown_s(key, algorithm).values()]
    assert list(accumulate(parts_s)) == pytest.approx(cumulative_s, abs=TOLERANCE_S)
    assert cumulative_s[-1] == float(published.iteration_s(key, algorithm))


def test_speedups_are_the_abstracts_ten_to_thirtyfive_percent(key):
    d, mpd, spd = (float(published.iteration_s(key, a)) for a in published.ALGORITHMS)
    entry = published.load()["iteration_time"][key]
    assert d / spd == pytest.approx(entry["speedup_over_D-KFAC"], abs=5e-5)
    assert mpd / spd == pytest.approx(entry["speedup_over_MPD-KFAC"], abs=5e-5)
    assert 1.095 <= d / spd <= 1.355


def test_the_middle_ablation_bars_are_sums_not_measurements(key):
    data = published.load()
    d, spd = (data["breakdown"][key][a]["cumulative_s"] for a in ("D-KFAC", "SPD-KFAC"))
    bars_s = data["ablation"][key]["iteration_s"]
    assert bars_s["-Pipe-LBP"] == d[-1]
    assert bars_s["+Pipe+LBP"] == spd[-1]
    assert bars_s["+Pipe-LBP"] == pytest.approx(d[-1] - (d[3] - spd[3]), abs=TOLERANCE_S)
    assert bars_s["-Pipe+LBP"] == pytest.approx(d[3] + data["inverse"][key]["LBP"]["total_s"], abs=TOLERANCE_S)


def test_inverse_and_pipelining_totals_are_sums(key):
    data = published.load()
    for placement in ("Non-Dist", "Seq-Dist", "LBP"):
        parts_s = published.inverse_s(key, placement)
        total_s = data["inverse"][key][placement]["total_s"]
        assert sum(float(s) for s in parts_s.values()) == pytest.approx(total_s, abs=TOLERANCE_S)
    bars = data["pipelining"][key]
    for name, total_s in bars["total_s"].items():
        assert bars["FactorComp_s"] + bars["exposed_FactorComm_s"][name] == pytest.approx(total_s, abs=TOLERANCE_S)


def test_figures_that_show_the_same_part_agree(key):
    """The pipelining, inverse and breakdown figures show the same parts, most of them of the same runs."""
    d, mpd, spd = (published.breakdown_s(key, algorithm) for algorithm in published.ALGORITHMS)
    pipelining = published.pipelining_s(key, "Naive"), published.pipelining_s(key, "SP w/ OTF")
    inverse = [published.inverse_s(key, placement) for placement in ("Non-Dist", "Seq-Dist", "LBP")]
    differing = {}
    for name, parts, whole in zip(
        ("Naive", "SP w/ OTF", "Non-Dist", "Seq-Dist", "LBP"),
        (*pipelining, *inverse),
        (d, spd, d, mpd, spd),
        strict=True,
    ):
        assert parts
        for kind, number in parts.items():
            if float(number) != pytest.approx(float(whole[kind]), abs=TOLERANCE_S):
                differing[name, kind] = round(float(number) / float(whole[kind]) - 1, 3)
    assert differing == OF_OTHER_RUNS.get(key, {})


def test_whole_matrices_and_extreme_factors_follow_from_the_dimensions(key):
    model, entry = published.model(key), published.load()["models"][key]
    for side, dims in (("a", model.a_dims), ("g", model.g_dims)):
        assert entry[f"{side}_elements_full"] == sum(d * d for d in dims)
    each = [packed([d]) for d in model.a_dims + model.g_dims]
    assert (entry["min_packed_elements"], entry["max_packed_elements"]) == (min(each), max(each))


def test_motivation_totals_are_sums():
    bars = published.load()["motivation"]
    for name, parts_s in bars["exposed_s"].items():
        assert sum(parts_s.values()) == pytest.approx(bars["total_s"][name], abs=TOLERANCE_S)


def test_lbp_counts_follow_from_the_threshold(key):
    model = published.model(key)
    for threshold, counts in published.load()["lbp"]["counts_by_threshold"][key].items():
        sent = [d for d in model.a_dims + model.g_dims if d >= int(threshold)]
        assert counts["broadcast"] == len(sent)
        assert counts["broadcast_packed_elements"] == packed(sent)
        assert counts["on_every_rank"] == 2 * len(model.a_dims) - len(sent)


def test_every_entry_with_a_status_has_a_known_one_and_a_source():
    statuses = published.load()["status"]

    def entries(node):
        if isinstance(node, dict):
            if "status" in node:
                yield node
            for child in node.values():
                yield from entries(child)

    found = [e for section, node in published.load().items() if section != "status" for e in entries(node)]
    assert len(found) > 30
    for entry in found:
        assert entry["status"] in statuses
        assert any(k.startswith("source") and entry[k] for k in entry)
        assert entry["confidence"]


def test_recollection_is_marked_and_cannot_be_read():
    assert published.load()["cost_models"]["broadcast_figure"]["status"] == "recollection"
    with pytest.raises(ValueError, match="recollection"):
        published.linear_cost("broadcast_figure")
    assert published.linear_cost("all_reduce_final_runs").alpha_s == 9.29e-4


def test_unknown_names_are_errors_that_name_the_choices():
    with pytest.raises(ValueError, match="resnet50, resnet152"):
        published.model("resnet51")
    with pytest.raises(ValueError, match="SPD-KFAC"):
        published.iteration_s("resnet50", "KFAC")
