"""What a rank trains with, made from a configuration: model, optimizer and preconditioner."""

from __future__ import annotations

import fnmatch
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.config import CommonConfig
from experiments.data import Batch, Data
from experiments.devices import choose_device
from experiments.models import build_model
from experiments.objectives import Objective, objective_of
from experiments.ranks import Rank
from experiments.settings import ConfigError
from kfac import KFAC
from kfac.communication import Communicator, get_communicator, init_distributed
from kfac.config import KFACConfig
from kfac.planning import ClusterProfile, ModelProfile, ScheduleConfig
from kfac.recording import Recorder


@dataclass(frozen=True)
class Site:
    """Where a rank computes: its device and the ranks it talks to."""

    device: torch.device
    communicator: Communicator

    @classmethod
    def enter(cls, config: CommonConfig, rank: Rank) -> Site:
        """Join the ranks on the configured device."""
        torch.set_num_threads(config.threads)
        cuda = choose_device(config.device, rank.local_size) == "cuda"
        # SLURM may show each rank one GPU of its own.
        local_rank = rank.local_rank % torch.cuda.device_count() if cuda else rank.local_rank
        device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if rank.world_size == 1:
            return cls(device, get_communicator())
        communicator = init_distributed(
            rank=rank.rank,
            world_size=rank.world_size,
            local_rank=local_rank,
            init_method=rank.init_method,
            backend="nccl" if cuda else "gloo",
            check_collectives=config.check_collectives or None,
        )
        return cls(device, communicator)


@dataclass
class Learner:
    """One rank's model, optimizer and preconditioner, and how they take a step."""

    model: nn.Module
    optimizer: torch.optim.SGD
    preconditioner: KFAC
    recorder: Recorder
    objective: Objective
    label_smoothing: float
    accumulation_steps: int

    def step(self, batch: Batch, lr: float) -> tuple[Tensor, Tensor]:
        """One whole distributed iteration.

        Args:
            batch: this rank's inputs and labels, on its device.
            lr: the optimizer's learning rate.

        Returns:
            this rank's mean loss and the objective's metric, as tensors that nobody has waited for.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        steps = self.accumulation_steps
        losses, metrics = [], []
        for inputs, labels in zip(batch[0].chunk(steps), batch[1].chunk(steps), strict=True):
            targets = self.objective.targets(inputs, labels)
            with self.recorder.span("FF", "forward"):
                outputs = self.model(inputs)
                loss = self.objective.loss(outputs, targets, self.label_smoothing) / steps
            known, kind, weight = self.objective.as_known_loss(outputs)
            fisher = self.preconditioner.curvature(known, kind, weight / steps, targets=targets)
            with self.recorder.span("BP", "backward"), fisher:
                loss.backward()
            losses.append(loss.detach())
            metrics.append(self.objective.measure(outputs.detach(), targets) / steps)
        self.preconditioner.step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).sum()
        if self.preconditioner.adapts_damping:
            self.preconditioner.adapt_damping(loss, self._loss_again(batch))
        return loss, torch.stack(metrics).sum()

    @torch.no_grad()
    def _loss_again(self, batch: Batch) -> Tensor:
        """The batch's mean loss after the step."""
        steps = self.accumulation_steps
        again = []
        for inputs, labels in zip(batch[0].chunk(steps), batch[1].chunk(steps), strict=True):
            targets = self.objective.targets(inputs, labels)
            again.append(self.objective.loss(self.model(inputs), targets, self.label_smoothing) / steps)
        return torch.stack(again).sum()

    @torch.no_grad()
    def evaluate(self, batches: Any, site: Site) -> tuple[float, float]:
        """Loss and metric over all ranks' test batches; collective. Each rank uses its own BatchNorm averages."""
        totals = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        for inputs, labels in batches:
            there = inputs.to(site.device)
            targets = self.objective.targets(there, labels.to(site.device))
            outputs = self.model(there)
            terms = self.objective.terms(targets)
            loss, metric = self.objective.loss(outputs, targets), self.objective.measure(outputs, targets)
            totals += torch.tensor([float(loss) * terms, float(metric) * terms, terms], dtype=torch.float64)
        self.model.train()
        totals = sum_over_ranks(totals, site)
        return float(totals[0] / totals[2]), float(totals[1] / totals[2])


def sum_over_ranks(values: Tensor, site: Site) -> Tensor:
    """The sum of every rank's CPU tensor; collective and blocking."""
    there = values.to(site.device)
    site.communicator.all_reduce(there, "report").wait()
    return there.cpu()


def assemble(
    config: CommonConfig,
    data: Data,
    site: Site,
    *,
    kfac: KFACConfig,
    schedule: str | Mapping[str, Any] | ScheduleConfig,
    profiles: tuple[ModelProfile | None, ClusterProfile | None] = (None, None),
) -> Learner:
    """A learner whose model is a function of the seed, the same on every rank; collective."""
    torch.manual_seed(config.seed)
    model = build_model(num_classes=data.num_classes, input_shape=data.input_shape, **asdict(config.model))
    model.to(site.device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
    )
    recorder = Recorder(site.device, site.communicator.rank)
    _check_patterns(config.model.name, model, kfac)
    try:
        preconditioner = KFAC(
            model,
            kfac,
            schedule,
            average_gradients=True,
            model_profile=profiles[0],
            cluster_profile=profiles[1],
            communicator=site.communicator,
            recorder=recorder,
        )
    except ValueError as error:  # as patterns that leave no layer, or another model's profile
        raise ConfigError(textwrap.shorten(f"model={config.model.name}: {error}", 400)) from error
    objective = objective_of(config.model.name)
    return Learner(
        model, optimizer, preconditioner, recorder, objective, config.label_smoothing, kfac.accumulation_steps
    )


def _check_patterns(name: str, model: nn.Module, kfac: KFACConfig) -> None:
    """A pattern that no module's name matches is a mistake: it would do nothing, and nobody would notice."""
    modules = [module for module, _ in model.named_modules()]
    for key, patterns in (("include", kfac.include), ("exclude", kfac.exclude), ("overrides", kfac.overrides)):
        for pattern in patterns:
            if not fnmatch.filter(modules, pattern):
                raise ConfigError(f"kfac.{key}: no module of model={name} matches {pattern!r}")
