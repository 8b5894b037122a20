"""What T13, T14 and T15 run on ranks: every pipelining, fusion, placement and broadcast of the inverses."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig, ScheduleConfig
from kfac.communication import LocalCommunicator, get_communicator
from kfac.planning.schedule_config import CHOICES
from tests.kfac.models import shards
from tests.kfac.ranks import run_ranks
from tests.kfac.reference import ReferenceKFAC

D = torch.float64
SAMPLES, LR = 13, 0.05
OPTIONS = {"damping": 0.01, "factor_decay": 0.9, "kl_clip": 1e-3, "lr": LR, "factor_interval": 2, "inverse_interval": 3}
"""Statistics in steps 0, 2, 4, 6; inverses in steps 0, 3, 6: step 3 inverts what step 2 has averaged."""

STEPS = 4
FURTHER_STEPS = 50
STOP = 3
"""Between an update of the statistics (step 2) and one of the inverses (step 3)."""

COMMON: dict[str, ScheduleConfig] = {
    f"{pipelining}-{fusion}-{placement}-{broadcast}": ScheduleConfig(
        pipelining=pipelining,
        fusion=fusion,
        placement=placement,
        inverse_start=("after_all", "as_ready")[index // 2 % 2],
        inverse_broadcast=broadcast,
        threshold_bytes=400,
        lbp_rule="cost" if index % 3 == 0 else 4 * (index % 3),
        gradient_pipelining=index % 2 == 0,
    )
    for index, (pipelining, fusion, placement, broadcast) in enumerate(
        itertools.product(*(CHOICES[key] for key in ("pipelining", "fusion", "placement", "inverse_broadcast")))
    )
}
"""Every rank gets every factor and every inverse."""

OWNED: dict[str, ScheduleConfig] = {
    f"{collective}-{fusion}-{inverse_fusion}-{fraction}": ScheduleConfig(
        pipelining=("layerwise", "none")[index // 2 % 2],
        fusion=fusion,
        placement=("seq_dist", "lbp", "optimized")[index % 3],
        inverse_broadcast=("as_ready", "after_all")[index % 2],
        inverse_fusion=inverse_fusion,
        factor_collective=collective,
        gradient_worker_fraction=fraction,
        threshold_bytes=400,
        lbp_rule=4,
        gradient_pipelining=index % 2 == 0,
    )
    for index, (collective, fusion, inverse_fusion, fraction) in enumerate(
        [
            ("all_reduce", "greedy", "none", 0.0),
            ("all_reduce", "optimal", "none", 0.5),
            ("all_reduce", "optimal", "owner", 1.0),
            ("all_reduce", "none", "planned", 1.0),
            ("reduce_to_owner", "none", "none", 1.0),
            ("reduce_to_owner", "threshold", "owner", 1.0),
            ("reduce_to_owner", "greedy", "planned", 1.0),
            ("reduce_to_owner", "optimal", "none", 0.0),
            ("reduce_to_owner", "threshold", "none", 0.0),
            ("reduce_to_owner", "optimal", "owner", 0.5),
            ("reduce_to_owner", "greedy", "none", 0.5),
            ("reduce_to_owner", "none", "planned", 0.5),
        ]
    )
}
"""Ranks get and make only what the Plan leaves to them."""

SCHEDULES = COMMON | OWNED


class Tiny(nn.Module):
    """A convolution, a norm, two branches and a head: several kinds of factors in the least time."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(2, 3, 2, bias=False)
            self.norm = nn.GroupNorm(1, 3)
            self.left, self.right = nn.Linear(12, 4), nn.Linear(12, 4, bias=False)
            self.head = nn.Linear(4, 3)
        self.to(D)
        self.act = nn.ReLU(inplace=True)
        self.right_first = False
        """Whether the branches run, and so their hooks are called, in the other order; the result is the same."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x))).flatten(1)
        branches = (self.right, self.left) if self.right_first else (self.left, self.right)
        first, second = (branch(x) for branch in branches)
        return self.head(torch.tanh(first + second))


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Images ``[samples, 2, 3, 3]`` and classes; every sample of every step is different."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(samples, 2, 3, 3, generator=generator, dtype=D)
    return x, torch.randint(0, 3, (samples,), generator=generator)


class Run:
    """One rank's training."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        schedule: Any,
        communicator: Any = None,
        *,
        samples: int = SAMPLES,
        **options: Any,
    ) -> None:
        self.model = Tiny()
        self.config = KFACConfig(**{**OPTIONS, **options})
        self.kfac = KFAC(self.model, self.config, schedule, average_gradients=True, communicator=communicator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LR, momentum=0.9)
        self.samples, self.world_size = samples, world_size
        equal = slice(rank * samples // world_size, (rank + 1) * samples // world_size)
        self.share = equal if samples % world_size == 0 else shards(samples, world_size)[rank]
        self.step = 0

    def steps(self, count: int) -> Run:
        """Train on."""
        for _ in range(count):
            x, y = (part[self.share] for part in batch(self.step, self.samples))
            self.optimizer.zero_grad()
            k = self.config.accumulation_steps
            for micro_x, micro_y in zip(x.tensor_split(k), y.tensor_split(k), strict=True):
                # Unequal parts are weighted, so that the average over the ranks is the gradient of the batch's mean.
                weight = len(micro_y) * self.world_size / self.samples
                outputs = self.model(micro_x)
                with self.kfac.curvature(outputs, "classification", weight):
                    (F.cross_entropy(outputs, micro_y) * weight).backward()
            self.kfac.step()
            self.optimizer.step()
            self.step += 1
        return self

    def parameters(self) -> Tensor:
        """All parameters as one vector."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def gradients(self) -> Tensor:
        """All preconditioned gradients of the last step as one vector."""
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def factors(self) -> dict[str, Tensor]:
        """Every factor, wherever it is."""
        kfac = self.kfac
        if any(holder is not None for holder in kfac.plan.factor_holder):
            kfac = KFAC(Tiny(), self.config, "dkfac", communicator=LocalCommunicator())
            kfac.load_state_dict(self.kfac.state_dict())
        return {f"{layer.name}/{s}": kfac.factor(layer.name, s) for layer in kfac.layers for s in "AG"}

    def made(self) -> dict[str, Tensor]:
        """What has been made of every factor: its inverse as packed triangles, or eigenvectors and eigenvalues."""
        keys = ("inverse", "vectors", "values", "corrected")
        return {
            name: torch.cat([factor[key].flatten() for key in keys if factor[key] is not None])
            for name, factor in self.kfac.state_dict()["factors"].items()
        }

    def save(self) -> dict[str, Any]:
        """A checkpoint; a copy of everything."""
        parts = {"model": self.model, "kfac": self.kfac, "optimizer": self.optimizer}
        return {"step": self.step, **{name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}}

    def load(self, state: Mapping[str, Any]) -> Run:
        """Continue from a checkpoint; its own parameters are lost."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.model.load_state_dict(state["model"])
        self.kfac.load_state_dict(state["kfac"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.step = state["step"]
        return self


@functools.cache
def reference(steps: int = STEPS, samples: int = SAMPLES, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Parameters and factors of the sequential algorithm on whole batches, which shares no code with kfac."""
    options = {**OPTIONS, "damping_method": "pi", **changes}
    options.pop("accumulation_steps", None)
    model = Tiny()
    sequential = ReferenceKFAC(
        model,
        damping=options["damping"],
        method=options["damping_method"],
        decay=options["factor_decay"],
        kl_clip=options["kl_clip"],
        lr=LR,
        factor_interval=options["factor_interval"],
        inverse_interval=options["inverse_interval"],
    )
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(steps):
        sequential.step(*batch(step, samples), F.cross_entropy)
        optimizer.step()
    weight = 1 - options["factor_decay"] ** sequential.updates
    factors = {f"{n}/{s}": p[k] / weight for n, p in sequential.averages.items() for k, s in enumerate("AG")}
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), factors


class WithoutFactorTraffic:
    """A communicator that loses the factors' all-reduce."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor, name: str) -> Any:
        if "Factor" in name:
            return LocalCommunicator().all_reduce(tensor, name)
        return self._inner.all_reduce(tensor, name)


class WithSwappedOwners:
    """A communicator that takes every inverse from the next rank, which has not made it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, tensor: Tensor, src: int, name: str) -> Any:
        if self._inner.rank != src:
            tensor.zero_()  # what it would be is not defined
        return self._inner.broadcast(tensor, (src + 1) % self._inner.world_size, name)


class WithWrongRoots:
    """A communicator that gives every sum for one rank to the next one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce(self, tensor: Tensor, dst: int, name: str) -> Any:
        # What is left on a rank that gets no sum is not defined: here its own part.
        sent = tensor.clone() if self._inner.rank == dst else tensor
        return self._inner.reduce(sent, (dst + 1) % self._inner.world_size, name)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"damping_method": "plain", "kl_clip": None},
    "exact damping": {"damping_method": "exact", "inverse_method": "eigh"},
    "every step": {"factor_interval": 1, "inverse_interval": 1},
    "micro-batches": {"accumulation_steps": 2},
    "exact Fisher": {"fisher": "exact"},
    "ekfac": {"damping_method": "exact", "inverse_method": "ekfac"},
}
"""Options that are run with the named schedules."""
SEQUENTIAL = ("plain", "exact damping", "every step", "micro-batches")
"""Those that the sequential reference has, too."""
NAMED = ("dkfac", "mpdkfac", "spdkfac", "auto")


def cell(rank: int, world_size: int, schedule: Any, index: int, **options: Any) -> dict[str, Any]:
    """The results after STEPS steps, and again with a checkpoint loaded on the way (another step for every index)."""
    run = Run(rank, world_size, schedule, **options)
    stop = 1 + index % (STEPS - 1)
    state = run.steps(stop).save()
    run.steps(STEPS - stop)
    resumed = Run(rank, world_size, run.kfac.plan, **options).load(state).steps(STEPS - stop)
    return {**results(run), "resumed": resumed.parameters()}


def results(run: Run) -> dict[str, Any]:
    """What is compared of a run."""
    return {
        "parameters": run.parameters(),
        "gradients": run.gradients(),
        "factors": run.factors(),
        "made": run.made(),
    }


def all_cells(rank: int, world_size: int, foreign: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that T13, T14 and T15 look at; ``foreign``: a checkpoint of another number of ranks."""
    variants = enumerate(itertools.product(VARIANTS, NAMED))
    found: dict[str, Any] = {
        "cells": {name: cell(rank, world_size, SCHEDULES[name], index) for index, name in enumerate(SCHEDULES)},
        "variants": {
            (variant, schedule): cell(rank, world_size, schedule, index, **VARIANTS[variant])
            for index, (variant, schedule) in variants
            if variant == "plain" or schedule in ("mpdkfac", "spdkfac")
        },
        "equal shards": results(Run(rank, world_size, "mpdkfac", samples=12).steps(STEPS)),
    }
    long = Run(rank, world_size, "spdkfac").steps(STOP)
    state = long.save()
    found["state"] = state
    found["long"] = long.steps(FURTHER_STEPS).parameters()
    found["long, resumed"] = Run(rank, world_size, "spdkfac").load(state).steps(FURTHER_STEPS).parameters()
    if foreign is not None:
        found["moved"] = Run(rank, world_size, "spdkfac").load(foreign).steps(FURTHER_STEPS).parameters()
        without = WithoutFactorTraffic(get_communicator())
        found["without factor traffic"] = results(Run(rank, world_size, "spdkfac", without).steps(STEPS))
        swapped = WithSwappedOwners(get_communicator())
        found["swapped owners"] = Run(rank, world_size, "mpdkfac", swapped).steps(STEPS).parameters()
    return found


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, Any]]:
    """The results of :func:`all_cells` on every rank: one launch for each number of ranks, whoever asks first."""
    if world_size == 1:
        return [all_cells(0, 1, None)]
    return run_ranks(all_cells, world_size, on_ranks(1)[0]["state"])
