"""One process of the cost benchmark: trains one workload with one optimizer, whenever it is told to.

It reads commands from standard input, a number of steps each, and answers each with a line of JSON. Nothing at the top
of this file may import kfac: the process that measures kfac-pytorch imports a package of that name from its checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.checkout import import_kaisa
from benchmarks.workloads import WORKLOADS, common_layers

LEARNING_RATE, DAMPING, KL_CLIP = 1e-3, 1e-3, 1e-3
"""The two last are the defaults of both K-FACs; the first keeps the model where it is, whatever the optimizer."""

Preconditioner = tuple[Callable[[], None], list[str]]
"""What is called between the backward pass and the optimizer's step, and the layers that it preconditions."""


def sgd(model: nn.Module, interval: int, kaisa: Path | None) -> Preconditioner:
    """No preconditioner."""
    return lambda: None, []


def _ours(model: nn.Module, interval: int, include: tuple[str, ...]) -> Preconditioner:
    from kfac import KFAC, KFACConfig

    config = KFACConfig(
        lr=LEARNING_RATE,
        damping=DAMPING,
        kl_clip=KL_CLIP,
        factor_interval=interval,
        inverse_interval=interval,
        include=include,
    )
    kfac = KFAC(model, config, "kfac")
    return kfac.step, [layer.name for layer in kfac.layers]


def ours(model: nn.Module, interval: int, kaisa: Path | None) -> Preconditioner:
    """This project's K-FAC on the layers that both cover."""
    return _ours(model, interval, tuple(common_layers(model)))


def ours_all(model: nn.Module, interval: int, kaisa: Path | None) -> Preconditioner:
    """This project's K-FAC on every layer that it covers."""
    return _ours(model, interval, ("*",))


def kaisa(model: nn.Module, interval: int, kaisa: Path | None) -> Preconditioner:
    """kfac-pytorch with inverses (its faster method), from a checkout."""
    assert kaisa is not None
    preconditioner = import_kaisa(kaisa)(
        model,
        factor_update_steps=interval,
        inv_update_steps=interval,
        damping=DAMPING,
        kl_clip=KL_CLIP,
        lr=LEARNING_RATE,
        compute_method="inverse",
    )
    return preconditioner.step, [name for name, _ in preconditioner._layers.values()]


OPTIMIZERS: dict[str, Callable[[nn.Module, int, Path | None], Preconditioner]] = {
    "sgd": sgd,
    "ours": ours,
    "ours_all": ours_all,
    "kaisa": kaisa,
}


def peak_bytes() -> int:
    """This process's peak resident memory; unlike getrusage's, it does not begin with that of the parent."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    """Set up, say so, and obey until standard input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--interval", type=int, required=True, help="steps between updates of factors and inverses")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kaisa", type=Path)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    torch.set_num_threads(arguments.threads)
    workload = WORKLOADS[arguments.workload]
    model, batches = workload.build(), workload.batches()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    precondition, layers = OPTIMIZERS[arguments.optimizer](model, arguments.interval, arguments.kaisa)
    answer(layers=sorted(layers))
    for command in sys.stdin:
        seconds = []
        for _ in range(int(command)):
            inputs, labels = next(batches)
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            precondition()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        answer(seconds=seconds, peak_bytes=peak_bytes())


if __name__ == "__main__":
    main()
