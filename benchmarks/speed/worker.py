"""One rank of the speed benchmark: trains the same model under several schedules, whichever it is told to.

Every schedule has its own copy of the model and its own preconditioner; all of them live in this one process.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cost_worker import DAMPING, KL_CLIP, LEARNING_RATE
from benchmarks.ranks import Usage, obey
from benchmarks.speed.variants import BASELINE, VARIANTS
from benchmarks.workloads import WORKLOADS, Workload, common_layers
from kfac import KFAC, KFACConfig
from kfac.communication import Communicator, init_from_torchrun, shutdown
from kfac.planning import ClusterProfile, ModelProfile
from kfac.planning.costs import inverse_dim
from kfac.planning.plan import factors_of
from kfac.profiling import model_profile_from, profile_cluster
from kfac.recording import Recorder
from kfac.replanning import ITERATIONS, WARM_UP, Replanner
from kfac.replanning_decision import Replanning
from kfac.timeline import Timeline


class Contender:
    """One schedule with a model of its own."""

    def __init__(
        self,
        schedule: Mapping[str, Any],
        workload: Workload,
        communicator: Communicator,
        profiles: tuple[ModelProfile, ClusterProfile] | tuple[None, None] = (None, None),
    ) -> None:
        self.model = workload.build()
        self.recorder = Recorder(rank=communicator.rank)
        config = KFACConfig(
            lr=LEARNING_RATE, damping=DAMPING, kl_clip=KL_CLIP, include=tuple(common_layers(self.model))
        )
        self.kfac = KFAC(
            self.model,
            config,
            schedule,
            average_gradients=True,
            model_profile=profiles[0],
            cluster_profile=profiles[1],
            recorder=self.recorder,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, momentum=0.9)
        self._batches = workload.batches(communicator.rank)
        self.last: Timeline | None = None

    def run(self, iterations: int) -> float:
        """Seconds of so many iterations, of which the last is recorded."""
        batches = list(itertools.islice(self._batches, iterations))
        start = time.perf_counter()
        for number, batch in enumerate(batches, start=1):
            if number == iterations:
                self.recorder.start()
            self._iterate(*batch)
        seconds = time.perf_counter() - start
        self.last = self.recorder.stop()
        return seconds

    def _iterate(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        with self.recorder.span("FF", "forward"):
            loss = F.cross_entropy(self.model(inputs), labels)
        with self.recorder.span("BP", "backward"):
            loss.backward()
        self.kfac.step()
        self.optimizer.step()

    def decide(self, name: str, turns: int) -> Replanning:
        """Train until the plan is decided by the run's own times, as ``auto`` does."""
        replanner = Replanner(self.kfac, self.recorder, after=WARM_UP + ITERATIONS, turns=turns, name=name)
        while not replanner.done:
            batch = next(self._batches)
            with replanner.iteration():
                self._iterate(*batch)
        assert replanner.result is not None
        return replanner.result


class Worker:
    """The commands that a rank obeys; all are collective."""

    def __init__(self, workload: Workload, communicator: Communicator) -> None:
        self._workload, self._communicator = workload, communicator
        self._contenders = {BASELINE: Contender(VARIANTS[BASELINE], workload, communicator)}
        self._baseline: list[Timeline] = []

    def layers(self) -> list[str]:
        """The layers that are preconditioned."""
        return sorted(layer.name for layer in self._contenders[BASELINE].kfac.layers)

    def turn(self, variant: str, iterations: int) -> dict[str, Any]:
        """Train so many iterations: what each takes, and where the time of the last one went."""
        contender = self._contenders[variant]
        self._communicator.barrier()
        usage = Usage()
        seconds = contender.run(iterations) / iterations
        used = usage.per(iterations)
        timeline = contender.last
        assert timeline is not None
        if variant == BASELINE:
            self._baseline.append(timeline)
        return {
            "seconds": seconds,
            **used,
            "recorded_s": timeline.iteration_s,
            "exposed_s": timeline.breakdown_s(),
            "busy_s": timeline.busy_s(),
        }

    def cluster(self, repeats: int) -> dict[str, Any]:
        """What collectives and inverses take on these links; the same profile on every rank."""
        sizes = self._contenders[BASELINE].kfac.layer_sizes
        dims = [inverse_dim(factor.size) for factor in factors_of(sizes)]
        return profile_cluster(self._communicator, "cpu", dims, repeats=repeats).to_dict()

    def model(self) -> dict[str, Any]:
        """What the layers take, by the baseline's iterations since this was asked last; of this rank."""
        sizes = self._contenders[BASELINE].kfac.layer_sizes
        timelines, self._baseline = self._baseline, []
        return model_profile_from(timelines, sizes, self._workload.title).to_dict()

    def plan(
        self, variants: Sequence[str], model: Mapping[str, Any], cluster: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Plan these variants for the profiles; every other one's model is built. Their plans."""
        profiles = ModelProfile.from_dict(model), ClusterProfile.from_dict(cluster)
        self._contenders[BASELINE].kfac.replan(*profiles)
        for name in variants:
            if name not in self._contenders:
                self._contenders[name] = Contender(VARIANTS[name], self._workload, self._communicator, profiles)
        return {name: self._contenders[name].kfac.plan.to_dict() for name in variants}

    def decide(self, variant: str, turns: int) -> dict[str, Any]:
        """Have a variant's run decide on its plan: the plan that stays, and what was decided and why."""
        found = self._contenders[variant].decide(self._workload.title, turns)
        return {"plan": found.kept.to_dict(), "decision": found.to_dict(), "said": str(found)}

    def traces(self, folder: str) -> None:
        """Write every contender's last recorded iteration into a folder."""
        for name, contender in self._contenders.items():
            if contender.last:
                contender.last.to_chrome_trace(Path(folder) / f"{name}.rank{self._communicator.rank}.json")


def main() -> None:
    """Entry point of a rank; its place is in torchrun's variables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    communicator = init_from_torchrun(timeout_s=300)
    worker = Worker(WORKLOADS[arguments.workload], communicator)
    obey({name: getattr(worker, name) for name in ("layers", "turn", "cluster", "model", "plan", "decide", "traces")})
    shutdown()


if __name__ == "__main__":
    main()
