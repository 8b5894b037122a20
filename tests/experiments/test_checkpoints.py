"""A checkpoint is whole or does not count; the last few stay."""

import json
import logging

import pytest
import torch

from experiments.checkpoints import COMMIT, Checkpoints
from kfac.communication import LocalCommunicator

CPU = torch.device("cpu")


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, LocalCommunicator(), keep=2)


def save(checkpoints, iteration):
    checkpoints.save(iteration, {"weight": torch.full((2,), float(iteration))}, {"random": torch.tensor(iteration)})


def test_the_last_ones_stay_and_the_last_counts(checkpoints, tmp_path):
    assert checkpoints.load(CPU) is None
    for iteration in (5, 999_999, 1_000_000):
        save(checkpoints, iteration)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter1000000", "iter999999"]
    iteration, shared, own = checkpoints.load(CPU)
    assert (iteration, shared["weight"].tolist(), int(own["random"])) == (1_000_000, [1e6, 1e6], 1_000_000)


@pytest.mark.parametrize("damage", ["uncommitted", "cut", "flipped", "missing", "other world", "no JSON"])
def test_a_damaged_one_falls_back_to_the_one_before(checkpoints, tmp_path, caplog, damage):
    save(checkpoints, 1)
    save(checkpoints, 2)
    target = tmp_path / "iter000002"
    file = target / "shared.pt"
    data = bytearray(file.read_bytes())
    if damage == "uncommitted":
        (target / COMMIT).unlink()
    elif damage == "cut":
        file.write_bytes(data[:-10])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "missing":
        (target / "rank0.pt").unlink()
    elif damage == "other world":
        commit = json.loads((target / COMMIT).read_text())
        (target / COMMIT).write_text(json.dumps({**commit, "world_size": 2}))
    else:
        (target / COMMIT).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.load(CPU)[0] == 1
    assert ("iter000002" in caplog.text) == (damage != "uncommitted")
    save(checkpoints, 2)
    assert checkpoints.load(CPU)[0] == 2
