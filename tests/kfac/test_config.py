"""KFACConfig: what is refused, by name, and JSON."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from kfac import KFACConfig

BAD = {
    "lr": [0, -1, "x", float("nan")],
    "damping": [0, -1e-3, True, "0.1", None, [0.1]],
    "factor_decay": [1.0, -0.1, "0.9", None],
    "kl_clip": [0, -1, "1e-3"],
    "factor_interval": [0, 1.5, "10", None],
    "inverse_interval": [-1],
    "accumulation_steps": [0, "2", 2.0, len],
    "max_dim": [0, None, "8192"],
    "damping_interval": ["5"],
    "include": [5, (1,), {"fc": 1}],
    "exclude": [5, [None]],
    "layers": [3, [1]],
    "damping_method": ["tikhonov", ["pi"], None],
    "scaling": ["mine"],
    "fisher": ["true"],
    "fisher_samples": [0],
    "nonfinite": ["ignore"],
    "inverse_method": ["lu"],
    "average_from": ["one"],
    "overrides": [["head"], {"head": 0.1}, {1: {"damping": 0.1}}, "head"],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"kfac.{name}="):
        KFACConfig(**{name: value})


def test_callables_are_accepted_where_numbers_vary_in_training():
    config = KFACConfig(lr=lambda s: 0.1, damping=lambda s: 1.0, factor_interval=lambda s: 2)
    assert config.to_dict()["lr"] == "<callable>"


def test_json_round_trip_and_unknown_keys():
    config = KFACConfig.paper(exclude=("fc*",))
    assert KFACConfig.from_dict(config.to_dict()) == config
    assert (config.damping, config.damping_method, config.scaling) == (0.002, "plain", "spdkfac")
    with pytest.raises(ValueError, match=r"dampng.*options: lr, damping"):
        KFACConfig.from_dict({"dampng": 1})


def test_a_misspelt_option_is_named_with_the_nearest_there_is():
    for make in (KFACConfig, KFACConfig.paper, lambda **options: dataclasses.replace(KFACConfig(), **options)):
        with pytest.raises(ValueError, match=r"dampng: did you mean damping\?"):
            make(dampng=1)
    with pytest.raises(ValueError, match=r"zzz; options: lr, damping"):
        KFACConfig(zzz=1)


def test_a_configuration_can_be_copied_pickled_and_changed():
    config = KFACConfig(damping=0.5, overrides={"fc*": {"lr": 0.2}})
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, lr=0.3).damping == 0.5


def test_defaults_are_the_documented_ones():
    """A change of a default changes everybody's results: it must be made here too, and in the changelog."""
    assert dataclasses.asdict(KFACConfig()) == {
        "lr": 0.1,
        "damping": 1e-3,
        "damping_method": "pi",
        "factor_decay": 0.95,
        "average_from": "zero",
        "kl_clip": 1e-3,
        "factor_interval": 1,
        "inverse_interval": 1,
        "accumulation_steps": 1,
        "fisher": "empirical",
        "fisher_samples": 1,
        "inverse_method": "cholesky",
        "damping_adaptation": "none",
        "damping_interval": 5,
        "scaling": "standard",
        "loss_reduction": "mean",
        "weight_sharing": "expand",
        "layers": ("linear", "convolution", "embedding", "norm", "bias"),
        "include": ("*",),
        "exclude": (),
        "max_dim": 8192,
        "overrides": {},
        "nonfinite": "raise",
    }


def test_patterns():
    config = KFACConfig(include=("layer*",), exclude=("*.conv1",))
    assert config.covers("layer1.conv2")
    assert not config.covers("layer1.conv1")
    assert not config.covers("fc")
