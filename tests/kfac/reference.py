"""The obvious K-FAC: one process, the whole batch, full matrices, explicit formulas; it shares no code with kfac."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def factors(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss_function) -> dict[str, tuple]:
    """(A, G) per Conv2d, Linear and GroupNorm for one batch: A sums over positions, G averages over them.

    A norm's A is 1; its G holds the second moments of each sample's gradient of (scale, shift), channel by channel.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear, nn.GroupNorm))}
    inputs, outputs = {}, {}

    def remember(name):
        def hook(_, args, output):
            inputs[name], outputs[name] = args[0].detach().clone(), output
            return output.clone()  # what follows may work in place on the clone, not on what we differentiate by

        return hook

    handles = [m.register_forward_hook(remember(name)) for name, m in layers.items()]
    loss = loss_function(model(x), y)
    for handle in handles:
        handle.remove()
    names = list(layers)
    gradients = dict(zip(names, torch.autograd.grad(loss, [outputs[n] for n in names]), strict=True))
    samples = x.shape[0]
    result = {}
    for name, m in layers.items():
        a, g = inputs[name], gradients[name] * samples  # gradient of each sample's own loss
        if isinstance(m, nn.GroupNorm):
            grouped = a.reshape(samples, m.num_groups, -1)
            centred = grouped - grouped.mean(2, keepdim=True)
            a = (centred / (centred.square().mean(2, keepdim=True) + m.eps).sqrt()).reshape(a.shape)
            own = torch.stack([(g * a).flatten(2).sum(2), g.flatten(2).sum(2)], 2)  # [samples, channels, 2]
            blocks = [own[:, c].T @ own[:, c] / samples for c in range(own.shape[1])]
            result[name] = (torch.ones(1, 1, dtype=a.dtype), torch.block_diag(*blocks))
            continue
        if isinstance(m, nn.Conv2d):
            a = F.unfold(a, m.kernel_size, m.dilation, m.padding, m.stride).transpose(1, 2)
            g = g.flatten(2).transpose(1, 2)
        a, g = a.reshape(samples, -1, a.shape[-1]), g.reshape(samples, -1, g.shape[-1])
        if m.bias is not None:
            a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
        positions = a.shape[1]
        A = torch.einsum("nsi,nsj->ij", a, a) / samples
        G = torch.einsum("nsi,nsj->ij", g, g) / (samples * positions)
        result[name] = (A, G)
    return result


def solver(A: torch.Tensor, G: torch.Tensor, damping: float, method: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The damped inverse of ``G (x) A``, to be applied to a gradient ``[rows of G, rows of A]``."""
    if method == "exact":
        matrix = torch.kron(G, A) + damping * torch.eye(len(A) * len(G), dtype=A.dtype)
        return lambda gradient: torch.linalg.solve(matrix, gradient.flatten()).view(gradient.shape)
    pi = math.sqrt((A.trace() / len(A)) / (G.trace() / len(G)))
    root = math.sqrt(damping)
    add_a, add_g = (damping,) * 2 if method == "plain" else (root * pi, root / pi)
    a_inverse = torch.linalg.inv(A + add_a * torch.eye(len(A), dtype=A.dtype))
    g_inverse = torch.linalg.inv(G + add_g * torch.eye(len(G), dtype=G.dtype))
    return lambda gradient: g_inverse @ gradient @ a_inverse


class ReferenceKFAC:
    def __init__(self, model, *, damping, method, decay, kl_clip, lr, factor_interval=1, inverse_interval=1) -> None:
        self.model, self.damping, self.method, self.decay = model, damping, method, decay
        self.kl_clip, self.lr = kl_clip, lr
        self.factor_interval, self.inverse_interval = factor_interval, inverse_interval
        self.averages: dict[str, tuple] = {}
        self.updates = self.steps = 0
        self.solvers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}

    def step(self, x, y, loss_function) -> None:
        """Set ``.grad`` to the preconditioned gradient of the batch's mean loss."""
        if self.steps % self.factor_interval == 0:
            self.updates += 1
            for name, pair in factors(self.model, x, y, loss_function).items():
                old = self.averages.get(name, (torch.zeros_like(pair[0]), torch.zeros_like(pair[1])))
                self.averages[name] = tuple(
                    self.decay * m + (1 - self.decay) * s for m, s in zip(old, pair, strict=True)
                )
        if self.steps % self.inverse_interval == 0:
            for name, pair in self.averages.items():
                A, G = (m / (1 - self.decay**self.updates) for m in pair)
                self.solvers[name] = solver(A, G, self.damping, self.method)
        self.model.zero_grad()
        loss_function(self.model(x), y).backward()
        modules = dict(self.model.named_modules())
        new, product = {}, 0.0
        for name, solve in self.solvers.items():
            m = modules[name]
            if isinstance(m, nn.GroupNorm):
                gradient = torch.stack([m.weight.grad, m.bias.grad], 1).view(-1, 1)
            else:
                gradient = m.weight.grad.flatten(1)
                if m.bias is not None:
                    gradient = torch.cat([gradient, m.bias.grad[:, None]], 1)
            new[name] = solve(gradient)
            product += (new[name] * gradient).sum().item()
        nu = 1.0 if self.kl_clip is None else min(1.0, math.sqrt(self.kl_clip / (self.lr**2 * product)))
        for name, v in new.items():
            m = modules[name]
            if isinstance(m, nn.GroupNorm):
                m.weight.grad.copy_(nu * v[0::2, 0])
                m.bias.grad.copy_(nu * v[1::2, 0])
                continue
            columns = m.weight[0].numel()
            m.weight.grad.copy_(nu * v[:, :columns].reshape(m.weight.shape))
            if m.bias is not None:
                m.bias.grad.copy_(nu * v[:, columns])
        self.steps += 1
