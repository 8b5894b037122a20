"""States: what is refused by name, what an old version becomes, and that a refused one changes nothing."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from kfac.state import STATE_VERSION
from tests.kfac.models import make_data, make_model

CONFIG = {"factor_interval": 2, "inverse_interval": 4}


def make(steps: int = 0, **options) -> tuple[nn.Module, KFAC]:
    """A model and its K-FAC after some steps of training."""
    model = make_model()
    kfac = KFAC(model, KFACConfig(**CONFIG, **options))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        train(model, kfac, optimizer, step)
    return model, kfac


def train(model, kfac, optimizer, step) -> None:
    x, y = make_data(8, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    optimizer.step()


@pytest.fixture(scope="module")
def saved() -> dict:
    return make(3)[1].state_dict()


def changed(state: dict, **keys) -> dict:
    return {**copy.deepcopy(state), **keys}


def with_factor(state: dict, key: str, **entries) -> dict:
    new = copy.deepcopy(state)
    new["factors"][key].update(entries)
    return new


def refused(state, message: str, **options) -> None:
    """A state is refused with a message, and a K-FAC that has trained is as it was before."""
    _, kfac = make(1, **options)
    before = kfac.state_dict()
    with pytest.raises(ValueError, match=message):
        kfac.load_state_dict(state)
    after = kfac.state_dict()
    assert {k: v for k, v in after.items() if k != "factors"} == {k: v for k, v in before.items() if k != "factors"}
    for key, factor in before["factors"].items():
        assert torch.equal(after["factors"][key]["average"], factor["average"])


# ---------------------------------------------------------------------- versions


def as_version_1(state: dict) -> dict:
    """What the first format would have held: no blocks, no decompositions, no keys of later options."""
    old = {key: copy.deepcopy(state[key]) for key in ("steps", "skipped_steps", "plan", "config")}
    keys = ("dim", "average", "weight", "inverse")
    old["factors"] = {name: {key: factor[key] for key in keys} for name, factor in state["factors"].items()}
    for factor in old["plan"]["factors"]:
        assert factor.pop("blocks") == 1
    return {**old, "version": 1}


def test_version_1_continues_to_the_same_bits():
    kinds = ("linear", "convolution")
    whole, kfac = make(6, layers=kinds)
    first, kfac = make(3, layers=kinds)
    old = as_version_1(kfac.state_dict())
    model = make_model()
    model.load_state_dict(first.state_dict())
    again = KFAC(model, KFACConfig(**CONFIG, layers=kinds))
    again.load_state_dict(old)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3, 6):
        train(model, again, optimizer, step)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    assert again.state_dict()["version"] == STATE_VERSION


def test_version_1_of_a_model_with_other_layers_says_how_to_load_it():
    _, kfac = make(1, layers=("linear", "convolution"))
    refused(as_version_1(kfac.state_dict()), r"lacks A of 1, G of 1.*version 1.*\('linear', 'convolution'\)")


@pytest.mark.parametrize("version", [0, STATE_VERSION + 1, "2"])
def test_unknown_versions_are_refused_naming_both(saved, version):
    refused(changed(saved, version=version), rf"version {version}, this kfac reads versions 1 to {STATE_VERSION}")


@pytest.mark.parametrize("state", [{}, {"steps": 3}, [1, 2], None])
def test_what_is_no_state_is_refused(state):
    refused(state, "no state of KFAC")


# ---------------------------------------------------------------------- other models, damage


def test_missing_and_unknown_layers_are_named(saved):
    lacking = copy.deepcopy(saved)
    del lacking["factors"]["8/G"], lacking["factors"]["10/A"]
    lacking["factors"]["extra/A"] = lacking["factors"]["8/A"]
    refused(lacking, r"another model.*lacks A of 10, G of 8; it has A of extra, which this one has not")
    refused(saved, r"it has A of 1, G of 1, which", layers=("linear", "convolution"))
    many = changed(saved, factors={})
    refused(many, r"lacks A of 0, G of 0, A of 1, G of 1 and 10 more")


def test_another_width_is_named_with_both_sizes(saved):
    state = with_factor(saved, "8/A", dim=22)
    refused(state, r"A of 8 has 1 block\(s\) of dimension 22, here it has 1 of dimension 21")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"average": torch.zeros(5)}, r"average of G of 8 should have shape \(28,\), but is \(5,\)"),
        ({"inverse": torch.zeros(28, 1)}, r"inverse of G of 8 should have shape \(28,\), but is \(28, 1\)"),
        ({"average": [0.0] * 28}, r"average of G of 8 should have shape \(28,\), but is list"),
        ({"average": torch.full((28,), float("nan"))}, "average of G of 8 is not finite"),
        ({"vectors": torch.zeros(1, 7, 6)}, r"vectors of G of 8 should have shape \(1, 7, 7\)"),
        ({"corrected": torch.zeros(1, 7, 20)}, r"corrected of G of 8 should have shape \(1, 7, 21\)"),
        (
            {"average": torch.zeros(28, dtype=torch.int64)},
            "average of G of 8 should hold real numbers, but is torch.int64",
        ),
        ({"average": torch.zeros(28, dtype=torch.complex64)}, "average of G of 8 should hold real numbers"),
        ({"inverse": torch.zeros(28).to_sparse()}, "inverse of G of 8 should hold real numbers"),
        ({"inverse": torch.zeros(28, device="meta")}, "inverse of G of 8 should hold real numbers"),
        ({"weight": 2.0}, "weight of G of 8 should be a number from 0 to 1, but is 2.0"),
        ({"weight": None}, "weight of G of 8 should be a number from 0 to 1, but is None"),
        ({"weight": 0.0}, "weight of G of 8"),
    ],
)
def test_damaged_entries_are_named(saved, entries, message):
    refused(with_factor(saved, "8/G", **entries), message)


@pytest.mark.parametrize("key", ["steps", "plan", "factors"])
def test_missing_keys_are_named(saved, key):
    state = copy.deepcopy(saved)
    del state[key]
    refused(state, f"damaged: it has no {key}")


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan"), float("inf"), "x", None])
def test_an_impossible_strength_of_damping_is_named(saved, strength):
    refused(changed(saved, damping_strength=strength), "damping_strength should be a positive number")


@pytest.mark.parametrize(("part", "value"), [("factors", None), ("factors", [1]), ("config", None)])
def test_parts_that_are_no_mappings_are_named(saved, part, value):
    refused(changed(saved, **{part: value}), f"{part} should be a mapping")
    broken = copy.deepcopy(saved)
    broken["factors"]["8/G"] = None
    refused(broken, "factor 8/G should be a mapping")


def test_impossible_counts_and_plans_are_named(saved):
    refused(changed(saved, steps=-1), "steps of the state must be a whole number")
    plan = copy.deepcopy(saved["plan"])
    del plan["messages"]
    refused(changed(saved, plan=plan), "messages")


def test_lost_entries_of_a_factor_are_named(saved):
    state = copy.deepcopy(saved)
    del state["factors"]["8/G"]["average"]
    refused(state, "average of G of 8 should have shape")
    state = copy.deepcopy(saved)
    del state["factors"]["8/G"]["dim"]
    refused(state, r"G of 8 has 1 block\(s\) of dimension None")


# ---------------------------------------------------------------------- what changes between two runs


def test_other_hyper_parameters_load_quietly_and_other_averages_with_a_warning(saved, caplog):
    with caplog.at_level(logging.WARNING):
        _, kfac = make(damping=0.1, lr=0.5)
        kfac.load_state_dict(saved)
        assert not caplog.records
        _, kfac = make(scaling="standard", loss_reduction="sum", fisher="mc")
        kfac.load_state_dict(saved)
    (record,) = caplog.records
    assert "fisher=empirical, now mc" in record.message
    assert "loss_reduction=mean, now sum" in record.message
    assert kfac.steps == 3


def test_a_schedule_without_curvature_and_one_with_it_take_over_from_each_other(saved):
    model = make_model()
    sgd = KFAC(model, KFACConfig(**CONFIG), "sgd")
    sgd.load_state_dict(saved)
    assert sgd.steps == 3
    state = sgd.state_dict()
    state["factors"] = {}  # as the schedule has saved it before
    _, kfac = make(1)
    kfac.load_state_dict(state)
    with pytest.raises(KeyError, match="no statistics"):
        kfac.factor("8", "A")
    assert kfac.steps == 3


def test_a_state_survives_a_file_without_pickled_code(saved, tmp_path):
    torch.save(saved, tmp_path / "state.pt")
    _, kfac = make()
    kfac.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(kfac.state_dict()["factors"]["8/G"]["average"], saved["factors"]["8/G"]["average"])


def test_a_loaded_state_shares_no_memory_with_what_it_came_from(saved):
    state = copy.deepcopy(saved)
    model, kfac = make()
    kfac.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3, 6):
        train(model, kfac, optimizer, step)
    for key, factor in saved["factors"].items():
        assert torch.equal(state["factors"][key]["average"], factor["average"])
    assert not torch.equal(kfac.state_dict()["factors"]["8/G"]["average"], saved["factors"]["8/G"]["average"])


def test_what_a_factor_is_asked_for_wrongly_is_named():
    _, kfac = make()
    with pytest.raises(KeyError, match=r"no factor 'A' of 'nonsense': layers are"):
        kfac.factor("nonsense", "A")
    with pytest.raises(KeyError, match="no factor 'B'"):
        kfac.factor("8", "B")


def test_another_max_dim_is_named_as_the_difference(saved):
    refused(saved, r"saved with another kfac\.max_dim \(\{'\*': 8192\}, now \{'\*': 10\}; set it back\)", max_dim=10)
    overrides = {"8": {"max_dim": 10, "damping": 0.1}}
    refused(saved, r"another kfac\.max_dim .*now \{'\*': 8192, '8': 10\}", overrides=overrides)
    make(max_dim=8000)[1].load_state_dict(saved)  # which all factors are within


# ---------------------------------------------------------------------- bitwise continuation


@pytest.mark.parametrize("stop", [3, 4, 6])
@pytest.mark.parametrize("drop", [False, True], ids=["whole", "a factor lost"])
def test_resume_inside_an_inverse_interval_is_bitwise(stop, drop):
    config = KFACConfig(**CONFIG, damping=lambda step: 0.01 / (1 + step))

    def start(seed: int) -> tuple[nn.Module, KFAC, torch.optim.SGD]:
        model = make_model(seed)
        return model, KFAC(model, config), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    whole = start(0)
    for step in range(stop):
        train(*whole, step)
    saved = [copy.deepcopy(part.state_dict()) for part in whole]
    for step in range(stop, 12):
        train(*whole, step)
    if drop:
        saved[1]["factors"]["0/A"]["average"] *= 0.5
    again = start(5)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    for step in range(stop, 12):
        train(*again, step)
    same = [torch.equal(a, b) for a, b in zip(again[0].parameters(), whole[0].parameters(), strict=True)]
    assert all(same) != drop


def test_the_state_of_another_model_is_refused(saved):
    with pytest.raises(ValueError, match="another model"):
        KFAC(nn.Sequential(nn.Linear(3, 2))).load_state_dict(saved)


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_the_preconditioner_names_the_way_to_do_it(way):
    _, kfac = make(1)
    with pytest.raises(TypeError, match=r"KFAC belongs to the model.*state_dict\(\)"):
        way(kfac)


def test_a_copy_of_the_model_feeds_nothing_and_takes_a_preconditioner_of_its_own():
    """As an average of weights (EMA) does: the copy trains beside the model, which must not notice."""
    results = []
    for copied in (False, True):
        model, kfac = make(2)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        twin = copy.deepcopy(model)
        own = KFAC(twin, KFACConfig(**CONFIG))
        own.load_state_dict(kfac.state_dict())
        for step in range(2, 6):
            if copied:
                train(twin, own, torch.optim.SGD(twin.parameters(), 0.05), step + 50)
                copy.deepcopy(twin)(make_data(8, 0)[0]).sum().backward()
            train(model, kfac, optimizer, step)
        results.append([p.detach().clone() for p in model.parameters()])
        assert kfac.steps == 6
        assert own.steps == (6 if copied else 2)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
