"""One rank of the overlap benchmark: trains the same model under several schedules in turn, block by block.

Every schedule has its own copy of the model and its own preconditioner; all of them live in this one process, and short
blocks of iterations alternate between them, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from experiments.models import build_model
from kfac import KFAC, KFACConfig
from kfac.communication import Communicator, init_from_torchrun, shutdown
from kfac.planning.costs import inverse_dim
from kfac.planning.plan import factors_of
from kfac.profiling import model_profile_from, profile_cluster
from kfac.recording import Recorder
from kfac.timeline import Timeline

WARM_UP, PROFILED = 3, 5


class Contender:
    """One schedule with a model of its own."""

    def __init__(self, schedule: str, model: str, batch_size: int, communicator: Communicator) -> None:
        torch.manual_seed(0)
        self.model = build_model(model, num_classes=10, input_shape=(3, 32, 32))
        self.recorder = Recorder(rank=communicator.rank)
        config = KFACConfig(layers=("linear", "convolution"))  # as the paper
        self.kfac = KFAC(self.model, config, schedule, average_gradients=True, recorder=self.recorder)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(communicator.rank)
        self.x = torch.randn(batch_size, 3, 32, 32, generator=generator)
        self.y = torch.randint(0, 10, (batch_size,), generator=generator)

    def iterate(self) -> None:
        """One training iteration."""
        self.optimizer.zero_grad()
        with self.recorder.span("FF", "forward"):
            loss = F.cross_entropy(self.model(self.x), self.y)
        with self.recorder.span("BP", "backward"):
            loss.backward()
        self.kfac.step()
        self.optimizer.step()

    def recorded(self) -> Timeline:
        """The timeline of one more iteration."""
        self.recorder.start()
        self.iterate()
        return self.recorder.stop()


def compete(arguments: argparse.Namespace, communicator: Communicator) -> dict[str, Any]:
    """Warm up, profile, plan, then alternate blocks; what rank 0 measured."""
    names = arguments.schedules.split(",")
    contenders = {name: Contender(name, arguments.model, arguments.batch_size, communicator) for name in names}
    for contender in contenders.values():
        for _ in range(WARM_UP):
            contender.iterate()
    planner = next(c for name, c in contenders.items() if name != "sgd")
    timelines = [planner.recorded() for _ in range(PROFILED)]
    sizes = planner.kfac.layer_sizes
    model_profile = model_profile_from(timelines, sizes, arguments.model)
    cluster_profile = profile_cluster(communicator, "cpu", [inverse_dim(factor.size) for factor in factors_of(sizes)])
    for contender in contenders.values():
        contender.kfac.replan(model_profile, cluster_profile)
        for _ in range(2):
            contender.iterate()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    recorded: dict[str, list[Timeline]] = {name: [] for name in names}
    for round_number in range(arguments.rounds):
        first = round_number % len(names)
        for name in [*names[first:], *names[:first]]:
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(arguments.iterations):
                contenders[name].iterate()
            seconds[name].append((time.perf_counter() - start) / arguments.iterations)
            recorded[name].append(contenders[name].recorded())
    for name in names:  # every rank's last timeline, for the pictures
        recorded[name][-1].to_chrome_trace(arguments.output.parent / f"{name}.rank{communicator.rank}.json")
    return {
        "plans": {name: str(c.kfac.plan) for name, c in contenders.items()},
        "seconds": seconds,
        "exposed_s": {name: _medians([t.breakdown_s() for t in recorded[name]]) for name in names},
        "hidden_s": {name: _medians([t.hidden_s() for t in recorded[name]]) for name in names},
        "busy_s": {name: _medians([t.busy_s() for t in recorded[name]]) for name in names},
        "bytes": 4 * sum(m.elements for m in contenders[names[-1]].kfac.plan.messages),
        "cluster_profile": cluster_profile.to_dict(),
        "model_profile": model_profile.to_dict(),
    }


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    """Entry point of a rank; its place is in torchrun's variables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--schedules", default="sgd,dkfac,mpdkfac,spdkfac")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    communicator = init_from_torchrun(timeout_s=300)
    result = compete(arguments, communicator)
    if communicator.rank == 0:
        arguments.output.write_text(json.dumps(result, indent=1))
    communicator.barrier()
    shutdown()


if __name__ == "__main__":
    main()
