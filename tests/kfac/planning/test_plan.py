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
    added = ("inverse_messages", "gradient_owner", "gradient_messages")
    for key in PLAN.to_dict().keys() - added:
        with pytest.raises(ValueError, match=rf"missing key\(s\) {key}"):
            Plan.from_dict({k: v for k, v in PLAN.to_dict().items() if k != key})


def test_a_plan_from_before_owners_had_messages_of_their_own_is_what_it_was():
    data = PLAN.to_dict()
    for key in ("inverse_messages", "gradient_owner", "gradient_messages"):
        del data[key]
    for message in data["messages"]:
        del message["root"]
    for key in ("inverse_fusion", "message_dtype", "gradient_worker_fraction"):
        del data["schedule"][key]
    assert Plan.from_dict(data) == PLAN
    old = replace(PLAN, inverse_owner=(1, None, 0, 1), inverse_sequence=(2, 0, 3, 1), inverse_messages=())
    assert old.inverse_messages == ((2,), (0,), (3,))
    assert old.gradient_owner == (None, None)
    assert old.gradient_messages == ()


OWNED = make_plan(
    {"name": "spdkfac", "factor_collective": "reduce_to_owner", "gradient_worker_fraction": 0.0}, MODEL, CLUSTER
)


def test_who_holds_what():
    assert OWNED.gradient_owner == (0, 1)
    assert OWNED.inverse_owner == (0, 0, 1, 1)
    assert OWNED.factor_holder == (0, 0, 1, 1)
    assert [(m.kind, m.items, m.root) for m in OWNED.messages if m.kind != "gradient"] == [
        ("A", (0,), 0),
        ("A", (2,), 1),
        ("G", (3,), 1),
        ("G", (1,), 0),
    ]
    assert (OWNED.inverse_messages, OWNED.gradient_messages) == ((), ((0,), (1,)))
    assert OWNED.summary_elements == 8
    assert PLAN.summary_elements == 0
    assert PLAN.factor_holder == (None,) * 4
    assert Plan.from_dict(json.loads(json.dumps(OWNED.to_dict()))) == OWNED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inverse_owner": (1, 0, 1, 1)}, r"A of layer 'x' is reduced to rank 0, which is not the one to invert it"),
        ({"gradient_owner": (1, 1)}, r"rank 1 preconditions layer 'x', but lacks its inverses"),
        ({"gradient_owner": (0,)}, "a gradient owner, or none, for every layer"),
        ({"gradient_messages": ((0, 1),)}, "a group of gradient_messages has one owner"),
        ({"gradient_messages": ((0,),)}, "every owned gradient that travels exactly once"),
        ({"inverse_messages": ((0,),)}, "every owned inverse that travels exactly once"),
        ({"schedule": replace(OWNED.schedule, factor_collective="none")}, "must carry no factor"),
    ],
)
def test_plans_under_which_a_rank_would_lack_something_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(OWNED, **fields)


def test_layers_of_factors_that_do_not_travel_need_a_rank():
    local = make_plan("dp_kfac", MODEL, CLUSTER)
    with pytest.raises(ValueError, match="one rank that preconditions layer 'x'"):
        replace(local, gradient_owner=(None, 1), gradient_messages=())


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
