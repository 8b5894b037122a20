"""Cost models: what they return, and what they refuse."""

import math

import pytest

from kfac.planning import ClusterProfile, ExponentialCost, LinearCost, PolynomialCost, TableCost, plan_placement
from kfac.planning.costs import checked_cost, cost_from_dict, cost_to_dict

NAN, INF = float("nan"), float("inf")


def test_values_by_hand():
    assert LinearCost(2, 3)(4) == 14
    assert PolynomialCost((1, 0, 2), unit_dim=10)(30) == 1 + 2 * 9
    assert ExponentialCost(2, 0.5)(4) == pytest.approx(2 * math.e**2)
    table = TableCost((1, 3, 4), (10, 14, 20))
    assert [table(x) for x in (0, 2, 3.5, 6)] == [8, 12, 17, 32]


@pytest.mark.parametrize(
    "cost", [LinearCost(1, 2), PolynomialCost((1, 2)), ExponentialCost(1, 2), TableCost((1, 2), (3, 4))]
)
def test_json_round_trip(cost):
    assert cost_from_dict(cost_to_dict(cost)) == cost


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearCost(NAN, 1), "LinearCost.alpha_s"),
        (lambda: LinearCost(1, "2"), "LinearCost.beta_s_per_element"),
        (lambda: LinearCost(True, 1), "LinearCost.alpha_s"),
        (lambda: LinearCost(10**400, 1), "LinearCost.alpha_s"),
        (lambda: PolynomialCost("123"), "PolynomialCost.coefficients_s must be a list of numbers"),
        (lambda: PolynomialCost(3), "PolynomialCost.coefficients_s must be a list of numbers"),
        (lambda: PolynomialCost(("1", "2")), r"PolynomialCost.coefficients_s\[0\]"),
        (lambda: PolynomialCost((1, -1)), r"PolynomialCost.coefficients_s\[1\]"),
        (lambda: PolynomialCost(()), "empty"),
        (lambda: PolynomialCost((1,), unit_dim=0), "unit_dim"),
        (lambda: PolynomialCost((1,), unit_dim=NAN), "unit_dim"),
        (lambda: ExponentialCost(None, 1), "ExponentialCost.alpha_s"),
        (lambda: TableCost((1, NAN), (1, 2)), r"TableCost.sizes\[1\]"),
        (lambda: TableCost((1, INF), (1, 2)), r"TableCost.sizes\[1\]"),
        (lambda: TableCost((1, 2), (1, INF)), r"TableCost.seconds\[1\]"),
        (lambda: TableCost((2, 2), (1, 2)), "strictly increasing"),
        (lambda: TableCost((1,), (1,)), "at least two"),
    ],
)
def test_impossible_cost_models_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "a cost must be an object"),
        ({}, "unknown cost type None"),
        ({"type": []}, "unknown cost type"),
        ({"type": "cubic"}, "choices: linear, polynomial, exponential, table"),
        ({"type": "linear", "alpha_s": 1}, r"missing key\(s\) beta_s_per_element"),
        ({"type": "linear", "alpha_s": 1, "beta_s_per_element": 2, "gamma": 3}, r"unknown key\(s\) gamma"),
        ({"type": "linear", "alpha_s": [1], "beta_s_per_element": 2}, "alpha_s"),
        ({"type": "polynomial", "coefficients_s": "123"}, "list of numbers"),
    ],
)
def test_json_forms_with_mistakes_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        cost_from_dict(data)


def test_an_exponential_that_overflows_is_infinite_and_planning_names_the_dimension():
    assert ExponentialCost(1, 1)(1000) == INF
    assert ExponentialCost(0, 1)(1000) == 0
    free = LinearCost(0, 0)
    cluster = ClusterProfile(
        world_size=2, all_reduce=free, reduce=free, broadcast=free, inverse=ExponentialCost(1e-3, 1)
    )
    with pytest.raises(ValueError, match=r"cost inverse\(8000\) must be finite"):
        plan_placement((10, 8000), 2, cluster, "lbp")


def test_a_checked_cost_passes_seconds_on():
    assert [checked_cost("c", lambda n: n)(n) for n in (0, 2, 0.5)] == [0, 2, 0.5]
