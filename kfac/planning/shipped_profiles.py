"""Profiles that come with the package, and estimates for models that have none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from kfac.planning.profiles import ClusterProfile, LayerProfile, ModelProfile

ESTIMATE_FLOP_PER_S = 5e12
"""Assumed rate of dense float32 products in :func:`estimate_model_profile`: about what a mid-range GPU sustains."""

ESTIMATE_ROWS = 4096
"""Assumed rows of every layer's input matrix (samples times positions) in :func:`estimate_model_profile`."""


def shipped_names(kind: str = "cluster") -> tuple[str, ...]:
    """Names of the shipped profiles of a kind (``cluster`` or ``model``)."""
    folder = _folder(kind)
    if not folder.is_dir():
        return ()
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def load_shipped_cluster(name: str = "default") -> ClusterProfile:
    """The shipped cluster profile of this name.

    Raises:
        ValueError: for an unknown name, naming the choices.
    """
    return ClusterProfile.from_dict(_read("cluster", name))


def load_shipped_model(name: str) -> ModelProfile:
    """The shipped model profile of this name.

    Raises:
        ValueError: for an unknown name, naming the choices.
    """
    return ModelProfile.from_dict(_read("model", name))


def estimate_model_profile(name: str, layers: Iterable[LayerProfile]) -> ModelProfile:
    """A model profile with crude seconds, for planning before anything was measured.

    Only the proportions matter to a plan, and these are rough too: every layer is taken as a dense product with
    :data:`ESTIMATE_ROWS` rows at :data:`ESTIMATE_FLOP_PER_S`.

    Args:
        name: for people.
        layers: their sizes, in execution order; whatever seconds they have are replaced.
    """

    def product_s(m: float, k: float, n: float) -> float:
        return 2.0 * m * k * n / ESTIMATE_FLOP_PER_S

    return ModelProfile(
        name=name,
        layers=tuple(
            replace(
                layer,
                # Each parameter meets every row once forward and twice backward.
                forward_s=product_s(ESTIMATE_ROWS, layer.gradient_elements, 1),
                backward_s=product_s(ESTIMATE_ROWS, layer.gradient_elements, 2),
                a_statistics_s=layer.a_blocks * product_s(layer.a_dim, ESTIMATE_ROWS, layer.a_dim),
                g_statistics_s=layer.g_blocks * product_s(layer.g_dim, ESTIMATE_ROWS, layer.g_dim),
                precondition_s=product_s(layer.gradient_elements, layer.g_dim + layer.a_dim, 1),
            )
            for layer in layers
        ),
        provenance={
            "kind": "estimated",
            "what": f"from dimensions alone, {ESTIMATE_ROWS} rows per layer at {ESTIMATE_FLOP_PER_S:g} flop/s",
        },
    )


def _folder(kind: str) -> Traversable:
    root = resources.files("kfac.planning") / "shipped"
    if kind == "cluster":
        return root
    if kind == "model":
        return root / "models"
    raise ValueError(f"unknown kind of profile {kind!r}; choices: cluster, model")


def _read(kind: str, name: str) -> dict[str, Any]:
    names = shipped_names(kind)
    if name not in names:
        raise ValueError(f"no shipped {kind} profile {name!r}; choices: {', '.join(names) or 'none'}")
    data: dict[str, Any] = json.loads((_folder(kind) / f"{name}.json").read_text())
    return data
