"""Profiles: round trips, and mistakes in files that are named with the file and the key."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, PolynomialCost

LINK = LinearCost(1e-3, 1e-9)
MODEL = ModelProfile(
    name="m",
    layers=(
        LayerProfile(name="x", a_dim=3, g_dim=2, gradient_elements=6, forward_s=0.5),
        LayerProfile(name="norm", a_dim=0, g_dim=0, gradient_elements=4),
    ),
    loss_s=0.25,
)
CLUSTER = ClusterProfile(world_size=4, all_reduce=LINK, reduce=LINK, broadcast=LINK, inverse=PolynomialCost((1, 2)))
NAN, INF = float("nan"), float("inf")
MISSING = object()


@pytest.mark.parametrize("profile", [MODEL, CLUSTER])
def test_round_trip(profile, tmp_path):
    profile.save(tmp_path / "p.json")
    assert type(profile).load(tmp_path / "p.json") == profile


def test_numbers_of_numpy_become_plain_ones(tmp_path):
    layer = LayerProfile(name="x", a_dim=np.int64(3), g_dim=np.int32(2), gradient_elements=6, forward_s=np.float32(0.5))
    replace(MODEL, layers=(layer, MODEL.layers[1])).save(tmp_path / "p.json")
    assert ModelProfile.load(tmp_path / "p.json") == MODEL


@pytest.mark.parametrize("value", [NAN, INF, -1.0, "1", None, True])
def test_seconds_are_finite_and_not_negative(value):
    for key in ("loss_s", "update_s"):
        with pytest.raises(ValueError, match=key):
            replace(MODEL, **{key: value})
    for key in ("forward_s", "precondition_s"):
        with pytest.raises(ValueError, match=f"layer 'x': {key}"):
            replace(MODEL.layers[0], **{key: value})


@pytest.mark.parametrize("value", [NAN, 2.5, 2.0, -1, "3", None, True])
def test_dimensions_elements_and_ranks_are_whole_numbers(value):
    for key in ("a_dim", "g_dim", "gradient_elements"):
        with pytest.raises(ValueError, match=f"layer 'x': {key} must be a whole number"):
            replace(MODEL.layers[0], **{key: value})
    for make in (lambda: replace(CLUSTER, world_size=value), lambda: CLUSTER.at(value)):
        with pytest.raises(ValueError, match="world_size must be a whole number"):
            make()


def with_value(profile, path, value):
    data = json.loads(json.dumps(profile.to_dict()))
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("profile", "path", "value", "message"),
    [
        (MODEL, ("layers",), MISSING, r"missing key\(s\) layers"),
        (MODEL, ("layers",), {}, "layers must be a list"),
        (MODEL, ("layers",), [], "has no layers"),
        (MODEL, ("layers", 1), 3, "layer 1 must be an object"),
        (MODEL, ("layers", 1, "g_dim"), MISSING, r"layer 1: missing key\(s\) g_dim"),
        (MODEL, ("layers", 1, "gdim"), 3, r"layer 1: unknown key\(s\) gdim; keys: name, a_dim"),
        (MODEL, ("layers", 0, "a_dim"), "3", "layer 'x': a_dim must be a whole number"),
        (MODEL, ("layers", 0, "name"), 3, "layer name must be a string"),
        (MODEL, ("layers", 0, "backward_s"), None, "layer 'x': backward_s must be finite"),
        (MODEL, ("loss_s",), None, "loss_s must be finite"),
        (MODEL, ("speed",), 1, r"unknown key\(s\) speed"),
        (MODEL, ("name",), None, "name must be a string"),
        (MODEL, ("provenance",), "me", "provenance must be an object"),
        (CLUSTER, ("inverse",), 3, "inverse: a cost must be an object"),
        (CLUSTER, ("inverse",), MISSING, r"missing key\(s\) inverse"),
        (CLUSTER, ("inverse", "coefficients_s"), "123", "inverse: .*coefficients_s must be a list"),
        (CLUSTER, ("reduce", "alpha_s"), None, "reduce: LinearCost.alpha_s"),
        (CLUSTER, ("world_size",), "4", "world_size must be a whole number"),
        (CLUSTER, ("world_size",), MISSING, r"missing key\(s\) world_size"),
        (CLUSTER, ("latency",), 1, r"unknown key\(s\) latency"),
        (CLUSTER, ("provenance",), None, "provenance must be an object"),
    ],
)
def test_mistakes_in_files_name_the_file_and_the_key(tmp_path, profile, path, value, message):
    data = with_value(profile, path, value)
    with pytest.raises(ValueError, match=message):
        type(profile).from_dict(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"p\.json: .*{message}"):
        type(profile).load(tmp_path / "p.json")


@pytest.mark.parametrize("kind", [ModelProfile, ClusterProfile])
@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{"])
def test_what_is_no_profile_names_the_file(tmp_path, kind, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"profile .*p\.json"):
        kind.load(tmp_path / "p.json")
    with pytest.raises(ValueError, match=r"absent\.json"):
        kind.load(tmp_path / "absent.json")


def test_a_cost_is_a_callable():
    with pytest.raises(ValueError, match="broadcast must be a cost"):
        replace(CLUSTER, broadcast=3)
