"""What a Plan refuses: factors out of order, messages that do not add up, models that it is not for."""

import json
from dataclasses import replace

import pytest

from kfac.planning import ClusterProfile, FactorSpec, LayerProfile, LinearCost, ModelProfile, Plan
from kfac.schedules import make_plan

FREE = LinearCost(0, 0)
MODEL = ModelProfile(
    name="three",
    layers=(
        LayerProfile(name="x", a_dim=3, g_dim=2, gradient_elements=6),
        LayerProfile(name="norm", a_dim=0, g_dim=0, gradient_elements=4),
        LayerProfile(name="y", a_dim=3, g_dim=2, gradient_elements=6),
    ),
)
CLUSTER = ClusterProfile(world_size=2, all_reduce=FREE, reduce=FREE, broadcast=FREE, inverse=FREE)
PLAN = make_plan({"name": "spdkfac", "fusion": "none"}, MODEL, CLUSTER)
XA, XG, YA, YG = PLAN.factors


def test_factors_are_the_layers_pairs():
    assert PLAN.factors == (
        FactorSpec("x", "A", 3),
        FactorSpec("x", "G", 2),
        FactorSpec("y", "A", 3),
        FactorSpec("y", "G", 2),
    )


@pytest.mark.parametrize(
    ("factors", "place"),
    [
        ((YA, YG, XA, XG), "at 0"),
        ((XA, YG, YA, XG), "at 1"),
        ((XA, XG, XA, XG), "at 2"),
        ((XA, XG, YA), "at 3"),
        ((XA, XG, YA, replace(YG, layer="z")), "at 3"),
        ((XA, XG, YA, replace(YG, side="g")), "at 3"),
        ((XA, XG, YA, YG, YG), "at 4"),
    ],
)
def test_factors_out_of_order_are_refused(factors, place):
    with pytest.raises(ValueError, match=rf"A0 G0 A1 G1 \.\.\. in the order of the layers: {place}"):
        replace(PLAN, factors=factors)


@pytest.mark.parametrize("dim", [0, -1, 2.5, 2.0, True, "2", float("nan"), None])
def test_dimensions_are_positive_whole_numbers(dim):
    with pytest.raises(ValueError, match="dim of factor G of layer 'y'"):
        replace(PLAN, factors=(XA, XG, YA, replace(YG, dim=dim)))


def changed(number, **fields):
    messages = list(PLAN.messages)
    messages[number] = replace(messages[number], **fields)
    return tuple(messages)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": changed(0, elements=5)}, "5 elements, but its factors have 6"),
        ({"messages": changed(0, elements=-6)}, "message 0: elements"),
        ({"messages": changed(0, release="later")}, "message 0: release 'later'"),
        ({"messages": changed(0, kind="B")}, "message 0: kind 'B'"),
        ({"messages": changed(0, items=())}, "message 0 carries nothing"),
        ({"messages": PLAN.messages[1:]}, "every factor exactly once"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 2.0}, "world_size"),
        ({"inverse_owner": (0, 1, 2, None)}, "not a rank below 2"),
        ({"inverse_owner": (0, 1, "0", None)}, "owner"),
        ({"inverse_sequence": (0, 1, 2, 2)}, "one place in the inverse sequence"),
        ({"layers": ("x", "norm", "x")}, "repeat"),
    ],
)
def test_other_impossible_plans_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **fields)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("factors",), None, "factors must be a list"),
        (("factors", 1, "dim"), "2", "dim of factor G of layer 'x'"),
        (("messages", 0, "items"), "0", "items must be a list"),
        (("messages", 0, "colour"), 1, r"message 0: unknown key\(s\) colour"),
        (("schedule",), 3, "switches must be an object"),
        (("speed",), 3, r"plan: unknown key\(s\) speed"),
    ],
)
def test_a_json_form_with_mistakes_names_the_key(path, value, message):
    data = json.loads(json.dumps(PLAN.to_dict()))
    assert Plan.from_dict(data) == PLAN
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(data)


def test_a_json_form_without_a_key_names_it():
    for key in PLAN.to_dict():
        with pytest.raises(ValueError, match=rf"missing key\(s\) {key}"):
            Plan.from_dict({k: v for k, v in PLAN.to_dict().items() if k != key})


def layers_with(position, **fields):
    layers = list(MODEL.layers)
    layers[position] = replace(layers[position], **fields)
    return replace(MODEL, layers=tuple(layers))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MODEL, layers=MODEL.layers[:2]), "layer 2 is 'y' in the plan, missing in the model"),
        (replace(MODEL, layers=MODEL.layers[::-1]), "layer 0 is 'x' in the plan, 'y' in the model"),
        (layers_with(1, name="bn"), "layer 1 is 'norm' in the plan, 'bn' in the model"),
        (layers_with(2, g_dim=5), "factor 3 is G of layer 'y' with dimension 2 in the plan, G .* dimension 5"),
        (layers_with(1, a_dim=1, g_dim=1), "factor 2 is A of layer 'y' .* A of layer 'norm' with dimension 1"),
        (layers_with(2, a_dim=0, g_dim=0), "factor 2 is A of layer 'y' .* missing in the model"),
        (layers_with(0, gradient_elements=7), "gradient message . has 6 elements in the plan, 7 in the model"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(model, message):
    PLAN.check_model(MODEL)
    with pytest.raises(ValueError, match=f"not for model 'three': {message}"):
        PLAN.check_model(model)


def test_a_plan_without_curvature_fits_whatever_factors_a_model_has():
    make_plan("sgd", MODEL, CLUSTER).check_model(layers_with(2, g_dim=5))
