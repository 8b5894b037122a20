"""The one place that talks to ``deepspeed.comm`` (and to torch.distributed beneath it).

Every collective is asynchronous, in place and summed; all of a communicator's collectives must be issued by one thread
and in the same order on every rank. K-FAC has a process group of its own, so that its traffic does not mix with that of
the training loop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

THREADS_END_S = 1.0
"""How long :func:`shutdown` waits for the group's threads; they stay while a collective is under way."""


class CommunicationError(RuntimeError):
    """A collective failed, because another rank has ended, hangs, or issues other collectives."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block (on a GPU: make the current stream wait) until the result is there.

        Raises:
            CommunicationError: if the collective failed, for example because another rank died.
        """

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in any thread, when the result is there (CPU tensors only)."""


class Communicator(Protocol):
    """What K-FAC asks of a group of ranks."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, name: str) -> Work:
        """Sum ``tensor`` over the ranks, in place."""

    def reduce(self, tensor: Tensor, dst: int, name: str) -> Work:
        """Sum ``tensor`` into rank ``dst``'s, in place; on other ranks it is left undefined."""

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Work:
        """Overwrite ``tensor`` with rank ``src``'s."""

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank ``src``'s picklable object, on every rank (blocking)."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable object, in rank order (blocking)."""

    def barrier(self) -> None:
        """Wait for every rank."""


class _Done:
    """The work of a collective that had nothing to do."""

    def wait(self) -> None:
        pass

    def on_done(self, callback: Callable[[], None]) -> None:
        callback()


class LocalCommunicator:
    """One rank: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, name: str) -> Work:  # noqa: D102
        return _Done()

    def reduce(self, tensor: Tensor, dst: int, name: str) -> Work:  # noqa: D102
        return _Done()

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Work:  # noqa: D102
        return _Done()

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:  # noqa: D102
        return obj

    def all_gather_object(self, obj: Any) -> list[Any]:  # noqa: D102
        return [obj]

    def barrier(self) -> None:  # noqa: D102
        pass


class _DeepSpeedWork:
    def __init__(self, handle: Any, what: str, rank: int) -> None:
        self._handle, self._what, self._rank = handle, what, rank

    def wait(self) -> None:
        begun_s = time.monotonic()
        try:
            self._handle.wait()
        except RuntimeError as error:
            raise _lost(self._what, self._rank, begun_s, error) from error

    def on_done(self, callback: Callable[[], None]) -> None:
        self._handle.get_future().add_done_callback(lambda _: callback())


def _lost(what: str, rank: int, begun_s: float, error: Exception) -> CommunicationError:
    return CommunicationError(
        f"{what}: rank {rank} has waited {time.monotonic() - begun_s:.1f} s for the others, then it failed: {error}. "
        "Another rank has ended, was stopped, hangs, or issues other collectives: its own log says more; with "
        "check_collectives=true (TORCH_DISTRIBUTED_DEBUG=DETAIL) all ranks tell who it is and where"
    )


class DeepSpeedCommunicator:
    """All ranks of the job, through ``deepspeed.comm``; its construction is collective."""

    def __init__(self) -> None:
        import deepspeed.comm as dist

        self._dist = dist
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        # Made by torch, because deepspeed.comm's new_group takes no timeout and would wait for half an hour.
        ranks = list(range(self.world_size))
        self._joined: Any = torch.distributed.new_group(ranks, timeout=_default_timeout(), group_desc="kfac")
        self._checkers = 0

    @property
    def _group(self) -> Any:
        if self._joined is None:
            raise RuntimeError(
                "these ranks have been left (kfac.communication.shutdown): join them and make a new KFAC"
            )
        return self._joined

    def leave(self) -> Any:
        """Forget the group, which this returns: it is destroyed with the last reference to it."""
        group, self._joined = self._joined, None
        return group

    def all_reduce(self, tensor: Tensor, name: str) -> Work:  # noqa: D102
        work = self._dist.all_reduce(tensor, group=self._group, async_op=True, log_name=name)
        return _DeepSpeedWork(work, f"all_reduce {name}", self.rank)

    def reduce(self, tensor: Tensor, dst: int, name: str) -> Work:  # noqa: D102
        work = self._dist.reduce(tensor, dst, group=self._group, async_op=True, log_name=name)
        return _DeepSpeedWork(work, f"reduce {name}", self.rank)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Work:  # noqa: D102
        work = self._dist.broadcast(tensor, src, group=self._group, async_op=True, log_name=name)
        return _DeepSpeedWork(work, f"broadcast {name}", self.rank)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:  # noqa: D102
        box = [obj if self.rank == src else None]
        group = self._group
        self._blocking("broadcast_object", lambda: self._dist.broadcast_object_list(box, src=src, group=group))
        return box[0]

    def all_gather_object(self, obj: Any) -> list[Any]:  # noqa: D102
        gathered: list[Any] = [None] * self.world_size
        group = self._group
        self._blocking("all_gather_object", lambda: self._dist.all_gather_object(gathered, obj, group=group))
        return gathered

    def barrier(self) -> None:  # noqa: D102
        group = self._group
        self._blocking("barrier", lambda: self._dist.barrier(group=group))

    def _blocking(self, what: str, action: Callable[[], Any]) -> None:
        begun_s = time.monotonic()
        try:
            action()
        except RuntimeError as error:
            raise _lost(what, self.rank, begun_s, error) from error

    def checked(self, timeout_s: float | None = None) -> Communicator:
        """These ranks in debug mode; collective.

        Args:
            timeout_s: how long every collective waits for all ranks; None: for the default of
                :class:`kfac.checked_communication.CheckedCommunicator`.
        """
        from torch.distributed import distributed_c10d

        from kfac.checked_communication import TIMEOUT_S, CheckedCommunicator

        common = distributed_c10d._get_default_store()
        name = self._group.group_name
        store = distributed_c10d.PrefixStore(f"kfac_checks/{name}/{self._checkers}", common)
        self._checkers += 1
        return CheckedCommunicator(self, store, TIMEOUT_S if timeout_s is None else timeout_s)


def _default_timeout() -> timedelta | None:
    """The default group's timeout; None (torch's default) where this version does not tell."""
    backend = torch.distributed.get_backend()
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    try:
        options = torch.distributed.group.WORLD._get_backend(device).options  # type: ignore[union-attr]
        timeout = options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


@dataclass(frozen=True)
class _Adopted:
    """The default group of torch.distributed, K-FAC's own, and how it is used."""

    world: Any
    ranks: DeepSpeedCommunicator
    communicator: Communicator


_adopted: _Adopted | None = None


def _adopt_torch_group() -> None:
    """Let ``deepspeed.comm`` use the default group of torch.distributed, or make that group."""
    import deepspeed
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    if deepspeed.comm.is_initialized():
        return
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile a shared-memory operator with a C++ compiler here (half a minute, or an error without
        # one). Only its inference path uses it. The table is read in one place, when the backend is made.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False
    )


def get_communicator(*, check_collectives: bool | None = None) -> Communicator:
    """The communicator of this process: all ranks where torch.distributed or deepspeed.comm is initialised, else one.

    Collective on its first call after initialisation.

    Args:
        check_collectives: whether ranks compare every collective before they issue it, to find out why they hang (slow,
            see :mod:`kfac.checked_communication`); once on, it stays. None: if ``TORCH_DISTRIBUTED_DEBUG`` is
            ``DETAIL``. The same on every rank.
    """
    global _adopted  # noqa: PLW0603
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return LocalCommunicator()
    if distributed.get_world_size() == 1:
        return LocalCommunicator()
    world = distributed.group.WORLD
    if _adopted is None or _adopted.world is not world:
        _adopt_torch_group()
        ranks = DeepSpeedCommunicator()
        _adopted = _Adopted(world, ranks, ranks)
    if check_collectives is None:
        check_collectives = torch._C._distributed_c10d.get_debug_level() == torch._C._distributed_c10d.DebugLevel.DETAIL
    if check_collectives and _adopted.communicator is _adopted.ranks:
        _adopted = replace(_adopted, communicator=_adopted.ranks.checked())
    return _adopted.communicator


def init_distributed(
    *,
    rank: int,
    world_size: int,
    init_method: str,
    local_rank: int = 0,
    backend: str | None = None,
    timeout_s: float = 600.0,
    check_collectives: bool | None = None,
) -> Communicator:
    """Join the job's ranks and return their communicator; collective.

    Args:
        rank, world_size: of this process.
        init_method: the rendezvous, ``file:///path`` (fresh, on a file system that all ranks see) or ``tcp://host:port``.
        local_rank: which of its machine's devices this process uses.
        backend: ``gloo`` or ``nccl``; by default NCCL where there is a GPU.
        timeout_s: seconds after which a collective that other ranks do not join fails.
        check_collectives: see :func:`get_communicator`.
    """
    cuda = torch.cuda.is_available()
    backend = backend or ("nccl" if cuda else "gloo")
    if backend == "gloo":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["LOCAL_RANK"] = str(local_rank)
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    if world_size > 1:
        # It defines functions whose default arguments would hold the group that is there by then for ever.
        import deepspeed.comm  # noqa: F401
    torch.distributed.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    return get_communicator(check_collectives=check_collectives)


def init_from_torchrun(timeout_s: float = 600.0) -> Communicator:
    """:func:`init_distributed` with the variables that torchrun sets; one process if there are none; collective."""
    environment = os.environ
    if "RANK" not in environment:
        return get_communicator()
    return init_distributed(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        init_method=f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
        timeout_s=timeout_s,
    )


def shutdown() -> None:
    """Leave the job's ranks, if joined; their communicators are of no use any more.

    Unless a collective is under way, gloo's threads have ended when this returns. One that lets go of a tensor while
    Python takes itself apart asks for the interpreter's lock, which ends the thread, and that aborts the process.
    """
    global _adopted
    adopted, _adopted = _adopted, None
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    groups = [torch.distributed.group.WORLD]
    if adopted is not None:
        import deepspeed.comm

        groups.append(adopted.ranks.leave())
        del adopted
        deepspeed.comm.destroy_process_group()
    else:
        torch.distributed.destroy_process_group()
    # The last reference waits for the threads, and they wait for other ranks: not here, if these do not come.
    last = threading.Thread(target=groups.clear, name="kfac-shutdown", daemon=True)
    last.start()
    last.join(THREADS_END_S)
