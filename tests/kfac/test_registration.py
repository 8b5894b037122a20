"""Patterns of names: what they match, what they may not; and what summary() says once layers have been seen at work."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from tests.kfac.models import make_data, make_model

# make_model()'s layers: 0, 1, 3.main, 3.skip, 4, 8, 10


@pytest.mark.parametrize("option", ["include", "exclude", "overrides"])
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("3.mian", r"the pattern '3\.mian' matches no layer of the model: did you mean 3\.main"),
        ("3", r"the pattern '3' matches no layer of the model: '3\.\*' matches 3\.main, 3\.skip"),
        (
            "encoder.layers.*",
            r"the pattern .* matches no layer.*; there are 0, 1, 3\.main, 3\.skip and 3 more",
        ),
        ("2", "the pattern '2' matches no layer"),  # an activation has no parameters
    ],
)
def test_a_pattern_that_matches_nothing_is_named_with_names_there_are(option, pattern, message):
    value = {pattern: {"damping": 0.1}} if option == "overrides" else ("0", pattern)
    with pytest.raises(ValueError, match=rf"kfac\.{option}: {message}"):
        KFAC(make_model(), KFACConfig(**{option: value}))


def test_patterns_that_match_raise_and_warn_of_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        options = {"include": ("[0-9]*", "*"), "exclude": ("3.*",), "overrides": {"8": {"damping": 0.1}}}
        kfac = KFAC(make_model(), KFACConfig(**options))
    assert [layer.name for layer in kfac.layers] == ["0", "1", "4", "8", "10"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"overrides": {"3.*": {"damping": 0.1}}, "exclude": ("3.*",)},
            r"overrides: '3\.\*'.*3.main \(include/ex",
        ),
        ({"include": ("1", "0"), "layers": ("convolution",)}, r"kfac.include: '1'.*1 \(layers of kind norm are not in"),
        (
            {"overrides": {"10": {"damping": 0.1}}, "exclude": "4"},
            r"overrides: '10'.*10 \(its parameters are frozen",
        ),
    ],
)
def test_a_pattern_of_layers_that_are_not_preconditioned_is_legal_but_said(options, message, caplog):
    model = make_model()
    model[10].requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        KFAC(model, KFACConfig(**options))
    (record,) = caplog.records
    assert re.search(message, record.getMessage())


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    model["second"].weight, model["second"].bias = model["first"].weight, model["first"].bias
    return model


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_layer_goes_by_the_names_of_all_modules_that_share_its_parameters(name):
    kfac = KFAC(tied(), KFACConfig(exclude=(name,)))
    assert [layer.name for layer in kfac.layers] == ["head"]
    kfac = KFAC(tied(), KFACConfig(overrides={name: {"damping": 0.5}}))
    assert [layer.config.damping for layer in kfac.layers] == [0.5, 1e-3]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0]).mean(1)


def test_summary_counts_a_bypassed_layer_as_plain_once_a_step_has_shown_it():
    model = Attention()
    kfac = KFAC(model, KFACConfig(factor_interval=2))
    assert kfac.summary().startswith("2 layers preconditioned (2 linear), 36.8% of 95 trainable")  # 20 + 15
    for _ in range(2):  # the second step collects nothing, and takes nothing back
        model.zero_grad()
        F.cross_entropy(model(torch.randn(5, 6, 4)), torch.tensor([0, 1, 2, 0, 1])).backward()
        kfac.step()
        after = kfac.summary()
        assert after.startswith("1 layers preconditioned (1 linear), 15.8% of 95 trainable")
        assert "plain gradient: attention.out_proj: no statistics so far: its forward is bypassed" in after
    again = KFAC(copy.deepcopy(model))
    again.load_state_dict(kfac.state_dict())
    assert again.summary() == after


def test_summary_of_a_model_whose_layers_are_all_used_stays_what_it_was():
    model = make_model()
    kfac = KFAC(model)
    before = kfac.summary()
    x, y = make_data(4, 0)
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    assert kfac.summary() == before
    assert "100.0%" in before


def test_a_configuration_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"config is a dict.*KFACConfig\.from_dict"):
        KFAC(make_model(), {"damping": 0.1})
