"""The groups of keys of a configuration, each a checked frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.data import DATA_NAMES
from experiments.models import ACTIVATIONS, AUTOENCODER, MODEL_NAMES, POOLINGS
from experiments.settings import ConfigError, at_least, file_name, fits, one_of
from kfac.finals import TURNS
from kfac.planning import ScheduleConfig
from kfac.schedules import AUTO, NAMED_SCHEDULES

REPLAN_AFTER = 10
"""Iterations after which a run that knows no costs plans anew from its own."""

_COSTED_FUSION = ("greedy", "optimal")
_COSTED_PLACEMENT = ("lbp", "optimized")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and what :func:`experiments.models.build_model` takes for some of them."""

    name: str
    hidden: tuple[int, ...] = (128, 128)
    activation: str = "tanh"
    depth: int = 4
    width: int = 128
    heads: int = 4
    tied: bool = False
    patch_size: int = 4
    pooling: str = "class"

    def __post_init__(self) -> None:
        one_of("model.name", self.name, MODEL_NAMES)
        one_of("model.activation", self.activation, ACTIVATIONS)
        one_of("model.pooling", self.pooling, POOLINGS)
        for name in ("depth", "width", "heads", "patch_size"):
            at_least(f"model.{name}", getattr(self, name), 1, high=1_000_000)
        for width in self.hidden:
            at_least("model.hidden", width, 1, high=1_000_000)
        if self.width % self.heads:
            raise ConfigError(f"model.width={self.width} is not a multiple of model.heads={self.heads}")
        if self.name == AUTOENCODER and not self.hidden:
            raise ConfigError("model.hidden=[] leaves the autoencoder without a code: model.hidden=[128,64,32,8]")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which images or text.

    Images are square with ``image_size`` pixels, ``augment``-ed in training, read by ``workers`` processes; text comes
    in samples of ``context`` characters.
    """

    name: str
    path: str | None = None
    image_size: int = 32
    augment: bool = False
    workers: int = 2
    context: int = 64

    def __post_init__(self) -> None:
        one_of("data.name", self.name, DATA_NAMES)
        at_least("data.image_size", self.image_size, 1, high=4096)
        at_least("data.workers", self.workers, 0, high=1024)
        at_least("data.context", self.context, 1, high=8192)


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """A schedule's name with its switches.

    Args:
        name: its name.
        switches: all of them; None for ``auto``, which finds them.
        fixed: those that ``auto`` does not choose.
        replan_after: iterations after which ``auto`` plans anew from the run's own times; ``auto``:
            :data:`REPLAN_AFTER` where nothing else says what things cost; None: never.
        replan_turns: turns of each plan that takes part in the run's choice among the best ones; 0: simulation
            decides, if what it gains is more than its error.
    """

    name: str
    switches: ScheduleConfig | None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    replan_after: int | str | None = None
    replan_turns: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScheduleSettings:
        """The value of a group of ``name`` and all switches, or of ``name: auto`` and those that are fixed."""
        switches = dict(data)
        name = switches.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"schedule.name={name!r} is not a name")
        file_name("schedule.name", name)
        fits("schedule", switches)
        if name == AUTO:
            after, turns = switches.pop("replan_after", AUTO), switches.pop("replan_turns", TURNS)
            if isinstance(turns, bool) or not isinstance(turns, int) or turns < 0:
                raise ConfigError(f"schedule.replan_turns={turns!r} is not a number of turns (0: none)")
            if after not in (AUTO, None) and (isinstance(after, bool) or not isinstance(after, int) or after < 1):
                raise ConfigError(f"schedule.replan_after={after!r} is not a number of iterations, auto or null")
            ScheduleConfig.from_dict(switches)  # checks keys and values
            if switches.get("factor_collective") == "none" and after is not None:
                raise ConfigError(
                    "schedule.factor_collective=none leaves every rank its own statistics, so that none can measure "
                    "all of them: schedule.replan_after=null"
                )
            return cls(name=name, switches=None, fixed=switches, replan_after=after, replan_turns=turns)
        return cls(name=name, switches=ScheduleConfig.from_dict(switches))

    @property
    def value(self) -> str | dict[str, Any] | ScheduleConfig:
        """What :class:`kfac.KFAC` takes."""
        if self.fixed:
            return {"name": self.name, **self.fixed}
        return self.switches or self.name

    @property
    def label(self) -> str:
        """The name, with what differs from the schedule of that name: ``spdkfac+pipelining=none``."""
        if self.fixed:
            return "+".join([self.name, *(f"{key}={value}" for key, value in self.fixed.items())])
        named = NAMED_SCHEDULES.get(self.name)
        if named is None or self.switches is None:
            return self.name
        usual, own = named.to_dict(), self.switches.to_dict()
        return "+".join([self.name, *(f"{key}={own[key]}" for key in own if own[key] != usual[key])])

    @property
    def needs_profiles(self) -> bool:
        """Whether its plan depends on measured costs."""
        s = self.switches
        if s is None:
            return True
        costed = s.fusion in _COSTED_FUSION or s.placement in _COSTED_PLACEMENT or s.inverse_fusion == "planned"
        return s.curvature and costed

    def to_dict(self) -> dict[str, Any]:
        """The group this was read from."""
        if self.switches is None:
            return {
                "name": self.name,
                "replan_after": self.replan_after,
                "replan_turns": self.replan_turns,
                **self.fixed,
            }
        return {"name": self.name, **self.switches.to_dict()}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """SGD with momentum, and how its learning rate changes (epochs may be fractions)."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup_epochs: float = 0.0
    decay_epochs: tuple[float, ...] = ()
    decay_factor: float = 0.1

    def __post_init__(self) -> None:
        one_of("optimizer.schedule", self.schedule, ("constant", "step", "cosine"))
        at_least("optimizer.lr", self.lr, 0, open_=True)
        at_least("optimizer.momentum", self.momentum, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.warmup_epochs", self.warmup_epochs, 0)
        at_least("optimizer.decay_factor", self.decay_factor, 0, open_=True)
        for epoch in self.decay_epochs:
            at_least("optimizer.decay_epochs", epoch, 0)
        if self.momentum >= 1:
            raise ConfigError(f"optimizer.momentum={self.momentum:g} must be below 1")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluation each ``every`` iterations (None: after each epoch) in batches of ``batch_size``."""

    every: int | None = None
    batch_size: int = 256

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 1)
        at_least("evaluation.batch_size", self.batch_size, 1, high=1_000_000)


@dataclass(frozen=True, kw_only=True)
class TimelineSettings:
    """Timelines of iterations ``start``, ``start + every``, ... (``count`` of them; ``every`` None: spread evenly)."""

    start: int = 5
    every: int | None = None
    count: int = 5

    def __post_init__(self) -> None:
        at_least("timeline.start", self.start, 0)
        at_least("timeline.every", self.every, 1)
        at_least("timeline.count", self.count, 0, high=100_000)

    def chosen(self, iterations: int) -> tuple[int, ...]:
        """The recorded ones of a run's iterations, in order; the last one where none of them is in the run."""
        if self.count == 0:
            return ()
        left = max(0, iterations - self.start)
        offsets = [k * left // self.count if self.every is None else k * self.every for k in range(self.count)]
        inside = {self.start + offset for offset in offsets if offset < left}
        return tuple(sorted(inside)) or (iterations - 1,)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """A checkpoint each ``every`` iterations (None: none); the last ``keep`` stay."""

    every: int | None = 100
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class ProfilingSettings:
    """How a machine is measured: recorded ``iterations``, ``repeats`` of each collective and inverse."""

    iterations: int = 6
    repeats: int = 10

    def __post_init__(self) -> None:
        at_least("profiling.iterations", self.iterations, 1, high=1_000_000)
        at_least("profiling.repeats", self.repeats, 1, high=1_000_000)
