"""A GPU serves one rank; asking for more is an error before anything starts."""

import pytest
import torch

from experiments.assembly import Site
from experiments.config import TrainConfig
from experiments.devices import choose_device
from experiments.ranks import Rank
from experiments.settings import ConfigError
from tests.experiments.conftest import SMALL
from tests.experiments.test_config import compose


@pytest.mark.parametrize(("count", "expected"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")])
def test_auto_takes_gpus_where_there_is_one_for_each(monkeypatch, count, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert choose_device("auto", 2) == expected
    assert choose_device("cpu", 2) == "cpu"
    if count >= 2:
        assert choose_device("cuda", 2) == "cuda"
    else:
        with pytest.raises(ConfigError, match=f"device=cuda with world_size=2 .* has {count}"):
            choose_device("cuda", 2)


@pytest.mark.parametrize(("overrides", "checked"), [((), None), (("check_collectives=true",), True)])
def test_ranks_compare_their_collectives_where_that_is_asked_for(monkeypatch, overrides, checked):
    """Otherwise TORCH_DISTRIBUTED_DEBUG decides."""
    asked = []
    monkeypatch.setattr("experiments.assembly.init_distributed", lambda **options: asked.append(options))
    config = TrainConfig.from_dict(compose(*SMALL, "device=cpu", "world_size=2", *overrides))
    Site.enter(config, Rank(rank=0, world_size=2, local_rank=0, init_method="file:///nowhere"))
    assert asked[0]["check_collectives"] is checked
