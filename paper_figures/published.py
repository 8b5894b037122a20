"""The paper's numbers, read from ``published.json`` with the source and the confidence of each.

Every entry there has a status: ``published`` (a value of one of the paper's figures or tables), ``code`` (a constant of
the authors' code), ``derived`` (computed from others) or ``recollection`` (from memory, without a source). What is
printed as published comes from here and is checked: a ``recollection`` never leaves this module as a published number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("published.json")
ALGORITHMS = ("D-KFAC", "MPD-KFAC", "SPD-KFAC")
"""The three algorithms of the paper's main comparison, under its names."""
KINDS = ("FF&BP", "GradComm", "FactorComp", "FactorComm", "InverseComp", "InverseComm")
"""The kinds of the paper's breakdown bars, in stacking order."""


@dataclass(frozen=True)
class Sourced:
    """A number with where it came from.

    Args:
        value: the number, in the unit that the accessor's name says.
        status: ``published``, ``code`` or ``derived``.
        source: the public file and line, or how it was derived.
        confidence: how sure that is, in words.
    """

    value: float
    status: str
    source: str
    confidence: str

    def __float__(self) -> float:
        return float(self.value)

    def origin(self) -> dict[str, str]:
        """Source and confidence."""
        return {"source": self.source, "confidence": self.confidence}


@dataclass(frozen=True)
class PublishedModel:
    """One of the paper's four models.

    Args:
        key: its name in commands and file names.
        name: its name in the paper.
        parameters: number of parameters.
        batch_size: samples per GPU.
        a_dims, g_dims: factor dimensions in execution order.
        a_elements, g_elements: elements of all A and all G triangles with the diagonal.
        source: of the counts and the batch size.
    """

    key: str
    name: str
    parameters: int
    batch_size: int
    a_dims: tuple[int, ...]
    g_dims: tuple[int, ...]
    a_elements: int
    g_elements: int
    source: str


@dataclass(frozen=True)
class LinearCoefficients:
    """``alpha_s + beta_s_per_element * elements`` as the authors' code or figure states it."""

    alpha_s: float
    beta_s_per_element: float
    status: str
    source: str
    confidence: str


@cache
def load() -> Mapping[str, Any]:
    """The whole file; treat it as read-only."""
    data: dict[str, Any] = json.loads(PATH.read_text())
    return data


def model_keys() -> tuple[str, ...]:
    """The four models in the paper's order."""
    return tuple(load()["models"])


def model(key: str) -> PublishedModel:
    """One of the four models.

    Raises:
        ValueError: for another name, naming the choices.
    """
    data = _entry("models", key)
    return PublishedModel(
        key=key,
        name=data["name"],
        parameters=data["parameters"],
        batch_size=data["batch_size_per_gpu"],
        a_dims=tuple(data["a_dims"]),
        g_dims=tuple(data["g_dims"]),
        a_elements=data["a_elements"],
        g_elements=data["g_elements"],
        source=f"{data['source_counts']}; batch size: {data['source_batch']}",
    )


def world_size() -> int:
    """GPUs of the paper's cluster."""
    gpus: int = load()["cluster"]["gpus"]
    return gpus


def iteration_s(key: str, algorithm: str) -> Sourced:
    """Published seconds of one iteration of a model on 64 GPUs."""
    entry = _entry("iteration_time", key)
    return _sourced(entry, _pick(entry["iteration_s"], algorithm, "algorithm"))


def breakdown_s(key: str, algorithm: str) -> dict[str, Sourced]:
    """Published exposed seconds per kind (:data:`KINDS`): differences of the cumulative bar heights."""
    entry = _entry("breakdown", key)
    exposed = _pick(entry, algorithm, "algorithm")["exposed_s"]
    return {kind: _sourced(entry, exposed[kind]) for kind in KINDS}


def communication_share(key: str) -> float:
    """Published (FactorComm + GradComm) / (FF&BP + FactorComp) of D-KFAC: what can be hidden, over what can hide it."""
    seconds = {kind: number.value for kind, number in breakdown_s(key, "D-KFAC").items()}
    return (seconds["FactorComm"] + seconds["GradComm"]) / (seconds["FF&BP"] + seconds["FactorComp"])


def inverse_s(key: str, placement: str) -> dict[str, Sourced]:
    """Published InverseComp and exposed InverseComm seconds under ``Non-Dist``, ``Seq-Dist`` or ``LBP``."""
    entry = _entry("inverse", key)
    values = _pick(entry, placement, "placement")
    return {kind: _sourced(entry, values[f"{kind}_s"]) for kind in ("InverseComp", "InverseComm")}


def motivation_algorithms() -> tuple[str, ...]:
    """The five algorithms of the motivation figure, in its order."""
    return tuple(load()["motivation"]["exposed_s"])


def motivation_s(algorithm: str) -> dict[str, Sourced]:
    """Published seconds per kind (:data:`KINDS`) of ResNet-50 under one of :func:`motivation_algorithms`."""
    entry = load()["motivation"]
    exposed = _pick(entry["exposed_s"], algorithm, "algorithm")
    return {kind: _sourced(entry, exposed[kind]) for kind in KINDS}


def pipelining_s(key: str, name: str) -> dict[str, Sourced]:
    """Published FactorComp and exposed FactorComm seconds under one way of pipelining (``Naive``, ``SP w/ OTF``)."""
    entry = _entry("pipelining", key)
    exposed = _pick(entry["exposed_FactorComm_s"], name, "pipelining")
    values = {"FactorComp": entry["FactorComp_s"], "FactorComm": exposed}
    return {kind: _sourced(entry, value) for kind, value in values.items()}


def ablation_s(key: str, cell: str) -> Sourced:
    """Published seconds of one iteration in a cell of the ablation (``+Pipe-LBP``)."""
    entry = _entry("ablation", key)
    return _sourced(entry, _pick(entry["iteration_s"], cell, "cell"))


def lbp_threshold_dim() -> int:
    """The dimension below which every rank inverted a factor in the authors' final runs of SPD-KFAC."""
    dim: int = load()["lbp"]["threshold_final_runs_dim"]
    return dim


def linear_cost(name: str) -> LinearCoefficients:
    """A linear cost model of the authors' code or figures, by its name in ``cost_models``.

    Raises:
        ValueError: for an unknown name, or one whose only source is recollection.
    """
    entry = _entry("cost_models", name)
    _require_source(entry, name)
    values = (entry["alpha_s"], entry["beta_s_per_element"])
    return LinearCoefficients(*values, entry["status"], entry["source"], entry["confidence"])


def inverse_exponential() -> tuple[float, float, dict[str, str]]:
    """The paper's inverse cost ``alpha_s * exp(beta_per_dim * dim)``: its two coefficients and its origin."""
    entry = _entry("cost_models", "inverse_figure")
    _require_source(entry, "inverse_figure")
    origin = {"source": entry["source"], "confidence": entry["confidence"]}
    return entry["alpha_s"], entry["beta_per_dim"], origin


def _entry(section: str, key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _pick(load()[section], key, section)
    return found


def _pick(data: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in data:
        raise ValueError(f"no {what} {key!r} in {PATH.name}; there are: {', '.join(data)}")
    return data[key]


def _require_source(entry: Mapping[str, Any], what: str) -> None:
    if entry["status"] == "recollection":
        raise ValueError(f"{what} in {PATH.name} is recollection without a source: it is never printed or used")


def _sourced(entry: Mapping[str, Any], value: float) -> Sourced:
    _require_source(entry, str(value))
    return Sourced(value, entry["status"], entry["source"], entry["confidence"])
