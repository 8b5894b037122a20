"""Runs a function on several ranks of one machine, through the project's own communication layer."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    # torch.optim imports torch._dynamo when its first optimizer is made: more than a second in every rank
    ["torch", "torch.distributed", "torch._dynamo", "deepspeed", "deepspeed.ops"]
)


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, path: str, args: tuple[Any, ...], pipe: Any
) -> None:
    import torch

    from kfac.communication import init_distributed, shutdown

    torch.set_num_threads(1)
    try:
        if world_size > 1:
            init_distributed(rank=rank, world_size=world_size, init_method=f"file://{path}", timeout_s=60)
        result = function(rank, world_size, *args)
        shutdown()
        buffer = io.BytesIO()  # as bytes: tensors sent as such would share the memory of a process that has ended
        torch.save(result, buffer)
        pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """``function(rank, world_size, *args)`` on every rank; the results in rank order.

    Raises:
        AssertionError: with a rank's traceback if one fails, or if one does not answer in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_rank, args=(function, rank, world_size, path, args, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        import torch

        results, failures = [], []
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout_s), f"rank {rank} of {world_size} gave no answer in {timeout_s} s"
                ok, value = pipe.recv()
                if not ok:
                    failures.append(f"rank {rank}:\n{value}")
                    raise AssertionError(failures[0])
                results.append(torch.load(io.BytesIO(value), weights_only=False))
        finally:
            for process in processes:
                process.kill() if failures else process.join(10)
                process.kill()
        return results
