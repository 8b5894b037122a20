"""Profiles: what planning and simulation know of a model and of a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kfac.planning.checks import keys_of, mapping, number, sequence, text, whole
from kfac.planning.costs import Cost, LinearCost, cost_from_dict, cost_to_dict

_Profile = TypeVar("_Profile")


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer in execution order.

    Args:
        name: the module's name.
        a_dim: dimension of factor A (inputs, plus one with a bias), or of each of its blocks; 0 for a layer without
            factors.
        g_dim: dimension of factor G (outputs), or of each of its blocks; 0 for a layer without factors.
        gradient_elements: elements of the gradients that become ready with this layer (its own parameters and those of
            uncovered modules next to it).
        forward_s, backward_s: seconds of the forward and backward pass up to and through this layer since the last one.
        a_statistics_s, g_statistics_s: seconds to compute the statistics of A and G.
        precondition_s: seconds to precondition this layer's gradient.
        a_blocks, g_blocks: equal diagonal blocks that the factors consist of.
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
    a_blocks: int = 1
    g_blocks: int = 1

    def __post_init__(self) -> None:
        what = f"layer {text('a layer name', self.name)!r}"
        for key, value in vars(self).items():
            if key.endswith("_s"):
                object.__setattr__(self, key, number(f"{what}: {key}", value))
            elif key != "name":
                object.__setattr__(self, key, whole(f"{what}: {key}", value, int(key.endswith("_blocks"))))
        if (self.a_dim == 0) != (self.g_dim == 0):
            raise ValueError(f"{what}: dimensions {self.a_dim} x {self.g_dim} are impossible")

    @property
    def has_factors(self) -> bool:
        """Whether K-FAC preconditions this layer."""
        return self.a_dim > 0

    @property
    def matrix_elements(self) -> int:
        """Elements of the gradient that is preconditioned: rows of G times rows of A, or fewer in groups."""
        return min(self.gradient_elements, self.a_blocks * self.a_dim * self.g_blocks * self.g_dim)


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
        what = f"model profile {text('name', self.name)!r}"
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError(f"{what} has no layers")
        for key in ("loss_s", "update_s"):
            object.__setattr__(self, key, number(f"{what}: {key}", getattr(self, key)))
        mapping("provenance", self.provenance)
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            raise ValueError(f"{what}: layer names repeat")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "provenance": dict(self.provenance)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelProfile:
        """The value of a JSON form.

        Raises:
            ValueError: for missing, unknown or wrongly typed keys, naming them.
        """
        found = keys_of(cls, "model profile", data)
        layers = [
            LayerProfile(**keys_of(LayerProfile, f"layer {k}", layer))
            for k, layer in enumerate(sequence("layers", found["layers"]))
        ]
        return cls(**{**found, "layers": tuple(layers)})

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> ModelProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: if the file is missing or is no model profile, naming it and the key.
        """
        return _load(path, "model profile", cls.from_dict)


_COSTS = ("all_reduce", "reduce", "broadcast", "inverse")


@dataclass(frozen=True, kw_only=True)
class Interference:
    """What an ideal model of a cluster leaves out. The simulation knows it, the rules that make plans do not.

    Args:
        slowdown: the part of its speed that computing loses while a collective is under way, 0 (none) to 1 (it stands
            still): collectives occupy the accelerator, its memory and the bus.
        item_s: seconds that a sum over the ranks takes longer for each factor or gradient in the message: negotiation,
            and copies into and out of it.
        wait_s: seconds per iteration of more than one rank that no message accounts for: waiting for the slowest rank,
            for data, for the runtime.
        message_s: seconds of computing that every collective costs which starts while there is some: threads that carry
            it wake up and share its cores.
        element_s: the same for each element of it: they copy it, and the system sends it, on the cores that compute.
    """

    slowdown: float = 0.0
    item_s: float = 0.0
    wait_s: float = 0.0
    message_s: float = 0.0
    element_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("slowdown", "item_s", "wait_s", "message_s", "element_s"):
            object.__setattr__(self, key, number(f"interference: {key}", getattr(self, key)))
        if self.slowdown > 1:
            raise ValueError(f"interference: slowdown is a part of the speed, from 0 to 1, got {self.slowdown!r}")

    def burden_s(self, elements: float) -> float:
        """Seconds of computing that a collective of so many elements costs."""
        return self.message_s + self.element_s * elements


NO_INTERFERENCE = Interference()


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
        object.__setattr__(self, "world_size", whole("world_size", self.world_size, 1))
        for key in _COSTS:
            if not callable(getattr(self, key)):
                raise ValueError(f"{key} must be a cost (seconds as a function of a size), got {getattr(self, key)!r}")
        mapping("provenance", self.provenance)

    def at(self, world_size: int) -> ClusterProfile:
        """The same costs for another number of ranks; one rank communicates for free."""
        if whole("world_size", world_size, 1) == 1:
            free = LinearCost(0.0, 0.0)
            return replace(self, world_size=1, all_reduce=free, reduce=free, broadcast=free)
        return replace(self, world_size=world_size)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form.

        Raises:
            TypeError: if a cost is a plain callable.
        """
        costs = {k: cost_to_dict(getattr(self, k)) for k in _COSTS}
        return {"world_size": self.world_size, **costs, "provenance": dict(self.provenance)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClusterProfile:
        """The value of a JSON form.

        Raises:
            ValueError: for missing, unknown or wrongly typed keys, naming them.
        """
        if cls is ClusterProfile and isinstance(data, Mapping) and "interference" in data:
            return DisturbedCluster.from_dict(data)
        found = keys_of(cls, "cluster profile", data)
        for key in _COSTS:
            try:
                found[key] = cost_from_dict(found[key])
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
        if "interference" in found:
            found["interference"] = Interference(**keys_of(Interference, "interference", found["interference"]))
        return cls(**found)

    def save(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> ClusterProfile:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: if the file is missing or is no cluster profile, naming it and the key.
        """
        return _load(path, "cluster profile", cls.from_dict)


@dataclass(frozen=True, kw_only=True)
class DisturbedCluster(ClusterProfile):
    """A cluster on which communication and computing get in each other's way.

    Args:
        interference: how; one rank alone has none.
    """

    interference: Interference

    def at(self, world_size: int) -> ClusterProfile:
        """The same costs and interference for another number of ranks; one rank has neither."""
        found = super().at(world_size)
        return DisturbedCluster.disturbed(found, NO_INTERFERENCE if found.world_size == 1 else self.interference)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form.

        Raises:
            TypeError: if a cost is a plain callable.
        """
        return {**super().to_dict(), "interference": asdict(self.interference)}

    @classmethod
    def disturbed(cls, cluster: ClusterProfile, interference: Interference) -> DisturbedCluster:
        """A cluster with interference."""
        costs = {key: getattr(cluster, key) for key in _COSTS}
        provenance = cluster.provenance
        return cls(world_size=cluster.world_size, **costs, provenance=provenance, interference=interference)


def interference_of(cluster: ClusterProfile) -> Interference:
    """How communication and computing get in each other's way on a cluster: not at all unless it says so."""
    return cluster.interference if isinstance(cluster, DisturbedCluster) else NO_INTERFERENCE


def _load(path: Path | str, what: str, from_dict: Callable[[Any], _Profile]) -> _Profile:
    try:
        return from_dict(json.loads(Path(path).read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the {what} {path}: {error}") from error
