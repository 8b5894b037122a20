"""A rank that does not come: the others say in which collective they have waited, for how long, and what to do."""

import time
from pathlib import Path

import pytest
import torch

from kfac.communication import CommunicationError, init_distributed, shutdown
from tests.kfac.ranks import run_ranks

TIMEOUT_S = 1.0


def does_not_come(rank, world_size, folder):
    """Rank 1 stays away from what rank 0 issues second, until that has given up."""
    shutdown()
    communicator = init_distributed(
        rank=rank, world_size=world_size, init_method=f"file://{folder}/again", timeout_s=TIMEOUT_S
    )
    ones = torch.ones(3)
    communicator.all_reduce(ones, "together").wait()
    given_up = Path(folder, "given_up")
    if rank == 1:
        end_s = time.monotonic() + 60
        while not given_up.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        return ones.tolist()
    found = []
    for issue in (
        lambda: communicator.all_reduce(torch.ones(3), "G of layer1").wait(),
        lambda: communicator.broadcast(torch.ones(3), 1, "inverse of layer2").wait(),
        lambda: communicator.broadcast_object("x"),
        lambda: communicator.all_gather_object("x"),
        communicator.barrier,
    ):
        with pytest.raises(CommunicationError) as caught:
            issue()
        found.append(str(caught.value))
    given_up.touch()
    return ones.tolist(), found


def test_the_collective_that_nobody_joined_is_named(tmp_path):
    (sums, found), other = run_ranks(does_not_come, 2, str(tmp_path))
    assert sums == other == [2.0] * 3, "where all come there is no error"
    names = (
        "all_reduce G of layer1",
        "broadcast inverse of layer2",
        "broadcast_object",
        "all_gather_object",
        "barrier",
    )
    for text, name in zip(found, names, strict=True):
        assert text.startswith(f"{name}: rank 0 has waited ")
        assert "check_collectives=true" in text
    waited_s = float(found[0].split(" has waited ")[1].split()[0])
    assert waited_s >= 0.9 * TIMEOUT_S
