"""The paper's cluster and models as profiles that planning and simulation can use, derived from its numbers.

``python -m paper_figures.paper_cluster`` writes them into ``kfac/planning/shipped``. Nothing here was measured by this
project: each profile says ``derived``, with its sources and the error of each fit.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from kfac.planning import ClusterProfile, LayerProfile, LinearCost, ModelProfile, PolynomialCost
from paper_figures import published

SHIPPED = Path(__file__).parents[1] / "kfac" / "planning" / "shipped"
ARCHITECTURES = Path(__file__).with_name("architectures.json")
CLUSTER_NAME = "paper64"
FACTOR_ROW = "D-KFAC"
"""The row whose FactorComp counts (it differs by up to 2.6 % between rows): the one nothing is overlapped in."""


def _round(value: float) -> float:
    """Six significant digits: far below the error of every number here, far above what differs between machines."""
    return float(f"{value:.6g}")


def _dims(key: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    model = published.model(key)
    return np.array(model.a_dims + model.g_dims, dtype=np.float64)


def _fit(
    columns: Callable[[str], Sequence[float]], totals_s: Mapping[str, float]
) -> tuple[tuple[float, ...], dict[str, float]]:
    """Coefficients >= 0 for which ``columns(model) . coefficients`` is nearest to the totals, and relative errors."""
    design = np.array([columns(key) for key in totals_s])
    target = np.array(list(totals_s.values()))
    coefficients = [_round(float(c)) for c in nnls(design, target)[0]]
    errors = design @ coefficients / target - 1.0
    return tuple(coefficients), {key: round(float(e), 4) + 0.0 for key, e in zip(totals_s, errors, strict=True)}


def fit_inverse() -> tuple[PolynomialCost, dict[str, float]]:
    """A cubic in the dimension from the four published Non-Dist totals, in which every rank inverts every factor.

    Four coefficients for four totals: the fit is exact, so its error says nothing of its accuracy between them. The
    exponential that the authors' code states over-predicts the same totals 2.4 to 4.2 times.

    Returns:
        the cost and the relative error per model.
    """
    totals_s = {k: float(published.inverse_s(k, "Non-Dist")["InverseComp"]) for k in published.model_keys()}
    coefficients_s, errors = _fit(lambda key: [float(((_dims(key) / 1000.0) ** j).sum()) for j in range(4)], totals_s)
    return PolynomialCost(coefficients_s, 1000.0), errors


def fit_broadcast() -> tuple[LinearCost, dict[str, float]]:
    """Start-up and seconds per element from the four published Seq-Dist totals: one broadcast per factor, in a row.

    Returns:
        the cost and the relative error per model.
    """

    def columns(key: str) -> list[float]:
        dims = _dims(key)
        return [float(dims.size), float((dims * (dims + 1) / 2).sum())]

    totals_s = {k: float(published.inverse_s(k, "Seq-Dist")["InverseComm"]) for k in published.model_keys()}
    (alpha_s, beta_s), errors = _fit(columns, totals_s)
    return LinearCost(alpha_s, beta_s), errors


def cluster_profile() -> ClusterProfile:
    """The paper's 64 GPUs."""
    all_reduce = published.linear_cost("all_reduce_final_runs")
    inverse, inverse_errors = fit_inverse()
    broadcast, broadcast_errors = fit_broadcast()
    keys = published.model_keys()
    cluster = published.load()["cluster"]
    sources = published.load()["inverse"]
    factor_comm = {
        key: round(
            published.breakdown_s(key, "D-KFAC")["FactorComm"].value
            / (all_reduce.beta_s_per_element * (published.model(key).a_elements + published.model(key).g_elements)),
            2,
        )
        for key in keys
    }
    return ClusterProfile(
        world_size=published.world_size(),
        all_reduce=LinearCost(all_reduce.alpha_s, all_reduce.beta_s_per_element),
        reduce=LinearCost(all_reduce.alpha_s, _round(all_reduce.beta_s_per_element / 2)),
        broadcast=broadcast,
        inverse=inverse,
        provenance={
            "kind": "derived",
            "name": CLUSTER_NAME,
            "hardware": f"{cluster['nodes']} nodes x {cluster['gpus_per_node']} {cluster['gpu']}, {cluster['network']}",
            "all_reduce": {
                "method": "constants of the authors' final runs, taken as they are",
                "source": all_reduce.source,
                "confidence": all_reduce.confidence,
                "caution": "the published D-KFAC FactorComm divided by these seconds per element times the elements "
                "(start-up left out) is, per model: the constants alone do not explain the bars",
                "published_over_constants": factor_comm,
            },
            "reduce": {
                "method": "all-reduce's start-up and half its seconds per element: a ring's reduce moves half of what "
                "its all-reduce moves. No published number; the fitted broadcast, which moves as much as a reduce, "
                "has nearly the same slope",
            },
            "broadcast": {
                "method": "non-negative least squares on the published Seq-Dist InverseComm: one broadcast per factor",
                "source": {key: sources[key]["source"] for key in keys},
                "relative_error": broadcast_errors,
            },
            "inverse": {
                "method": "non-negative least squares of a cubic on the published Non-Dist InverseComp: as many "
                "totals as coefficients, hence exact on them",
                "source": {key: sources[key]["source"] for key in keys},
                "relative_error": inverse_errors,
            },
        },
    )


@cache
def architectures() -> Mapping[str, Any]:
    """The traced architectures by model: see :mod:`experiments.architectures`, which writes them."""
    found: Mapping[str, Any] = json.loads(ARCHITECTURES.read_text())["architectures"]
    return found


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def _a_operations_share(key: str) -> float:
    """The part of the statistics' operations that A takes."""
    a, g = (math.fsum(x["rows"] * x[side] ** 2 for x in architectures()[key]["layers"]) for side in ("a_dim", "g_dim"))
    return a / (a + g)


def model_profile(key: str) -> ModelProfile:
    """One of the paper's models on one of its GPUs at its batch size.

    The published totals are distributed over the layers: FF&BP in proportion to the floating-point operations of the
    forward pass, a third forward and two thirds backward (the backward pass multiplies twice per forward product);
    FactorComp over the A and G statistics in proportion to ``rows * dim**2``, the operations of their products.
    """
    model = published.model(key)
    bars = published.breakdown_s(key, FACTOR_ROW)
    traced = architectures()[key]["layers"]
    ff_bp_s, factor_s = bars["FF&BP"].value, bars["FactorComp"].value
    flops = _shares([layer["forward_flops"] for layer in traced])
    statistics = _shares([layer["rows"] * layer[side] ** 2 for layer in traced for side in ("a_dim", "g_dim")])
    layers = tuple(
        LayerProfile(
            name=layer["name"],
            a_dim=layer["a_dim"],
            g_dim=layer["g_dim"],
            gradient_elements=layer["gradient_elements"],
            forward_s=_round(ff_bp_s * share / 3),
            backward_s=_round(ff_bp_s * share * 2 / 3),
            a_statistics_s=_round(factor_s * a_share),
            g_statistics_s=_round(factor_s * g_share),
        )
        for layer, share, a_share, g_share in zip(traced, flops, statistics[::2], statistics[1::2], strict=True)
    )
    a_share_resnet50 = _a_operations_share("resnet50")
    gemm = published.load()["factor_gemm_resnet50_batch32"]
    return ModelProfile(
        name=key,
        layers=layers,
        provenance={
            "kind": "derived",
            "model": model.name,
            "batch_size": model.batch_size,
            "hardware": published.load()["cluster"]["gpu"],
            "layers": {
                "method": "traced by python -m experiments.architectures; element counts equal the paper's",
                "source": model.source,
            },
            "forward_backward": {
                "method": "the published FF&BP over the layers by forward operations, 1/3 forward, 2/3 backward",
                "total_s": ff_bp_s,
                "source": bars["FF&BP"].source,
            },
            "statistics": {
                "method": f"the published {FACTOR_ROW} FactorComp over A and G statistics by rows * dim^2. Check: this "
                f"gives ResNet-50's A {a_share_resnet50:.3f} of the operations; the authors' log of the products alone "
                f"has {gemm['fp32_a_s'] / (gemm['fp32_a_s'] + gemm['fp32_g_s']):.3f} of the seconds",
                "total_s": factor_s,
                "source": bars["FactorComp"].source,
                "check_source": gemm["source"],
            },
            "precondition": {
                "method": "zero: the paper's bars are differences of runs that leave parts out and have none for "
                "preconditioning; every K-FAC run preconditions, the run without K-FAC does not, so its seconds are "
                "inside the published FactorComp",
                "source": published.load()["timing_protocol"]["source"],
            },
        },
    )


def write(directory: Path = SHIPPED) -> list[Path]:
    """Write the cluster's and the models' profiles; returns the files."""
    models = directory / "models"
    models.mkdir(parents=True, exist_ok=True)
    written = [directory / f"{CLUSTER_NAME}.json"]
    cluster_profile().save(written[0])
    for key in published.model_keys():
        written.append(models / f"{key}.json")
        model_profile(key).save(written[-1])
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    """Derive the paper's cluster and model profiles from its numbers and write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m paper_figures.paper_cluster", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where to (default: the ones shipped with kfac)")
    for path in write(parser.parse_args(arguments).out):
        print(path)  # noqa: T201


if __name__ == "__main__":
    main()
