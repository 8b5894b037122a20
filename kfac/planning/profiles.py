"""Profiles: what planning and simulation know of a model and of a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kfac.planning.costs import Cost, LinearCost, cost_from_dict, cost_to_dict


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer in execution order.

    Args:
        name: the module's name.
        a_dim: dimension of factor A (inputs, plus one with a bias); 0 for a layer without factors.
        g_dim: dimension of factor G (outputs); 0 for a layer without factors.
        gradient_elements: elements of the gradients that become ready with this layer (its own parameters and those of
            uncovered modules next to it).
        forward_s, backward_s: seconds of the forward and backward pass up to and through this layer since the last one.
        a_statistics_s, g_statistics_s: seconds to compute the statistics of A and G.
        precondition_s: seconds to precondition this layer's gradient.
    """

    name: str
    a_dim: int
    g_dim: int
    gradient_elements: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    a_statistics_s: float = 0.0
    g_statistics_s: float = 0.0
    precondition_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.a_dim, self.g_dim, self.gradient_elements) < 0 or (self.a_dim == 0) != (self.g_dim == 0):
            raise ValueError(f"layer {self.name!r}: dimensions {self.a_dim} x {self.g_dim} are impossible")
        for key, value in asdict(self).items():
            if key.endswith("_s") and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"layer {self.name!r}: {key} must be finite and not negative, got {value!r}")

    @property
    def has_factors(self) -> bool:
        """Whether K-FAC preconditions this layer."""
        return self.a_dim > 0


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model as the planner sees it: its layers in execution order, with their seconds on one device.

    Args:
        name: for people.
        layers: in the order of the forward pass.
        loss_s: seconds between the last layer's A statistics and the first G statistics (loss forward and backward).
        update_s: seconds of the optimizer's update after preconditioning.
        provenance: where the numbers came from (``kind`` is ``measured``, ``derived`` or ``estimated``).
    """

    name: str
    layers: tuple[LayerProfile, ...]
    loss_s: float = 0.0
    update_s: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError(f"model profile {self.name!r} has no layers")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            raise ValueError(f"model profile {self.name!r}: layer names repeat")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "provenance": dict(self.provenance)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelProfile:
        """The value of a JSON form."""
        return cls(**{**data, "layers": tuple(LayerProfile(**layer) for layer in data["layers"])})

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> ModelProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: if the file is missing or is no model profile, naming it.
        """
        return cls.from_dict(_read_json(path, "model profile"))


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """Cost models of a cluster at a world size.

    Args:
        world_size: number of ranks.
        all_reduce, reduce, broadcast: seconds as a function of the message's elements.
        inverse: seconds as a function of the matrix dimension.
        provenance: hardware, versions, date, fit error (``kind`` is ``measured``, ``derived`` or ``estimated``).
    """

    world_size: int
    all_reduce: Cost
    reduce: Cost
    broadcast: Cost
    inverse: Cost
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")

    def at(self, world_size: int) -> ClusterProfile:
        """The same costs for another number of ranks; one rank communicates for free."""
        if world_size == 1:
            free = LinearCost(0.0, 0.0)
            return replace(self, world_size=1, all_reduce=free, reduce=free, broadcast=free)
        return replace(self, world_size=world_size)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form.

        Raises:
            TypeError: if a cost is a plain callable.
        """
        costs = {k: cost_to_dict(getattr(self, k)) for k in ("all_reduce", "reduce", "broadcast", "inverse")}
        return {"world_size": self.world_size, **costs, "provenance": dict(self.provenance)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClusterProfile:
        """The value of a JSON form."""
        costs = {k: cost_from_dict(data[k]) for k in ("all_reduce", "reduce", "broadcast", "inverse")}
        return cls(world_size=data["world_size"], **costs, provenance=data.get("provenance", {}))

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> ClusterProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: if the file is missing or is no cluster profile, naming it.
        """
        return cls.from_dict(_read_json(path, "cluster profile"))


class _Checked(dict[str, Any]):
    """A JSON object whose missing keys are reported with the file's name."""

    def __init__(self, data: Mapping[str, Any], what: str) -> None:
        super().__init__(data)
        self._what = what

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self._what}: no {key!r} in it")


def _read_json(path: Path | str, what: str) -> Mapping[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the {what} {path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a {what}")
    return _Checked(data, f"{what} {path}")
