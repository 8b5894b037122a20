"""A GPU serves one rank; asking for more is an error before anything starts."""

import pytest
import torch

from experiments.devices import choose_device
from experiments.settings import ConfigError


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
