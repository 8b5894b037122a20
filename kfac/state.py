"""The preconditioner's state as plain values and tensors (the only way to copy it), and whether one fits a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kfac.communication import Communicator
from kfac.config import KFACConfig
from kfac.factors import FactorState
from kfac.holdings import Factors, gather, holder_of
from kfac.layers import KFACLayer
from kfac.planning import Plan
from kfac.planning.checks import whole

logger = logging.getLogger(__name__)

STATE_VERSION = 2
"""2: factors are blocks, of all kinds of layers. 1 knew linear layers and convolutions, with one block each."""

MEANING = ("fisher", "scaling", "loss_reduction", "weight_sharing", "average_from")
"""The options that say what running averages are averages of."""


class BoundToModel:
    """What has hooks on a model: it is neither copied nor pickled, but saved as a state."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError."""
        raise TypeError(
            f"a {type(self).__name__} belongs to the model that it has hooked, and cannot be copied or pickled: make a "
            "new one for the other model, and give it this one's state_dict()"
        )


def make_state(
    factors: Factors, plan: Plan, config: KFACConfig, steps: int, skipped_steps: int, communicator: Communicator
) -> dict[str, Any]:
    """What :meth:`kfac.KFAC.state_dict` returns; tensors are copies. Collective where a rank lacks factors."""
    elsewhere = gather(factors, plan, communicator)
    states = {key: elsewhere[key] if key in elsewhere else factor.state_dict() for key, factor in factors.items()}
    return {
        "version": STATE_VERSION,
        "steps": steps,
        "skipped_steps": skipped_steps,
        "plan": plan.to_dict(),
        "config": config.to_dict(),
        "factors": {f"{name}/{side}": state for (name, side), state in states.items()},
    }


def read_state(state: Mapping[str, Any], factors: Factors, config: KFACConfig) -> tuple[dict[str, Any], Plan]:
    """A state of any version in the present form, and its Plan, if they fit these factors.

    Warns if the state's averages are of something else than ``config`` says.

    Raises:
        ValueError: if it does not fit, naming the versions, or the factors that are missing, unknown or damaged.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version is None:
        raise ValueError("this is no state of KFAC: it has no version")
    if version not in range(1, STATE_VERSION + 1):
        raise ValueError(
            f"the state has format version {version}, this kfac reads versions 1 to {STATE_VERSION}: load it with the "
            "version of kfac that has saved it"
        )
    missing = [key for key in ("steps", "skipped_steps", "plan", "factors") if key not in state]
    if missing:
        raise ValueError(f"the state is damaged: it has no {', '.join(missing)}")
    for key in ("steps", "skipped_steps"):
        whole(f"{key} of the state", state[key], 0)
    plan = Plan.from_dict(state["plan"])
    for label, part in {"factors": state["factors"], "config": state.get("config", {})}.items():
        if not isinstance(part, Mapping):
            raise ValueError(f"the state is damaged: {label} should be a mapping, but is {type(part).__name__}")
    for key, entry in state["factors"].items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"the state is damaged: factor {key} should be a mapping, but is {type(entry).__name__}")
    saved = {key: _present_form(entry, version) for key, entry in state["factors"].items()}
    if not saved and not plan.schedule.curvature:
        saved = {f"{name}/{side}": FactorState(factor.shape).state_dict() for (name, side), factor in factors.items()}
    _check_names(saved, factors, version)
    for (name, side), factor in factors.items():
        other = factors[name, "A"]
        _check_size(f"{side} of {name}", saved[f"{name}/{side}"], factor, state.get("config", {}), config)
        _check_factor(f"{side} of {name}", saved[f"{name}/{side}"], factor, other if side == "G" else None)
    _check_meaning(state.get("config", {}), config)
    return {**state, "factors": saved}, plan


def load_factors(state: Mapping[str, Any], factors: Factors) -> None:
    """Take over the factors of a state that has been read, on these factors' device and in their dtype."""
    for (name, side), factor in factors.items():
        factor.load_state_dict(state["factors"][f"{name}/{side}"], factor.like)


def _present_form(entry: Mapping[str, Any], version: int) -> dict[str, Any]:
    added = {
        "upper": None,
        "vectors": None,
        "values": None,
        "corrected": None,
        "trace": None,
        **({"blocks": 1} if version == 1 else {}),
    }
    return {**added, **entry}


def _check_names(saved: Mapping[str, Any], factors: Factors, version: int) -> None:
    def listed(keys: set[tuple[str, str]]) -> str:
        names = [f"{side} of {name}" for name, side in sorted(keys)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    there = {(name, side) for name, _, side in (key.rpartition("/") for key in saved)}
    lacking, unknown = factors.keys() - there, there - factors.keys()
    if not lacking and not unknown:
        return
    problems = [f"it lacks {listed(lacking)}"] if lacking else []
    problems += [f"it has {listed(unknown)}, which this one has not"] if unknown else []
    remedy = "; version 1 knew layers=('linear', 'convolution') only: configure these" if version == 1 else ""
    raise ValueError(f"the state is of another model or configuration: {'; '.join(problems)}{remedy}")


def _check_size(
    label: str, entry: Mapping[str, Any], factor: FactorState, saved: Mapping[str, Any], config: KFACConfig
) -> None:
    size, shape = (entry.get("blocks"), entry.get("dim")), factor.shape
    if size == (shape.count, shape.dim):
        return
    found = f"{label} has {size[0]} block(s) of dimension {size[1]}, here it has {shape.count} of dimension {shape.dim}"
    before, now = (_max_dims(options) for options in (saved, config.to_dict()))
    if before not in (now, {}):
        raise ValueError(f"the state was saved with another kfac.max_dim ({before}, now {now}; set it back): {found}")
    raise ValueError(f"the state is of another model: {found}")


def _max_dims(options: Mapping[str, Any]) -> dict[str, Any]:
    """``max_dim`` of all layers (``*``) and of those that ``overrides`` name."""
    several = {"*": options, **options.get("overrides", {})}
    return {pattern: values["max_dim"] for pattern, values in several.items() if "max_dim" in values}


def _check_factor(label: str, entry: Mapping[str, Any], factor: FactorState, a: FactorState | None) -> None:
    """``a``: for a factor G its layer's A."""
    shape = factor.shape
    whole_factor, square = (factor.elements,), (shape.count, shape.dim, shape.dim)
    shapes = {
        "average": whole_factor,
        "inverse": whole_factor,
        "upper": whole_factor,
        "vectors": square,
        "values": square[:2],
    }
    if a is not None:
        rows, columns = (x.count // x.groups * x.dim for x in (shape, a.shape))
        shapes["corrected"] = (shape.groups, rows, columns)
    for key, expected in shapes.items():
        tensor = entry.get(key)
        if tensor is None and key in entry:
            continue
        found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if not isinstance(tensor, Tensor) or found != expected:
            raise ValueError(f"the state is damaged: {key} of {label} should have shape {expected}, but is {found}")
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_meta:
            what = f"{tensor.dtype} ({tensor.layout}, {tensor.device.type})"
            raise ValueError(f"the state is damaged: {key} of {label} should hold real numbers, but is {what}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the state is damaged: {key} of {label} is not finite")
    weight = entry.get("weight")
    trace = entry["trace"]
    if trace is not None and not (isinstance(trace, float) and 0.0 <= trace < math.inf):
        raise ValueError(f"the state is damaged: trace of {label} should be a number, but is {trace!r}")
    used = entry["average"] is not None
    if not isinstance(weight, float) or not (0.0 if used else -1.0) < weight < 1.0 + 1e-9:
        raise ValueError(f"the state is damaged: weight of {label} should be a number from 0 to 1, but is {weight!r}")


def _check_meaning(saved: Mapping[str, Any], config: KFACConfig) -> None:
    now = config.to_dict()
    different = [f"{key}={saved[key]}, now {now[key]}" for key in MEANING if saved.get(key, now[key]) != now[key]]
    if different:
        logger.warning("the state's running averages were collected with other options: %s", "; ".join(different))


def dense_factor(layers: Sequence[KFACLayer], factors: Factors, plan: Plan, rank: int, name: str, side: str) -> Tensor:
    """See :meth:`kfac.KFAC.factor`."""
    layer = next((layer for layer in layers if layer.name == name), None)
    if layer is None or side not in ("A", "G"):
        raise KeyError(f"no factor {side!r} of {name!r}: layers are {[layer.name for layer in layers]}")
    factor = factors[name, side]
    holder = holder_of(plan, name, side)
    if factor.average is None and factor.known and holder not in (None, rank):
        raise KeyError(f"only rank {holder} has {side} of {name!r}: ask it there, or take it from state_dict()")
    if factor.average is None:
        raise KeyError(f"{side} of {name!r} has no statistics yet")
    order = layer.a_order() if side == "A" else None
    groups = []
    for blocks in factor.matrix().chunk(factor.shape.groups):
        matrix = torch.block_diag(*blocks)[: factor.shape.width, : factor.shape.width]
        groups.append(matrix if order is None else matrix[order][:, order])
    dense: Tensor = torch.block_diag(*groups)
    return dense
