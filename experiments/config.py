"""What a run is: the typed, checked form of the configurations in ``conf/``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.arguments import per_pattern
from experiments.data import TEXT_DATA, count_training_samples, raw_shape
from experiments.groups import (
    REPLAN_AFTER,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OptimizerSettings,
    ProfilingSettings,
    ScheduleSettings,
    TimelineSettings,
)
from experiments.models import AUTOENCODER, MODEL_NAMES, TEXT_MODELS
from experiments.nodes import KEYS, Nodes
from experiments.objectives import summed_terms
from experiments.settings import ConfigError, at_least, file_name, fits, folder, one_of, read
from experiments.tracking.settings import TrackingSettings
from kfac.config import KFACConfig
from kfac.finals import longest
from kfac.planning import ClusterProfile, ModelProfile
from kfac.planning.scaling import LATENCY, scaled_cluster
from kfac.planning.shipped_profiles import load_shipped_cluster, load_shipped_model, shipped_names
from kfac.schedules import ONE_PROCESS

MEASURE = "measure"
DEFAULT = "default"
AUTO = "auto"
SCALED_WITH_THE_LOSS = ("damping", "kl_clip")
"""K-FAC options whose value ``auto`` is the library's default times the terms that the loss sums over per sample.

A loss c times as large has c times the gradient and c times the curvature (Gauss-Newton): with c times the damping and
c times the KL clip its steps are the same.
"""
MAX_WORLD_SIZE = 65_536
NOT_IDENTITY = ("tracking", "checkpoint", "name", "sweep", "runs", "rerun", "progress", "site")
"""Keys that do not make a run different: where it lies, who watches it, how often it is saved."""


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What training and profiling share; see ``conf/common.yaml``.

    Raises:
        ConfigError: for impossible values and missing files, naming the key.
    """

    model: ModelSettings
    data: DataSettings
    kfac: dict[str, Any]
    optimizer: OptimizerSettings
    world_size: int
    seed: int
    batch_size: int
    label_smoothing: float = 0.0
    threads: int = 1
    device: str = "auto"
    check_collectives: bool = False
    profiling: ProfilingSettings = field(default_factory=ProfilingSettings)

    def __post_init__(self) -> None:
        at_least("world_size", self.world_size, 1, high=MAX_WORLD_SIZE)
        at_least("batch_size", self.batch_size, 1, high=1_000_000)
        at_least("threads", self.threads, 1, high=4096)
        at_least("seed", self.seed, 0)
        object.__setattr__(self, "kfac", {**self.kfac, **self._resolved_kfac()})  # what is recorded
        at_least("label_smoothing", self.label_smoothing, 0)
        if self.label_smoothing >= 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing:g} must be below 1")
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        steps = self.kfac_config().accumulation_steps
        if self.batch_size % steps:
            raise ConfigError(f"batch_size={self.batch_size} is not a multiple of kfac.accumulation_steps={steps}")
        self._check_together()
        # Counting stops where it is certain that the data are enough: a folder of a million images is not walked.
        needed = self.batch_size * self.world_size
        found = count_training_samples(self.data, enough=needed)
        if found < needed:
            raise ConfigError(
                f"batch_size={self.batch_size} on world_size={self.world_size} needs {needed} samples per iteration, "
                f"but data={self.data.name} has {found} for training"
            )

    def _check_together(self) -> None:
        """Raise a ConfigError for a model, data and loss that do not go together."""
        model, data = self.model, self.data
        if (model.name in TEXT_MODELS) != (data.name in TEXT_DATA):
            kind, choices = (
                ("text", TEXT_DATA) if model.name in TEXT_MODELS else ("images", ("digits", "cifar10", "..."))
            )
            raise ConfigError(
                f"model={model.name} reads {kind}, which data={data.name} is not: data={', '.join(choices)}"
            )
        if model.name == "vit" and data.image_size % model.patch_size:
            raise ConfigError(
                f"data.image_size={data.image_size} is not a multiple of model.patch_size={model.patch_size}"
            )
        if model.name == AUTOENCODER and self.label_smoothing:
            raise ConfigError(f"label_smoothing={self.label_smoothing:g}: model={AUTOENCODER} has no labels to smooth")

    def _resolved_kfac(self) -> dict[str, Any]:
        """The K-FAC options that may be given in other forms than :class:`KFACConfig`'s."""
        resolved: dict[str, Any] = {}
        for key in SCALED_WITH_THE_LOSS:
            if self.kfac.get(key) == AUTO:
                resolved[key] = getattr(KFACConfig, key) * summed_terms(self.model.name, raw_shape(self.data))
        if "overrides" in self.kfac:
            resolved["overrides"] = per_pattern(self.kfac["overrides"])
        return resolved

    def kfac_config(self, **changes: Any) -> KFACConfig:
        """The K-FAC options; ``lr`` null means the optimizer's."""
        options = dict(self.kfac)
        fits("kfac", options)
        for key in ("include", "exclude"):
            patterns = options.get(key, [])
            if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ConfigError(f"kfac.{key}={patterns!r} is not a list of patterns, as in kfac.{key}=[layer1.*]")
        if options.get("lr") is None:
            options["lr"] = self.optimizer.lr
        try:
            return KFACConfig.from_dict({**options, **changes})
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(CommonConfig):
    """``python -m experiments.profile``; see ``conf/profile.yaml``."""

    output: str = "profiles"

    def __post_init__(self) -> None:
        super().__post_init__()
        folder("output", self.output)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProfileConfig:
        """The value of a nested plain form, checked as :meth:`TrainConfig.from_dict` does."""
        return read(cls, data)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CommonConfig):
    """``python -m experiments.train``; see ``conf/train.yaml``."""

    schedule: ScheduleSettings
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    epochs: int | None = 3
    iterations: int | None = None
    warmup: int = 3
    cluster: str = MEASURE
    model_profile: str | None = None
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    timeline: TimelineSettings = field(default_factory=TimelineSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    name: str | None = None
    sweep: str = "single"
    runs: str = "runs"
    rerun: bool = False
    progress: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "iterations", "progress"):
            at_least(name, getattr(self, name), 1, high=10**12)
        at_least("warmup", self.warmup, 0)
        if self.epochs is None and self.iterations is None:
            raise ConfigError("epochs and iterations are both null: set one of them")
        _check_one_process(self.schedule, self.world_size)
        file_name("sweep", self.sweep)
        file_name("name", self.name)
        folder("runs", self.runs)
        self.profiles()
        if (after := self.replan_after) is not None:
            # What an iteration takes is said of those under the plan that stays, once the first of them is over.
            turns = longest(self.schedule.replan_turns, intervals=self.kfac_config().intervals(0))
            decided = next((n for n in (after + turns, after) if self.iterations is None or self.iterations > n), None)
            if decided is not None:
                object.__setattr__(self, "warmup", max(self.warmup, decided + 1))
                start = max(self.timeline.start, decided + 1)
                object.__setattr__(self, "timeline", replace(self.timeline, start=start))

    def profiles(self) -> tuple[ModelProfile | None, ClusterProfile | None]:
        """The profiles that were given by file or name; None where they are measured or left to the default."""
        cluster = None if self.cluster in (MEASURE, DEFAULT) else load_cluster(self.cluster, (MEASURE, DEFAULT))
        model = None if self.model_profile is None else load_model(self.model_profile)
        return model, cluster and cluster.at(self.world_size)

    @property
    def measures(self) -> bool:
        """Whether this machine is profiled before the run: asked for, and of use to the schedule."""
        known = not self.schedule.needs_profiles or self.replan_after is not None
        return self.cluster == MEASURE and self.world_size > 1 and not known

    @property
    def replan_after(self) -> int | None:
        """Iterations after which the run plans anew from its own times; None: never."""
        after = self.schedule.replan_after
        if self.world_size == 1 or after is None:
            return None
        if isinstance(after, int):
            return after
        return REPLAN_AFTER if self.cluster == MEASURE else None

    def to_dict(self) -> dict[str, Any]:
        """The nested plain form, which :meth:`from_dict` reads back."""
        return dict(_plain(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """The value of a nested plain form (Hydra's, resolved); of ``site`` and the nodes only the ranks count.

        Raises:
            ConfigError: for unknown keys, wrong types, impossible values and missing files.
        """
        nodes = Nodes.of(data)
        own = {key: value for key, value in data.items() if key not in ("site", *KEYS)}
        if own.get("world_size") is None:
            own["world_size"] = nodes.world_size
        return read(cls, own)

    def identity(self) -> dict[str, Any]:
        """What makes the run different from others: no paths, no tracking, no site; of files their content."""
        data = {key: value for key, value in self.to_dict().items() if key not in NOT_IDENTITY}
        path = data["data"]["path"]
        data["data"] = {key: value for key, value in data["data"].items() if key not in ("path", "workers")}
        if self.data.name in TEXT_DATA and path is not None:
            data["data"]["text"] = _content(path)
        if "overrides" in data["kfac"]:  # whose order matters
            data["kfac"] = {**data["kfac"], "overrides": list(data["kfac"]["overrides"].items())}
        for key in ("cluster", "model_profile"):
            if data[key] and Path(data[key]).is_file():
                data[key] = _content(data[key])
        return data

    @property
    def run_id(self) -> str:
        """``MODEL-SCHEDULE-wWORLD-sSEED-`` and 8 hex digits of the identity's SHA-256."""
        digest = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.model.name}-{self.schedule.name}-w{self.world_size}-s{self.seed}-{digest}"

    @property
    def record_path(self) -> Path:
        """The directory of the run's record."""
        return Path(self.runs) / self.sweep / self.run_id


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """``python -m experiments.simulate``; see ``conf/simulate.yaml``."""

    model: ModelSettings
    schedule: ScheduleSettings
    cluster: str
    model_profile: str | None
    world_size: int | None
    scaling: str | None
    output: str

    def __post_init__(self) -> None:
        at_least("world_size", self.world_size, 1, high=MAX_WORLD_SIZE)
        if self.scaling is not None:
            one_of("scaling", self.scaling, tuple(LATENCY))
        folder("output", self.output)
        cluster = self.profiles()[1]
        at_least("world_size", cluster.world_size, 1, high=MAX_WORLD_SIZE)
        _check_one_process(self.schedule, cluster.world_size)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SimulateConfig:
        """The value of a nested plain form, checked as :meth:`TrainConfig.from_dict` does."""
        return read(cls, data)

    def profiles(self) -> tuple[ModelProfile, ClusterProfile]:
        """The two profiles, the cluster's at ``world_size``, with its costs or those that ``scaling`` makes of them."""
        cluster = load_cluster(self.cluster)
        model = load_model(self.model_profile or self.model.name)
        default = 1 if self.schedule.name == ONE_PROCESS else cluster.world_size
        world_size = self.world_size or default
        if self.scaling is None or world_size == cluster.world_size:
            return model, cluster.at(world_size)
        try:
            return model, scaled_cluster(cluster, world_size, self.scaling)
        except ValueError as error:
            raise ConfigError(f"scaling={self.scaling}: {error}") from error

    @property
    def borrowed(self) -> int | None:
        """The ranks whose costs of collectives are used as they are for another number of ranks; None: they are not."""
        own = load_cluster(self.cluster).world_size
        used = self.profiles()[1].world_size
        return own if self.scaling is None and used not in (1, own) else None


def _check_one_process(schedule: ScheduleSettings, world_size: int) -> None:
    if schedule.name == ONE_PROCESS and world_size > 1:
        raise ConfigError(
            f"schedule={ONE_PROCESS} runs on one process, not on world_size={world_size}: "
            "use world_size=1, or schedule=dkfac, mpdkfac, spdkfac or auto"
        )


def load_cluster(source: str, others: tuple[str, ...] = ()) -> ClusterProfile:
    """The cluster profile of a shipped name or a JSON file; ``others`` are further choices for the message."""
    if source in shipped_names("cluster"):
        return load_shipped_cluster(source)
    if not Path(source).is_file():
        choices = ", ".join(dict.fromkeys([*others, *shipped_names("cluster")]))
        raise ConfigError(f"cluster={source} is neither one of {choices}, nor a file of a cost profile")
    try:
        return ClusterProfile.load(source)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cluster={source}: {error}") from error


def load_model(source: str) -> ModelProfile:
    """The model profile of a shipped name or a JSON file."""
    if source in shipped_names("model"):
        return load_shipped_model(source)
    if not Path(source).is_file():
        shipped = f"of the shipped ones ({', '.join(shipped_names('model'))})"
        if source not in MODEL_NAMES:
            raise ConfigError(f"model_profile={source} is neither a file nor one {shipped}")
        data = " data=text" if source in TEXT_MODELS else ""
        raise ConfigError(
            f"model={source} has no profile: it is none {shipped}. Measure it with: python -m experiments.profile "
            f"model={source}{data} output=profiles; then simulate with model_profile=profiles/model_profile.json"
        )
    try:
        return ModelProfile.load(source)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model_profile={source}: {error}") from error


def _content(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, ScheduleSettings):
        return value.to_dict()
    if hasattr(value, "__dataclass_fields__"):
        return {key: _plain(getattr(value, key)) for key in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
