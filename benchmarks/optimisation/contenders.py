"""The optimizers that are compared, each with the space its hyper-parameters are searched in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import qmc
from torch import Tensor, nn

from experiments.sharding import derive_seed
from kfac import KFAC, KFACConfig

Hyperparameters = Mapping[str, float]
Space = Mapping[str, tuple[float, float]]
"""Bounds of each hyper-parameter, which is searched on a logarithmic scale."""

WARM_UP = 10
"""Steps in which every optimizer's learning rate rises linearly to the one that it keeps from then on."""
EARLY = 5
"""First steps in which K-FAC updates factors and inverses every time: the curvature changes fastest there."""


def learning_rate(peak: float, step: int) -> float:
    """The learning rate of a step, counted from 0; the same rule for every optimizer.

    It does not fall: how soon a target is met must not depend on when a run was told to end.
    """
    return peak * min(1.0, (step + 1) / (WARM_UP + 1))


class Training:
    """A model with its optimizer; what they do around and after each backward pass."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> None:
        self.model, self.optimizer, self.lr, self.taken = model, optimizer, lr, 0

    def curvature(self, outputs: Tensor, kind: str, weight: float) -> contextlib.AbstractContextManager[None]:
        """The context of a backward pass, see :meth:`kfac.KFAC.curvature`."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """Use the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.lr, self.taken)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1

    def close(self) -> None:
        """Leave the model as it would be without this."""


class PreconditionedTraining(Training):
    """SGD with momentum on gradients that K-FAC has preconditioned."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, config: KFACConfig) -> None:
        super().__init__(model, optimizer, lr)
        self.kfac = KFAC(model, config, "kfac")

    def curvature(self, outputs: Tensor, kind: str, weight: float) -> contextlib.AbstractContextManager[None]:
        """See :class:`Training`."""
        return self.kfac.curvature(outputs, kind, weight)

    def step(self) -> None:
        """See :class:`Training`."""
        self.kfac.step()
        super().step()

    def close(self) -> None:
        """See :class:`Training`."""
        self.kfac.close()


@dataclass(frozen=True)
class Contender:
    """One row of the tables.

    Args:
        name, title: for the command line, for people.
        space: where its hyper-parameters are searched.
        start: trains a model with hyper-parameters from that space.
        interval: steps between updates of what a second-order method keeps of the curvature; 1 for the others.
        early: the contender whose step costs what this one's first :data:`EARLY` do, where they cost more than later.
    """

    name: str
    title: str
    space: Space
    start: Callable[[nn.Module, Hyperparameters], Training]
    interval: int = 1
    early: str | None = None

    def trials(self, count: int) -> list[dict[str, float]]:
        """The first ``count`` points of a scrambled Halton sequence in the space (Owen 2017); always the same ones.

        The points are spread evenly in any number of dimensions, and a longer search begins with the shorter one's.
        """
        seed = derive_seed("search", *self.space) % 2**32
        points = qmc.Halton(len(self.space), scramble=True, seed=seed).random(count)
        return [
            {
                name: float(f"{low * (high / low) ** x:.4g}")
                for (name, (low, high)), x in zip(self.space.items(), point, strict=True)
            }
            for point in points.tolist()
        ]


def _sgd(model: nn.Module, h: Hyperparameters) -> Training:
    optimizer = torch.optim.SGD(
        model.parameters(), h["lr"], momentum=1 - h["one_minus_momentum"], weight_decay=h["weight_decay"]
    )
    return Training(model, optimizer, h["lr"])


def _adamw(model: nn.Module, h: Hyperparameters) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), h["lr"], betas=_betas(h), weight_decay=h["weight_decay"])
    return Training(model, optimizer, h["lr"])


def _soap(interval: int) -> Callable[[nn.Module, Hyperparameters], Training]:
    def start(model: nn.Module, h: Hyperparameters) -> Training:
        from pytorch_optimizer import SOAP  # an extra

        settings: dict[str, Any] = {"betas": _betas(h), "weight_decay": h["weight_decay"]}
        optimizer = SOAP(model.parameters(), h["lr"], precondition_frequency=interval, **settings)
        return Training(model, optimizer, h["lr"])

    return start


def _kfac(interval: int) -> Callable[[nn.Module, Hyperparameters], Training]:
    def start(model: nn.Module, h: Hyperparameters) -> Training:
        config = KFACConfig(
            lr=lambda step: learning_rate(h["lr"], step),
            damping=h["damping"],
            kl_clip=h["kl_clip"],
            factor_interval=lambda step: 1 if step < EARLY else interval,
            inverse_interval=lambda step: 1 if step < EARLY else interval,
            factor_decay=KFAC_DECAY[interval],
            fisher="mc",
        )
        optimizer = torch.optim.SGD(model.parameters(), h["lr"], momentum=1 - h["one_minus_momentum"])
        return PreconditionedTraining(model, optimizer, h["lr"], config)

    return start


KFAC_DECAY = {1: 0.95, 10: 0.8}
"""Decay of K-FAC's running averages: what is updated more rarely must not reach back as many updates."""


def _betas(h: Hyperparameters) -> tuple[float, float]:
    return 1 - h["one_minus_beta1"], 1 - h["one_minus_beta2"]


_ADAM: Space = {
    "lr": (3e-4, 1e-1),
    "one_minus_beta1": (2e-2, 0.3),
    "one_minus_beta2": (1e-3, 0.2),
    "weight_decay": (1e-4, 0.1),
}
_KFAC: Space = {
    "lr": (1e-2, 1.0),
    "damping": (3e-4, 0.3),
    "one_minus_momentum": (0.1, 0.5),
    "kl_clip": (3e-4, 0.1),
}
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            "sgd",
            "SGD with momentum",
            {"lr": (3e-3, 0.5), "one_minus_momentum": (2e-2, 0.5), "weight_decay": (1e-5, 1e-3)},
            _sgd,
        ),
        Contender("adamw", "AdamW", _ADAM, _adamw),
        Contender("soap-1", "SOAP, interval 1", _ADAM, _soap(1)),
        Contender("soap-10", "SOAP, interval 10", _ADAM, _soap(10), 10),
        Contender("kfac-1", "K-FAC, interval 1", _KFAC, _kfac(1)),
        Contender("kfac-10", "K-FAC, interval 10", _KFAC, _kfac(10), 10, early="kfac-1"),
    )
}
BASELINES = ("sgd", "adamw")
"""What the targets come from."""
