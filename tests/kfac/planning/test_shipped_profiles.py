"""Shipped profiles load, know where their numbers came from, and estimates scale as products of matrices do."""

import json
from dataclasses import replace
from importlib import resources

import pytest

from kfac.planning import ClusterProfile, LayerProfile
from kfac.planning.shipped_profiles import (
    ESTIMATE_FLOP_PER_S,
    ESTIMATE_ROWS,
    estimate_model_profile,
    load_shipped_cluster,
    load_shipped_model,
    shipped_names,
)


def test_every_shipped_profile_loads_and_states_its_provenance():
    assert "default" in shipped_names("cluster")
    for name in shipped_names("cluster"):
        profile = load_shipped_cluster(name)
        assert profile.provenance["kind"] in ("measured", "derived", "estimated")
        assert ClusterProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    for name in shipped_names("model"):
        assert load_shipped_model(name).provenance["kind"] in ("measured", "derived", "estimated")


def test_the_default_says_that_it_is_a_guess():
    """A link of 10 Gbit/s carries a 32-bit element in 3.2 ns; a ring all-reduce carries each twice."""
    profile = load_shipped_cluster()
    assert profile.provenance["kind"] == "estimated"
    assert profile.broadcast(1e6) == pytest.approx(1e-4 + 1e6 * 32 / 10e9)
    assert profile.all_reduce(1e6) == pytest.approx(1e-4 + 2e6 * 32 / 10e9)
    assert profile.inverse(2000) == pytest.approx(1e-4 + 2000**3 / 0.5e12)


def test_the_files_are_found_inside_the_package():
    files = {f.name for f in (resources.files("kfac.planning") / "shipped").iterdir()}
    assert {f"{name}.json" for name in shipped_names("cluster")} <= files


@pytest.mark.parametrize("load", [load_shipped_cluster, load_shipped_model])
def test_unknown_names_list_the_choices(load):
    with pytest.raises(ValueError, match=r"no shipped \w+ profile 'none-such'; choices: .+"):
        load("none-such")
    with pytest.raises(ValueError, match="cluster, model"):
        shipped_names("network")


def test_estimates_follow_the_dimensions():
    sizes = [("a", 10, 4, 40), ("wide", 20, 4, 80), ("norm", 0, 0, 8)]
    layers = [LayerProfile(name=n, a_dim=a, g_dim=g, gradient_elements=e) for n, a, g, e in sizes]
    layers.append(replace(layers[0], name="grouped", a_blocks=3, g_blocks=3))
    profile = estimate_model_profile("m", layers)
    narrow, wide, norm, grouped = profile.layers
    unit = 2 * ESTIMATE_ROWS / ESTIMATE_FLOP_PER_S
    assert narrow.a_statistics_s == pytest.approx(unit * 100)
    assert narrow.g_statistics_s == pytest.approx(unit * 16)
    assert narrow.forward_s == pytest.approx(unit * 40)
    assert narrow.backward_s == pytest.approx(2 * narrow.forward_s)
    assert wide.a_statistics_s == pytest.approx(4 * narrow.a_statistics_s)
    assert grouped.a_statistics_s == pytest.approx(3 * narrow.a_statistics_s)
    assert (norm.a_statistics_s, norm.precondition_s) == (0, 0)
    assert norm.forward_s > 0
    assert profile.provenance["kind"] == "estimated"
