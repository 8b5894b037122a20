import json
import math

import pytest
from scipy.optimize import minimize

from kfac.planning import ClusterProfile, ExponentialCost, ModelProfile
from paper_figures import paper_cluster, published

KEYS = published.model_keys()


def packed(dim):
    return dim * (dim + 1) // 2


def dims(key):
    model = published.model(key)
    return model.a_dims + model.g_dims


def test_shipped_files_are_exactly_what_the_builder_makes(tmp_path):
    written = paper_cluster.write(tmp_path)
    assert len(written) == 1 + len(KEYS)
    for path in written:
        shipped = paper_cluster.SHIPPED / path.relative_to(tmp_path)
        assert shipped.read_bytes() == path.read_bytes(), f"run python -m paper_figures.paper_cluster: {shipped.name}"


def test_shipped_files_load_to_the_built_values():
    assert ClusterProfile.load(paper_cluster.SHIPPED / "paper64.json") == paper_cluster.cluster_profile()
    for key in KEYS:
        loaded = ModelProfile.load(paper_cluster.SHIPPED / "models" / f"{key}.json")
        assert loaded == paper_cluster.model_profile(key)


@pytest.mark.parametrize("key", KEYS)
def test_layers_reproduce_the_published_counts_exactly(key):
    layers = paper_cluster.model_profile(key).layers
    model = published.model(key)
    assert sum(packed(x.a_dim) for x in layers) == model.a_elements
    assert sum(packed(x.g_dim) for x in layers) == model.g_elements
    assert 2 * len(layers) == published.load()["models"][key]["factor_matrices"]
    assert sum(x.gradient_elements for x in layers) == model.parameters
    assert [(x.a_dim, x.g_dim) for x in layers] == list(zip(model.a_dims, model.g_dims, strict=True))


@pytest.mark.parametrize("key", KEYS)
def test_layers_seconds_add_up_to_the_published_bars(key):
    layers = paper_cluster.model_profile(key).layers
    bars = published.breakdown_s(key, "D-KFAC")
    forward_s, backward_s = math.fsum(x.forward_s for x in layers), math.fsum(x.backward_s for x in layers)
    assert forward_s + backward_s == pytest.approx(float(bars["FF&BP"]), rel=1e-5)
    assert backward_s == pytest.approx(2 * forward_s, rel=1e-5)
    statistics_s = math.fsum(x.a_statistics_s + x.g_statistics_s for x in layers)
    assert statistics_s == pytest.approx(float(bars["FactorComp"]), rel=1e-5)


def test_distribution_of_statistics_agrees_with_the_authors_log_of_the_products():
    layers = paper_cluster.model_profile("resnet50").layers
    a_s, g_s = math.fsum(x.a_statistics_s for x in layers), math.fsum(x.g_statistics_s for x in layers)
    log = published.load()["factor_gemm_resnet50_batch32"]
    assert a_s / (a_s + g_s) == pytest.approx(log["fp32_a_s"] / (log["fp32_a_s"] + log["fp32_g_s"]), abs=0.002)


def test_inverse_fit_reproduces_the_non_dist_totals_and_the_published_exponential_does_not():
    cost, errors = paper_cluster.fit_inverse()
    recorded = published.load()["cost_models"]["inverse_from_non_dist"]["coefficients_s"]
    assert cost.coefficients_s == pytest.approx(recorded, rel=5e-5)
    figure = published.load()["cost_models"]["inverse_figure"]
    exponential = ExponentialCost(figure["alpha_s"], figure["beta_per_dim"])
    ratios = []
    for key in KEYS:
        total_s = float(published.inverse_s(key, "Non-Dist")["InverseComp"])
        assert sum(map(cost, dims(key))) == pytest.approx(total_s, rel=1e-5)
        assert errors[key] == 0.0
        ratios.append(sum(map(exponential, dims(key))) / total_s)
    assert min(ratios) == pytest.approx(2.4, abs=0.05)
    assert max(ratios) == pytest.approx(4.2, abs=0.05)


def test_broadcast_fit_is_the_least_squares_optimum_with_the_stated_error():
    cost, errors = paper_cluster.fit_broadcast()
    recorded = published.load()["cost_models"]["broadcast_from_seq_dist"]
    assert cost.alpha_s == pytest.approx(recorded["alpha_s"], rel=1e-3)
    assert cost.beta_s_per_element == pytest.approx(recorded["beta_s_per_element"], rel=1e-3)
    totals_s = {key: float(published.inverse_s(key, "Seq-Dist")["InverseComm"]) for key in KEYS}

    def squares(unknowns):  # unknowns in units of 1e-4 s and 1e-10 s per element
        alpha_s, beta_s = unknowns[0] * 1e-4, unknowns[1] * 1e-10
        return sum((sum(alpha_s + beta_s * packed(d) for d in dims(k)) - t) ** 2 for k, t in totals_s.items())

    found = minimize(squares, [1.0, 1.0], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-16})
    assert (found.x[0] * 1e-4, found.x[1] * 1e-10) == pytest.approx((cost.alpha_s, cost.beta_s_per_element), rel=1e-3)
    for key, total_s in totals_s.items():
        relative = sum(cost(packed(d)) for d in dims(key)) / total_s - 1
        assert relative == pytest.approx(errors[key], abs=1e-4)
        assert abs(relative) <= 0.15


def test_cluster_says_where_its_numbers_come_from():
    profile = paper_cluster.cluster_profile()
    assert profile.world_size == 64
    assert profile.provenance["kind"] == "derived"
    assert profile.all_reduce(0) == 9.29e-4
    assert profile.all_reduce(1e9) == pytest.approx(9.29e-4 + 1.4335, rel=1e-12)
    sources = json.dumps(profile.provenance)
    for needle in ("kfac/utils.py:330", "time_breakdown.py:299-301", "relative_error"):
        assert needle in sources
    assert "0.0159" not in sources  # the broadcast line that is recollection only
    # A ring's broadcast moves what its reduce moves: two derivations of one slope, from different published numbers.
    assert profile.reduce(1e9) == pytest.approx(profile.broadcast(1e9), rel=0.05)
