"""What is trained, on what, and how far: the three workloads of the comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import Batch, Data, load_data
from experiments.groups import DataSettings
from experiments.models import build_model
from experiments.objectives import Objective, objective_of
from experiments.sharding import Shards, derive_seed


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on its data with a budget.

    Args:
        name, title: for the command line, for people.
        model: of :func:`experiments.models.build_model`.
        options: its further arguments.
        data: the images or the text.
        batch_size: samples per step.
        budget: steps after which a run that has not met the target has missed it.
        every: steps between evaluations.
        metric: ``loss`` or the objective's metric, of the evaluated samples.
        higher: whether a higher metric is better.
        decimals: decimal places of targets, which are rounded towards the easier side.
        training: whether the metric is of training samples (else of test samples).
        samples: how many samples are evaluated, the same ones always (None: all).
        refresh: training images whose BatchNorm statistics an evaluation uses, the same ones always. The running
            averages of so few steps would say how fast they follow the weights, not how good the weights are.
    """

    name: str
    title: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    data: DataSettings
    batch_size: int
    budget: int
    every: int
    metric: str
    higher: bool = False
    decimals: int = 2
    training: bool = False
    samples: int | None = None
    refresh: int = 0

    @property
    def objective(self) -> Objective:
        """The loss."""
        return objective_of(self.model)

    @cached_property
    def source(self) -> Data:
        """The data."""
        return load_data(self.data, raw=self.objective.raw)

    def build(self, seed: int) -> nn.Module:
        """A fresh model, a function of the seed."""
        torch.manual_seed(derive_seed(seed, "model"))
        data = self.source
        return build_model(self.model, num_classes=data.num_classes, input_shape=data.input_shape, **self.options)

    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of a step, counted from 0: a function of the seed and the step."""
        shards = Shards(size=self.source.train_size, batch_size=self.batch_size, seed=derive_seed(seed, "batches"))
        request = shards.indices(step), derive_seed(seed, "augment", step)
        return next(iter(self.source.training_batches([request])))

    @cached_property
    def evaluated(self) -> Batch:
        """The samples that are evaluated."""
        data = self.source
        size = data.train_size if self.training else data.test_size
        chosen = torch.arange(min(size, self.samples or size))
        batches = data.training_batches([(chosen, 0)]) if self.training else data.test_batches([chosen])
        return next(iter(batches))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """The metric of a model, which stays in training mode."""
        if self.refresh:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.reset_running_stats()
                    module.momentum = None  # the average over all batches since then, which is one
            model(next(iter(self.source.training_batches([(torch.arange(self.refresh), 0)])))[0])
        inputs, labels = self.evaluated
        model.eval()
        targets, outputs = self.objective.targets(inputs, labels), model(inputs)
        model.train()
        value: Tensor
        if self.metric == "loss":
            value = self.objective.loss(outputs, targets)
        else:
            value = self.objective.measure(outputs, targets)
        return float(value)

    def rounded(self, target: float) -> float:
        """A target of few decimals, not harder than the given one."""
        scale = 10.0**self.decimals
        return (math.floor if self.higher else math.ceil)(round(target * scale, 6)) / scale

    def worst(self, values: Iterable[float]) -> float:
        """The worst of several metrics."""
        return min(values) if self.higher else max(values)

    def meets(self, value: float, target: float) -> bool:
        """Whether a metric is at least as good as the target."""
        return value >= target if self.higher else value <= target


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="resnet20",
            title="ResNet-20, handwritten digits at 16x16, batch 128: test accuracy",
            model="resnet20",
            data=DataSettings(name="digits", image_size=16),
            batch_size=128,
            budget=80,
            every=2,
            metric="accuracy",
            higher=True,
            decimals=3,
            refresh=256,
        ),
        Workload(
            name="autoencoder",
            title="Autoencoder 64-128-64-32-8-32-64-128-64, handwritten digits, batch 256: squared error in training",
            model="autoencoder",
            options={"hidden": (128, 64, 32, 8)},
            data=DataSettings(name="digits", image_size=8),
            batch_size=256,
            budget=1000,
            every=5,
            metric="squared_error",
            training=True,
        ),
        Workload(
            name="gpt",
            title="GPT of 2 layers, width 64, on 64 characters, batch 32: test loss",
            model="gpt",
            options={"depth": 2, "width": 64, "heads": 2},
            data=DataSettings(name="text", context=64),
            batch_size=32,
            budget=400,
            every=5,
            metric="loss",
            samples=64,
        ),
    )
}

QUICK: dict[str, dict[str, Any]] = {
    "resnet20": {"data": DataSettings(name="digits", image_size=8), "batch_size": 16, "budget": 8, "refresh": 32},
    "autoencoder": {"options": {"hidden": (16, 4)}, "budget": 40},
    "gpt": {
        "options": {"depth": 1, "width": 16, "heads": 2},
        "data": DataSettings(name="text", context=16),
        "batch_size": 8,
        "budget": 20,
    },
}
"""What differs in the small forms that tests run."""


@cache
def find_workload(name: str, *, quick: bool = False) -> Workload:
    """The workload of a name, or its small form; one object each, so that its data are read once."""
    return replace(WORKLOADS[name], **QUICK[name]) if quick else WORKLOADS[name]
