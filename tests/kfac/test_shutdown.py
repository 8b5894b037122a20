"""Leaving the ranks ends gloo's threads: one that is left may abort the process while Python takes itself apart."""

import time
from pathlib import Path

import pytest
import torch

from kfac.communication import get_communicator, init_distributed, shutdown
from tests.kfac.ranks import run_ranks


def gloo_threads():
    names = (task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    return sum(name == "pt_gloo_runloop" for name in names)


def leaves(rank, world_size, checked):
    """Threads before, after torch's own end of the group, and after ours; and what a collective says then."""
    communicator = get_communicator(check_collectives=checked)
    communicator.all_reduce(torch.ones(8), "one").wait()
    communicator.broadcast_object("two")
    found = [gloo_threads()]
    torch.distributed.destroy_process_group()
    found.append(gloo_threads())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    shutdown()
    found.append(gloo_threads())
    with pytest.raises(RuntimeError) as caught:
        communicator.all_reduce(torch.ones(8), "late")
    return found, str(caught.value)


@pytest.mark.parametrize("checked", [False, True])
def test_no_thread_is_left(checked):
    for (before, destroyed, left), says in run_ranks(leaves, 2, checked):
        assert before >= 4  # of two groups
        assert destroyed >= 2, "K-FAC's group is held by its communicator: what this is about"
        assert left == 0
        assert "these ranks have been left" in says


def leaves_early(rank, world_size, folder):
    communicator, left = get_communicator(), Path(folder, "left")
    communicator.barrier()
    if rank == 1:
        work = communicator.all_reduce(torch.ones(8), "under way")
        del work
        shutdown()
        left.touch()
        return gloo_threads()
    end_s = time.monotonic() + 30
    while not left.exists():
        assert time.monotonic() < end_s, "rank 1 waits for a collective that this one has not joined"
        time.sleep(0.01)
    return 0


def test_nobody_waits_for_a_rank_that_does_not_come(tmp_path):
    assert run_ranks(leaves_early, 2, str(tmp_path))[1] > 0


def joins_again(rank, world_size, folder):
    sums = []
    shutdown()
    for number in range(2):
        communicator = init_distributed(rank=rank, world_size=2, init_method=f"file://{folder}/{number}")
        ones = torch.ones(1)
        communicator.all_reduce(ones, "ones").wait()
        sums.append(ones.item())
        shutdown()
    return sums, gloo_threads()


def test_ranks_can_join_again(tmp_path):
    assert run_ranks(joins_again, 2, str(tmp_path)) == [([2.0, 2.0], 0)] * 2
