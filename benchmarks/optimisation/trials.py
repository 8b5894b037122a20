"""One training run: how many steps it takes to the target."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.optimisation.contenders import CONTENDERS, Training
from benchmarks.optimisation.workloads import Workload, find_workload
from experiments.data import Batch
from experiments.sharding import derive_seed
from kfac import NonFiniteError
from kfac.inversion import FactorInversionError

MISS = math.inf
"""Steps, and seconds, of a run that does not meet the target within its budget (Dahl et al. 2023, section 4)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is a function of these values.

    Args:
        stage: ``pilot``, ``search`` or ``evaluation``.
        workload, contender: their names.
        quick: whether the workload is the small form for tests.
        seed: of the model's initial values, the order of the batches and sampled labels.
        steps: the most that are taken.
        target: the metric at which the run ends, or None: it takes all steps.
        hyperparameters: of the contender.
    """

    stage: str
    workload: str
    contender: str
    quick: bool
    seed: int
    steps: int
    target: float | None
    hyperparameters: dict[str, float] = field(hash=False)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run.

    Args:
        curve: steps taken and metric at each evaluation.
        met: steps after which the target was met first, or None.
        diverged: why the run ended early, or None.
    """

    curve: tuple[tuple[int, float], ...]
    met: int | None
    diverged: str | None = None

    @property
    def steps(self) -> float:
        """Steps to the target, infinite for a miss."""
        return MISS if self.met is None else self.met

    def best(self, workload: Workload) -> float:
        """The best metric of all evaluations; the worst possible one if there is none."""
        values = [value for _, value in self.curve if math.isfinite(value)]
        worst = -math.inf if workload.higher else math.inf
        return (max if workload.higher else min)(values, default=worst)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """The value of a JSON form."""
        curve = tuple((int(step), float(value)) for step, value in data["curve"])
        return cls(curve=curve, met=data["met"], diverged=data["diverged"])


def start(job: Job) -> tuple[Workload, Training]:
    """The workload and a fresh model with its optimizer."""
    workload = find_workload(job.workload, quick=job.quick)
    model = workload.build(job.seed)
    training = CONTENDERS[job.contender].start(model, job.hyperparameters)
    torch.manual_seed(derive_seed(job.seed, "training"))  # sampled labels
    return workload, training


def take_step(workload: Workload, training: Training, batch: Batch) -> float:
    """One training step; the loss before it."""
    inputs, labels = batch
    objective = workload.objective
    targets, outputs = objective.targets(inputs, labels), training.model(inputs)
    loss = objective.loss(outputs, targets)
    with training.curvature(*objective.as_known_loss(outputs)):
        loss.backward()
    training.step()
    return float(loss.detach())


def prepare_worker() -> None:
    """What a process that runs trials starts with: one thread, and silence about layers that a step does not use."""
    torch.set_num_threads(1)
    logging.getLogger("kfac").setLevel(logging.ERROR)


def run(job: Job) -> Outcome:
    """Train until the target is met, the budget is spent or the loss is no number."""
    workload, training = start(job)
    curve: list[tuple[int, float]] = []
    try:
        for step in range(job.steps):
            loss = take_step(workload, training, workload.batch(job.seed, step))
            if not math.isfinite(loss):
                return Outcome(curve=tuple(curve), met=None, diverged=f"loss {loss} in step {step}")
            if (step + 1) % workload.every == 0:
                value = float(f"{workload.evaluate(training.model):.5g}")
                curve.append((step + 1, value))
                if job.target is not None and workload.meets(value, job.target):
                    return Outcome(curve=tuple(curve), met=step + 1)
    except (NonFiniteError, FactorInversionError) as error:
        return Outcome(curve=tuple(curve), met=None, diverged=str(error))
    finally:
        training.close()
    return Outcome(curve=tuple(curve), met=None)
