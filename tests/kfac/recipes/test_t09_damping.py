"""T9: damping gives the inverse that it says, however scale is split between A and G, and touches no factor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.oracle import D, Loss
from tests.kfac.recipes.nets import data, mlp

DAMPING = 0.03
LOSS = Loss("classification")


def damped_kronecker(a: Tensor, g: Tensor, method: str) -> Tensor:
    """The matrix that each method stands for, dense, in the order ``G (x) A``."""
    eye_a, eye_g = torch.eye(len(a), dtype=D), torch.eye(len(g), dtype=D)
    if method == "exact":
        return torch.kron(g, a) + DAMPING * torch.eye(len(a) * len(g), dtype=D)
    if method == "plain":
        return torch.kron(g + DAMPING * eye_g, a + DAMPING * eye_a)
    pi = math.sqrt((a.trace() / len(a)) / (g.trace() / len(g)))
    return torch.kron(g + math.sqrt(DAMPING) / pi * eye_g, a + math.sqrt(DAMPING) * pi * eye_a)


METHODS = {
    "plain, Cholesky": ("plain", "cholesky"),
    "plain, eigh": ("plain", "eigh"),
    "pi, Cholesky": ("pi", "cholesky"),
    "pi, eigh": ("pi", "eigh"),
    "exact": ("exact", "eigh"),
}
"""Damping method and inverse method."""


def make(method: str) -> tuple[nn.Module, KFAC]:
    """A network with a preconditioner that collects statistics in its first step only and inverts in every step."""
    model = mlp()
    damping_method, inverse_method = METHODS[method]
    options = {"damping_method": damping_method, "inverse_method": inverse_method, "damping": DAMPING}
    return model, KFAC(model, KFACConfig(**options, kl_clip=None, factor_interval=1000))


def gradients(model: nn.Module, kfac: KFAC) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One step on the batch: per layer ``[weight | bias]``'s gradient before and after, flattened row by row."""
    model.zero_grad()
    x, y = data("classification", 9)
    LOSS(model(x), y).backward()

    def flat() -> dict[str, Tensor]:
        layers = [(str(k), m) for k, m in enumerate(model) if isinstance(m, nn.Linear)]
        return {name: torch.cat([m.weight.grad, m.bias.grad[:, None]], 1).flatten() for name, m in layers}

    before = flat()
    kfac.step()
    return before, flat()


def split_scale(kfac: KFAC, scale: Callable[[str], float]) -> None:
    """Multiply each factor (named as ``layer/A``) by a number, through the checkpoint."""
    state = copy.deepcopy(kfac.state_dict())
    for name, factor in state["factors"].items():
        factor["average"] *= scale(name)
    kfac.load_state_dict(state)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("method", METHODS)
def test_the_step_is_the_dense_solve(method):
    model, kfac = make(method)
    before, after = gradients(model, kfac)
    for name, gradient in before.items():
        a, g = kfac.factor(name, "A"), kfac.factor(name, "G")
        solved = {how: torch.linalg.solve(damped_kronecker(a, g, how), gradient) for how in ("plain", "pi", "exact")}
        own = solved.pop(METHODS[method][0])
        torch.testing.assert_close(after[name], own, rtol=1e-10, atol=1e-14)
        assert all(relative(other, own) > 0.05 for other in solved.values()), "the control: the methods differ here"


@pytest.mark.parametrize("method", METHODS)
def test_scale_split_invariance(method):
    """With (c A, G / c), c = 100, pi and exact damping give the same step; plain damping gives another."""
    model, kfac = make(method)
    _, first = gradients(model, kfac)
    split_scale(kfac, lambda name: 100.0 if name.endswith("A") else 0.01)
    _, second = gradients(model, kfac)
    for name, step in first.items():
        error = relative(second[name], step)
        assert error > 0.5 if method.startswith("plain") else error < 1e-10


def bytes_of(kfac: KFAC) -> dict[str, bytes]:
    return {name: f["average"].numpy().tobytes() for name, f in kfac.state_dict()["factors"].items()}


def made_of(kfac: KFAC) -> bytes:
    """What has been made of a factor: its inverse or its eigenvalues."""
    factor = kfac.state_dict()["factors"]["0/A"]
    return (factor["values"] if factor["inverse"] is None else factor["inverse"]).numpy().tobytes()


@pytest.mark.parametrize("method", METHODS)
def test_inverting_does_not_change_a_factor(method):
    """Byte by byte, over several inversions."""
    model, kfac = make(method)
    gradients(model, kfac)
    before, made = bytes_of(kfac), made_of(kfac)
    for _ in range(5):
        gradients(model, kfac)
    assert bytes_of(kfac) == before
    split_scale(kfac, lambda name: 1 + 1e-15)
    assert bytes_of(kfac) != before, "the control: the last bit counts"
    split_scale(kfac, lambda name: 2.0)
    gradients(model, kfac)
    assert made_of(kfac) != made, "the control: factors are inverted in every step"
