"""The debug mode: the first collective in which ranks differ is named on every rank, and nothing hangs."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from kfac import KFAC
from kfac.checked_communication import CheckedCommunicator, CollectiveError
from kfac.communication import LocalCommunicator, get_communicator, init_distributed, shutdown
from tests.kfac.ranks import run_ranks
from tests.kfac.recipes.cells import OWNED, SCHEDULES, Run

TIMEOUT_S = 3.0


def sends(communicator: Any, *sizes: int, name: str = "kfac_FactorComm", dtype: torch.dtype = torch.float32) -> None:
    for size in sizes:
        communicator.all_reduce(torch.ones(size, dtype=dtype), name).wait()


def other_order(rank: int, c: Any) -> None:
    for name in ("first", "second")[:: -1 if rank == 1 else 1]:
        sends(c, 4, name=name)


def other_shape(rank: int, c: Any) -> None:
    sends(c, 3, 6 if rank == 1 else 5, 7)


def other_dtype(rank: int, c: Any) -> None:
    sends(c, 3)
    sends(c, 3, dtype=torch.bfloat16 if rank == 1 else torch.float32)


def other_root(rank: int, c: Any) -> None:
    sends(c, 3)
    c.broadcast(torch.zeros(3), int(rank == 1), "kfac_InverseComm").wait()


def other_sink(rank: int, c: Any) -> None:
    c.reduce(torch.zeros(3), int(rank == 1), "kfac_FactorComm").wait()


def other_operation(rank: int, c: Any) -> None:
    if rank == 1:
        c.barrier()
    else:
        c.all_gather_object("x")


def other_source_of_an_object(rank: int, c: Any) -> None:
    c.broadcast_object("x", int(rank == 1))


def a_rank_stops(rank: int, c: Any) -> None:
    for size in range(1, 10 if rank != 1 else 8):
        sends(c, size)
    if rank == 1:
        time.sleep(TIMEOUT_S + 0.5)  # longer than the others have patience


def a_rank_is_late(rank: int, c: Any) -> None:
    sends(c, 3)
    if rank == 1:
        time.sleep(TIMEOUT_S + 0.5)
    sends(c, 4)


CASES: dict[str, tuple[Callable[[int, Any], None], int, str]] = {
    "order": (other_order, 0, "differ in name"),
    "shape": (other_shape, 1, "differ in shape"),
    "dtype": (other_dtype, 1, "differ in dtype"),
    "root": (other_root, 1, "differ in root"),
    "sink": (other_sink, 0, "differ in root"),
    "operation": (other_operation, 0, "differ in operation"),
    "object": (other_source_of_an_object, 0, "differ in root"),
    "stops": (a_rank_stops, 7, "rank 1 issued none within 3 s"),
    "late": (a_rank_is_late, 1, "rank 1 issued none within 3 s"),
}


def _cases(rank: int, world_size: int) -> dict[str, tuple[str, str, float]]:
    """What every case ends with, again at the next collective, and after how many seconds."""
    found = {}
    for name, (case, _, _) in CASES.items():
        patience_s = TIMEOUT_S if name in ("stops", "late") else 60.0
        communicator = get_communicator().checked(patience_s)  # type: ignore[attr-defined]
        messages = []
        start_s = time.monotonic()
        for action in (lambda case=case, c=communicator: case(rank, c), communicator.barrier):
            try:
                action()
                messages.append("")
            except CollectiveError as error:
                messages.append(str(error))
        found[name] = (*messages, time.monotonic() - start_s)
        get_communicator().barrier()  # the group itself is as good as before
    return found


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, tuple[str, str, float]]]:
    return run_ranks(_cases, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_named_on_every_rank(name, world_size):
    _, number, problem = CASES[name]
    ends = [rank[name] for rank in on_ranks(world_size)]
    first, again = zip(*(end[:2] for end in ends), strict=True)
    if name == "stops":
        assert first[1] == "", "it has issued all that it wanted to"
        first = (first[0], again[1], *first[2:])  # and hears of it at its next collective
    assert set(first) == set(again) == {first[0]}, "the same text everywhere, and from then on"
    assert f"collective {number} of this communicator: " in first[0]
    assert problem in first[0]
    others = "rank 0" if world_size == 2 else "ranks 0, 2"
    assert f"\n  {others}: " in first[0]
    assert "\n  rank 1: " in first[0]


def test_both_sides_and_the_last_ones_before_are_told():
    assert on_ranks(3)[2]["shape"][0] == (
        "collective 1 of this communicator: the ranks differ in shape\n"
        "  ranks 0, 2: all_reduce kfac_FactorComm float32[5] on cpu\n"
        "  rank 1: all_reduce kfac_FactorComm float32[6] on cpu\n"
        "the last ones before, the same on every rank:\n"
        "  0: all_reduce kfac_FactorComm float32[3] on cpu"
    )
    text = on_ranks(2)[0]["root"][0]
    assert "rank 0: broadcast kfac_InverseComm float32[3] on cpu from rank 0\n" in text
    assert "rank 1: broadcast kfac_InverseComm float32[3] on cpu from rank 1\n" in text
    stopped = on_ranks(2)[0]["stops"][0].splitlines()
    assert stopped[-5:] == [f"  {k}: all_reduce kfac_FactorComm float32[{k + 1}] on cpu" for k in range(2, 7)]


def test_it_ends_in_bounded_time():
    """Differences at once; a rank that is missing after the timeout."""
    for ends in on_ranks(3):
        for name, (_, _, seconds) in ends.items():
            assert seconds < TIMEOUT_S + 20, name


# ---------------------------------------------------------------------- what is right passes


FURTHER = {"dp_kfac": "dp_kfac", "sgd": "sgd", "bfloat16": {"name": "spdkfac", "message_dtype": "bfloat16"}}


def _trained(rank: int, world_size: int, schedules: Mapping[str, Any], compared: bool) -> dict[str, Any]:
    """Schedules whose parameters are others than without the checks, and what the checks have done."""
    plain = get_communicator()
    checked = get_communicator(check_collectives=True)
    assert get_communicator() is checked, "once on, it stays"
    different = []
    for name, schedule in schedules.items():
        parameters = Run(rank, world_size, schedule, checked).steps(2).parameters()
        if compared and not torch.equal(parameters, Run(rank, world_size, schedule, plain).steps(2).parameters()):
            different.append(name)
    return {"different": different, "issued": checked._number, "keys": checked._store.num_keys()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("world_size", "schedules", "compared"), [(2, OWNED | FURTHER, True), (3, SCHEDULES | FURTHER, False)]
)
def test_every_schedule_passes_and_nothing_changes(world_size, schedules, compared):
    for rank in run_ranks(_trained, world_size, schedules, compared):
        assert rank["different"] == []
        assert rank["issued"] > 10 * len(schedules), "the control: it was on"
        assert rank["keys"] < 100, "what has been agreed on is removed"


def _plain_group(rank: int, world_size: int) -> float:
    a, b = torch.tensor([1.0]), torch.tensor([10.0])
    for tensor in (a, b)[:: -1 if rank else 1]:
        get_communicator().all_reduce(tensor, "kfac_FactorComm").wait()
    return a.item()


def test_control_without_the_checks_another_order_gives_wrong_sums():
    assert run_ranks(_plain_group, 2) == [11.0, 11.0]


# ---------------------------------------------------------------------- how it is turned on


def _by_environment(rank: int, world_size: int, level: str, store: str) -> tuple[str, float]:
    shutdown()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    torch.distributed.set_debug_level_from_env()  # as torch does when it is imported
    init_distributed(rank=rank, world_size=world_size, init_method=f"file://{store}", timeout_s=60)
    run = Run(rank, world_size, "spdkfac").steps(2)
    return type(run.kfac._communicator).__name__, run.parameters().sum().item()


def test_torchs_own_debug_level_turns_it_on(tmp_path):
    kinds, results = zip(
        *(run_ranks(_by_environment, 2, level, str(tmp_path / level))[1] for level in ("DETAIL", "INFO")), strict=True
    )
    assert kinds == ("CheckedCommunicator", "DeepSpeedCommunicator")
    assert results[0] == results[1]


def test_one_rank_needs_no_checks():
    assert isinstance(get_communicator(check_collectives=True), LocalCommunicator)


class Broken(HashStore):
    """Of a host that has ended."""

    def check(self, keys):
        raise RuntimeError("connection reset")


def test_a_store_without_a_host_is_an_error_too():
    communicator = CheckedCommunicator(LocalCommunicator(), Broken())
    with pytest.raises(CollectiveError, match=r"collective 0 .*store does not answer.*connection reset"):
        communicator.barrier()


def test_kfac_works_on_one_checked_rank():
    store = HashStore()
    communicator = CheckedCommunicator(LocalCommunicator(), store)
    KFAC(torch.nn.Linear(2, 2), communicator=communicator)
    assert communicator._number > 0
    assert communicator.all_gather_object(3) == [3]
    assert communicator.broadcast_object(4) == 4
