"""Profiles measured on this machine: op times per layer from timelines, cost models of collectives and inverses."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares, nnls

from kfac.communication import Communicator, Work
from kfac.config import KFACConfig
from kfac.curvature.blocks import Blocks
from kfac.curvature.packing import packed_elements
from kfac.factors import FactorState
from kfac.planning import ClusterProfile, LinearCost, ModelProfile, PolynomialCost
from kfac.setup import LayerSizes
from kfac.solutions import method_for
from kfac.timeline import COMPUTE_LANE, Timeline

MESSAGE_ELEMENTS = tuple(2**k for k in range(8, 23, 2))
"""Sizes at which collectives are timed: 1 KiB to 16 MiB of float32."""


TRAIN, TRAIN_ELEMENTS = 8, 2**20
"""Messages that are timed together, and the elements at which fewer of them do: messages of a step follow each other
closely, and a train of them tells how long each keeps the channel busy. One message alone may be quicker (a shaped link
lets its first bytes through at once, and threads that carry nothing else wake up sooner), or slower (nothing is sent
while it waits for its start)."""

_NEGLIGIBLE = 1e-9
"""The share of what was measured below which a term of a fit is none."""

COLLECTIVES = ("all_reduce", "reduce", "broadcast")
"""The costs of a :class:`ClusterProfile` that are measured by all ranks together."""


def provenance(device: torch.device | str) -> dict[str, Any]:
    """What a profile measured here and now says of its origin."""
    hardware = platform.processor() or platform.machine()
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return {
        "kind": "measured",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


# ---------------------------------------------------------------------- the model


def _layer_seconds(timeline: Timeline) -> tuple[dict[tuple[str, str], float], list[str]]:
    """Seconds per (layer, field) of one rank's iteration, and the layers in execution order.

    A layer's forward pass is the FF time since the layer before it, its backward pass the BP time until the next
    layer's output gradient; the time between the last layer and the first output gradient is the loss's. Micro-batches
    add up.
    """
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    order: list[str] = []
    forward_s = 0.0
    current: str | None = None  # whose backward pass it is
    for span in (s for s in timeline.spans if s.lane == COMPUTE_LANE):
        side, _, layer = span.name.partition(" ")
        if span.kind == "FactorComp" and side == "A":
            if layer not in order:
                order.append(layer)
            seconds[layer, "forward_s"] += forward_s
            seconds[layer, "a_statistics_s"] += span.duration_s
            forward_s, current = 0.0, None
        elif span.kind == "FactorComp" and side == "G":
            seconds[layer, "g_statistics_s"] += span.duration_s
            current = layer
        elif span.kind == "FactorComp":
            seconds["", side] += span.duration_s  # packing and running averages
        elif span.kind == "FF":
            forward_s += span.duration_s
        elif span.kind == "BP":
            seconds[("", "loss_s") if current is None else (current, "backward_s")] += span.duration_s
        elif span.kind == "Precondition":
            seconds["", "precondition_s"] += span.duration_s
    seconds["", "loss_s"] += forward_s
    last_s = max((s.end_s for s in timeline.spans), default=0.0)
    seconds["", "update_s"] = max(0.0, timeline.iteration_s - last_s)
    return seconds, order


def model_profile_from(timelines: Iterable[Timeline], layers: LayerSizes, name: str) -> ModelProfile:
    """The profile of a model from recorded iterations of one rank (medians over the iterations).

    Packing, running averages and preconditioning are not recorded per layer; they are spread over the layers by the
    elements of the factors, and by the multiplications ``2 g a (g + a)``.

    Args:
        timelines: of iterations that computed statistics and preconditioned.
        layers: the sizes of all layers (:attr:`kfac.KFAC.layer_sizes`).
        name: for people.

    Raises:
        ValueError: if no timeline has statistics in it.
    """
    measured = [_layer_seconds(timeline) for timeline in timelines]
    measured = [(seconds, order) for seconds, order in measured if order]
    if not measured:
        raise ValueError("none of the timelines recorded factor statistics: record iterations of a K-FAC schedule")

    def median(layer: str, field: str) -> float:
        return statistics.median(seconds.get((layer, field), 0.0) for seconds, _ in measured)

    sizes = {layer.name: layer for layer in layers}
    order = [layer for layer in measured[-1][1] if layer in sizes]
    order += [layer for layer in sizes if layer not in order]
    pack_s = median("", "pack") + median("", "running")
    triangles = {
        name: (packed_elements((x.a_blocks, x.a_dim)), packed_elements((x.g_blocks, x.g_dim)))
        for name, x in sizes.items()
    }
    work = {name: x.gradient_elements * (x.a_dim + x.g_dim) for name, x in sizes.items()}
    per_element_s = pack_s / max(1, sum(a + g for a, g in triangles.values()))
    per_multiplication_s = median("", "precondition_s") / max(1, sum(work.values()))
    return ModelProfile(
        name=name,
        layers=tuple(
            replace(
                sizes[layer],
                forward_s=median(layer, "forward_s"),
                backward_s=median(layer, "backward_s"),
                a_statistics_s=median(layer, "a_statistics_s") + per_element_s * triangles[layer][0],
                g_statistics_s=median(layer, "g_statistics_s") + per_element_s * triangles[layer][1],
                precondition_s=per_multiplication_s * work[layer],
            )
            for layer in order
        ),
        loss_s=median("", "loss_s"),
        update_s=median("", "update_s"),
        provenance={**provenance("cpu"), "iterations": len(measured), "statistic": "median"},
    )


# ---------------------------------------------------------------------- the cluster


def fit_cost(sizes: Sequence[float], seconds: Sequence[float], powers: Sequence[int]) -> tuple[list[float], float]:
    """Non-negative coefficients of ``sum_k c_k size^powers[k]`` with the least squared logarithms of fit over measured.

    Half as long is then as wrong as twice as long. Relative errors would be least where a fit is below nearly all that
    was measured, if some points lie far below the rest (small messages that a shaped link lets through at once).

    Returns:
        the coefficients, and the median absolute relative error of the fit.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    design = np.stack([x**p for p in powers], 1) / y[:, None]
    scale = np.abs(design).max(0)
    design = design / scale
    start = np.maximum(nnls(design, np.ones_like(y))[0], _NEGLIGIBLE)

    def logarithms(logs: Any) -> Any:
        return np.log(design @ np.exp(logs))

    found = least_squares(logarithms, np.log(start)).x
    coefficients = np.where(np.exp(found) > _NEGLIGIBLE, np.exp(found), 0.0)
    error = float(np.median(np.abs(design @ coefficients - 1.0)))
    return [float(c) for c in coefficients / scale], error


def _sampled_s(action: Callable[[], None], repeats: int, device: torch.device | str) -> list[float]:
    """The seconds of each repeat."""
    cuda = torch.device(device).type == "cuda"
    samples = []
    for repeat in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize()
        if repeat:  # the first is warm-up
            samples.append(time.perf_counter() - start)
    return samples


def _medians(samples: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.median(of_size) for of_size in samples]


def quartiles(samples: Iterable[Sequence[float]]) -> dict[str, list[float]]:
    """The lower and the upper quartile of the repeats at each size, ``q25_s`` and ``q75_s``; one repeat is both."""
    cuts = [statistics.quantiles([*s] * (1 + (len(s) == 1)), n=4, method="inclusive") for s in samples]
    return {"q25_s": [cut[0] for cut in cuts], "q75_s": [cut[2] for cut in cuts]}


def time_collectives(
    communicator: Communicator, device: torch.device | str, sizes: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """Median seconds of each of :data:`COLLECTIVES` at each size, in trains, of the slowest rank; collective."""
    sampled = _sampled_collectives(communicator, device, sizes, repeats)
    return {name: _medians(samples) for name, samples in sampled.items()}


def _sampled_collectives(
    communicator: Communicator, device: torch.device | str, sizes: Sequence[int], repeats: int
) -> dict[str, list[list[float]]]:
    """What :func:`time_collectives` has the medians of: the repeats of the slowest rank."""
    issues: dict[str, Callable[[torch.Tensor], Work]] = {
        "all_reduce": lambda t: communicator.all_reduce(t, "profile"),
        "reduce": lambda t: communicator.reduce(t, 0, "profile"),
        "broadcast": lambda t: communicator.broadcast(t, 0, "profile"),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in COLLECTIVES}
    for name in COLLECTIVES:
        for elements in sizes:
            count = max(1, min(TRAIN, TRAIN_ELEMENTS // elements))
            tensors = [torch.zeros(elements, device=device) for _ in range(count)]

            def train(issue: Callable[[torch.Tensor], Work] = issues[name], tensors: Sequence[Any] = tensors) -> None:
                for work in [issue(tensor) for tensor in tensors]:
                    work.wait()

            communicator.barrier()
            mine = [seconds / count for seconds in _sampled_s(train, repeats, device)]
            found[name].append(max(communicator.all_gather_object(mine), key=statistics.median))
    return found


def _sampled_inverse(dim: int, repeats: int, device: torch.device | str, config: KFACConfig) -> list[float]:
    """Seconds, in each repeat, from a packed running average to what is made of it, flat as it travels."""
    data = torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim)).to(device)
    factor = FactorState(Blocks(1, dim, 1, dim), like=torch.empty(0, device=device))
    factor.average, factor.weight = factor.pack((data @ data.T / dim)[None]), 1.0
    method = method_for(config, factor, config.at("inverse_interval", 0))
    out = torch.empty(method.elements(factor), device=device)

    def action() -> None:
        parts = method.begin(factor, 1e-2)()
        assert parts is not None
        method.flatten(parts, out)

    return _sampled_s(action, repeats, device)


def time_inverses(
    dims: Iterable[int], repeats: int, device: torch.device | str, config: KFACConfig
) -> tuple[list[int], list[float]]:
    """At most eight of the dimensions, spread evenly, and the median seconds of what ``config`` makes of factors."""
    chosen = _chosen(dims)
    return chosen, _medians(_sampled_inverse(dim, repeats, device, config) for dim in chosen)


def _chosen(dims: Iterable[int]) -> list[int]:
    unique = sorted(set(dims)) or [64]
    return sorted({unique[round(k * (len(unique) - 1) / 7)] for k in range(8)})


def fit_inverse(dims: Sequence[int], seconds: Sequence[float]) -> tuple[PolynomialCost, dict[str, Any]]:
    """The cost of inverses as a cubic of the dimension, and the points and error of the fit."""
    coefficients, error = fit_cost([d / 1000 for d in dims], seconds, (0, 1, 2, 3))
    points = {"dims": list(dims), "seconds": list(seconds), "fit_error": error}
    return PolynomialCost(tuple(coefficients), unit_dim=1000.0), points


def profile_cluster(
    communicator: Communicator,
    device: torch.device | str,
    dims: Iterable[int],
    *,
    repeats: int = 5,
    config: KFACConfig | None = None,
) -> ClusterProfile:
    """Time collectives and inverses on these ranks and fit cost models; collective, the same result on every rank.

    Args:
        communicator: the ranks.
        device: where tensors live.
        dims: dimensions of the factors that will be inverted; at most eight of them, spread evenly, are timed.
        repeats: of each measurement, after one for warm-up; the median counts.
        config: what is made of factors depends on it (their inverses, Cholesky factors or eigendecompositions); None:
            the defaults.

    Returns:
        the fitted costs; the points they were fitted to, with their quartiles, and the fits' errors are in the
        provenance.
    """
    origin = {**provenance(device), "repeats": repeats, "statistic": "median, slowest rank"}
    costs: dict[str, LinearCost] = {}
    if communicator.world_size == 1:
        costs = dict.fromkeys(COLLECTIVES, LinearCost(0.0, 0.0))
    else:
        for name, samples in _sampled_collectives(communicator, device, MESSAGE_ELEMENTS, repeats).items():
            seconds = _medians(samples)
            (alpha, beta), error = fit_cost(MESSAGE_ELEMENTS, seconds, (0, 1))
            costs[name] = LinearCost(alpha, beta)
            points = {"elements": list(MESSAGE_ELEMENTS), "seconds": seconds, "fit_error": error}
            origin[name] = {**points, **quartiles(samples)}
    config = config or KFACConfig()
    chosen = _chosen(dims)
    samples = [_sampled_inverse(dim, repeats, device, config) for dim in chosen]
    inverse, points = fit_inverse(chosen, _medians(samples))
    options: dict[str, Any] = {key: getattr(config, key) for key in ("inverse_method", "damping_method")}
    options["inverse_interval"] = config.at("inverse_interval", 0)
    origin["inverse"] = {**points, **quartiles(samples), **options}
    profile = ClusterProfile(
        world_size=communicator.world_size,
        all_reduce=costs["all_reduce"],
        reduce=costs["reduce"],
        broadcast=costs["broadcast"],
        inverse=inverse,
        provenance=origin,
    )
    result: ClusterProfile = communicator.broadcast_object(profile)
    return result
