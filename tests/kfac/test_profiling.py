"""Profiles: times attributed to layers from a hand-made timeline, cost fits, and a real profile of two ranks."""

from __future__ import annotations

import pytest

from kfac import KFACConfig
from kfac.communication import LocalCommunicator, get_communicator
from kfac.planning import ClusterProfile, LayerProfile
from kfac.profiling import fit_cost, model_profile_from, profile_cluster, quartiles
from kfac.solutions import _Cholesky
from kfac.timeline import Span, Timeline
from tests.kfac.ranks import run_ranks


def timeline_of(steps):
    """A timeline of consecutive (kind, name, seconds) on the compute lane, then 0.5 s of update."""
    spans, now = [], 0.0
    for kind, name, seconds in steps:
        spans.append(Span(0, "compute", kind, name, now, now + seconds))
        now += seconds
    return Timeline(tuple(spans), total_s=now + 0.5)


STEPS = [
    ("FF", "forward", 1.0),
    ("FactorComp", "A conv", 2.0),
    ("FF", "forward", 3.0),
    ("FactorComp", "A fc", 4.0),
    ("FF", "forward", 5.0),
    ("BP", "backward", 6.0),
    ("FactorComp", "G fc", 7.0),
    ("BP", "backward", 8.0),
    ("FactorComp", "G conv", 9.0),
    ("BP", "backward", 10.0),
    ("FactorComp", "running averages", 20.0),
    ("Precondition", "precondition", 3.0),
]
SIZES = [
    LayerProfile(name="fc", a_dim=3, g_dim=1, gradient_elements=3),
    LayerProfile(name="conv", a_dim=3, g_dim=1, gradient_elements=5),
]


def test_seconds_are_attributed_to_the_layer_they_belong_to():
    profile = model_profile_from([timeline_of(STEPS)], SIZES, "toy")
    conv, fc = profile.layers
    assert (conv.name, fc.name) == ("conv", "fc"), "execution order, not registration order"
    assert (conv.forward_s, fc.forward_s) == (1.0, 3.0)
    assert (fc.backward_s, conv.backward_s) == (8.0, 10.0)
    assert profile.loss_s == 5.0 + 6.0
    assert profile.update_s == 0.5
    # 20 s of running averages over 2 * (6 + 1) elements
    assert conv.a_statistics_s == pytest.approx(2.0 + 20 * 6 / 14)
    assert fc.g_statistics_s == pytest.approx(7.0 + 20 * 1 / 14)
    assert conv.precondition_s + fc.precondition_s == pytest.approx(3.0)
    assert (conv.gradient_elements, fc.gradient_elements) == (5, 3)
    fields = ("forward_s", "backward_s", "a_statistics_s", "g_statistics_s", "precondition_s")
    total = sum(getattr(layer, field) for layer in profile.layers for field in fields)
    assert total + profile.loss_s + profile.update_s == pytest.approx(timeline_of(STEPS).iteration_s)


def test_the_median_of_several_iterations_counts():
    slow = [(k, n, s * (10 if n == "A conv" else 1)) for k, n, s in STEPS]
    profile = model_profile_from([timeline_of(STEPS), timeline_of(slow), timeline_of(STEPS)], SIZES, "toy")
    assert profile.layers[0].a_statistics_s == pytest.approx(2.0 + 20 * 6 / 14)


def test_timelines_without_statistics_are_refused():
    with pytest.raises(ValueError, match="record iterations of a K-FAC schedule"):
        model_profile_from([timeline_of(STEPS[:1])], SIZES, "toy")


def test_fit_recovers_the_coefficients_it_was_made_from():
    sizes = [64, 256, 1024, 4096]
    (alpha, beta), error = fit_cost(sizes, [1e-4 + 2e-9 * n for n in sizes], (0, 1))
    assert (alpha, beta) == pytest.approx((1e-4, 2e-9), rel=1e-6)
    assert error < 1e-9
    (alpha, beta), error = fit_cost(sizes, [1e-4 - 1e-9 * n for n in sizes], (0, 1))
    assert beta == 0.0, "coefficients are not negative"
    assert error > 1e-3, "and the error says that the form does not fit"


def test_quartiles_of_repeats():
    assert quartiles([[4.0, 1.0, 2.0, 3.0, 5.0], [7.0]]) == {"q25_s": [2.0, 7.0], "q75_s": [4.0, 7.0]}


def _profile(rank, world_size):
    return profile_cluster(get_communicator(), "cpu", [8, 16, 64], repeats=2).to_dict()


def test_two_ranks_get_one_profile_with_its_points():
    first, second = run_ranks(_profile, 2)
    assert first == second
    profile = ClusterProfile.from_dict(first)
    assert profile.world_size == 2
    for name in ("all_reduce", "reduce", "broadcast"):
        assert getattr(profile, name)(2**22) > 0
        assert len(first["provenance"][name]["seconds"]) == len(first["provenance"][name]["elements"])
    for name in ("all_reduce", "reduce", "broadcast", "inverse"):
        points = first["provenance"][name]
        for low, middle, high in zip(points["q25_s"], points["seconds"], points["q75_s"], strict=True):
            assert 0 < low <= middle <= high
    assert profile.inverse(64) > 0
    assert first["provenance"]["kind"] == "measured"


def test_one_rank_communicates_for_free():
    profile = profile_cluster(LocalCommunicator(), "cpu", [8, 16], repeats=1)
    assert profile.all_reduce(1e9) == 0
    assert profile.inverse(16) > 0


EXACT = {"damping_method": "exact", "inverse_method": "eigh"}


def test_inverses_are_timed_as_the_options_make_them(monkeypatch):
    dims = [200, 300]
    profiles = {}
    for options in ({}, {"inverse_method": "eigh"}, EXACT, {"inverse_interval": 10}):
        profile = profile_cluster(LocalCommunicator(), "cpu", dims, repeats=3, config=KFACConfig(**options))
        said = profile.provenance["inverse"]
        for key, value in options.items():
            assert said[key] == value
        profiles[str(options)] = profile.inverse(300)
    quick, eigh, exact, for_long = profiles.values()
    assert min(eigh, exact) > 2 * max(quick, for_long)  # an eigendecomposition takes ten times as long
    made = []
    begin = _Cholesky.begin
    monkeypatch.setattr(
        "kfac.solutions._Cholesky.begin", lambda self, *rest: made.append("upper") or begin(self, *rest)
    )
    profile_cluster(LocalCommunicator(), "cpu", [300], repeats=1)
    assert made == ["upper"] * 2  # the default inverts in every step: a Cholesky factor serves it better
    profile_cluster(LocalCommunicator(), "cpu", [300], repeats=1, config=KFACConfig(inverse_interval=10))
    assert len(made) == 2
