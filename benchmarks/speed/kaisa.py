"""One rank of kfac-pytorch (KAISA) in the speed benchmark. Nothing imported at the top of this file may import kfac.

As in its examples, DistributedDataParallel averages the gradients during the backward pass.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.checkout import import_kaisa
from benchmarks.cost_worker import DAMPING, KL_CLIP, LEARNING_RATE
from benchmarks.ranks import Usage, obey
from benchmarks.workloads import WORKLOADS, Workload


class Contender:
    """One strategy with a model of its own."""

    def __init__(self, options: dict[str, Any], workload: Workload, preconditioner: Any) -> None:
        self.model = DistributedDataParallel(workload.build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, momentum=0.9)
        self.kfac = preconditioner(
            self.model,
            factor_update_steps=1,
            inv_update_steps=1,
            damping=DAMPING,
            kl_clip=KL_CLIP,
            lr=LEARNING_RATE,
            compute_method="inverse",
            **options,
        )
        self._batches = workload.batches(torch.distributed.get_rank())

    def run(self, iterations: int) -> float:
        """Seconds of so many iterations."""
        batches = list(itertools.islice(self._batches, iterations))
        start = time.perf_counter()
        for inputs, labels in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), labels).backward()
            self.kfac.step()
            self.optimizer.step()
        return time.perf_counter() - start


class Worker:
    """The commands that a rank obeys; all are collective."""

    def __init__(self, workload: Workload, checkout: Path) -> None:
        self._workload, self._preconditioner = workload, import_kaisa(checkout)
        self._contenders: dict[str, Contender] = {}

    def build(self, strategy: str, options: dict[str, Any]) -> list[str]:
        """Set up a strategy by its options; the layers that are preconditioned."""
        contender = Contender(options, self._workload, self._preconditioner)
        self._contenders[strategy] = contender
        return sorted(name.removeprefix("module.") for name, _ in contender.kfac._layers.values())

    def forget(self, strategy: str) -> None:
        """Free a strategy's memory."""
        del self._contenders[strategy]

    def turn(self, strategy: str, iterations: int) -> dict[str, Any]:
        """Train so many iterations: seconds, bytes and processor time per iteration."""
        torch.distributed.barrier()
        usage = Usage()
        seconds = self._contenders[strategy].run(iterations) / iterations
        return {"seconds": seconds, **usage.per(iterations)}


def main() -> None:
    """Entry point of a rank; its place is in torchrun's variables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--checkout", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=300),
    )
    worker = Worker(WORKLOADS[arguments.workload], arguments.checkout)
    obey({name: getattr(worker, name) for name in ("build", "forget", "turn")})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
