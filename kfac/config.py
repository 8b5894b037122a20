"""The hyper-parameters of K-FAC."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kfac.curvature.damping import DAMPING_METHODS
from kfac.curvature.scaling import SCALINGS
from kfac.planning.intervals import Intervals

CHOICES: dict[str, tuple[str, ...]] = {
    "damping_method": DAMPING_METHODS,
    "average_from": ("zero", "identity"),
    "inverse_method": ("cholesky", "eigh", "ekfac"),
    "fisher": ("empirical", "mc", "exact"),
    "scaling": SCALINGS,
    "weight_sharing": ("expand", "reduce"),
    "loss_reduction": ("mean", "sum"),
    "nonfinite": ("raise", "skip"),
    "damping_adaptation": ("none", "levenberg_marquardt"),
}
"""The values of every option that has a fixed set of them."""


LAYER_KINDS = ("linear", "convolution", "embedding", "norm", "bias")
"""The kinds of layers that have factors."""

PER_LAYER = ("damping", "damping_method", "factor_decay", "lr", "max_dim", "weight_sharing")
"""The options that ``overrides`` may set for some layers."""

VARYING = ("lr", "damping", "factor_decay", "kl_clip", "factor_interval", "inverse_interval")
"""The options that may be callables of the step."""

_NUMBERS: dict[str, tuple[float, bool, float]] = {
    "lr": (0.0, True, math.inf),
    "damping": (0.0, True, math.inf),
    "factor_decay": (0.0, False, 1.0),
    "kl_clip": (0.0, True, math.inf),
}
"""Lower bound, whether it is excluded, and excluded upper bound."""
_COUNTS = ("factor_interval", "inverse_interval", "accumulation_steps", "fisher_samples", "max_dim", "damping_interval")


def _check(name: str, value: Any, where: str = "") -> None:
    """Raise ValueError if ``value`` is impossible for the option ``name``."""
    if name in _NUMBERS:
        low, open_below, high = _NUMBERS[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (low < value if open_below else low <= value) or not value < high:
            bounds = f"{'above' if open_below else 'at least'} {low:g} and below {high:g}"
            raise ValueError(f"kfac.{name}={value!r}{where} must be a number {bounds}")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"kfac.{name}={value!r}{where} must be a whole number of at least 1")


def _require_known(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError for names that are no options, with the nearest that is."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f": did you mean {near[0]}?" if near else ";"
        raise ValueError(f"unknown kfac option(s) {', '.join(unknown)}{hint} options: {', '.join(known)}")


def options_at(configs: Sequence[KFACConfig], name: str, step: int) -> list[Any]:
    """The value of an option in each of several configurations; a callable is asked once per configuration."""
    values = {key: config.at(name, step) for key, config in {id(config): config for config in configs}.items()}
    return [values[id(config)] for config in configs]


def _plain(value: Any) -> Any:
    """The JSON form of an option."""
    if callable(value):
        return "<callable>"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class KFACConfig:
    """What K-FAC computes. ``lr``, ``damping``, ``factor_decay``, ``kl_clip`` and the intervals may be callables.

    Args:
        lr: the optimizer's current learning rate; only the KL clip uses it.
        damping: the damping lambda.
        damping_method: ``pi`` (factored Tikhonov), ``plain`` (lambda on each factor) or ``exact`` (lambda on the
            eigenvalues of ``A x G``; needs eigenvectors).
        factor_decay: rho of the running average ``M <- rho M + (1 - rho) S``.
        average_from: ``zero``: start at zero and use ``M / (1 - rho^t)``; ``identity``: start at I (the paper's code).
        kl_clip: kappa of the KL clip, or None for no clip.
        factor_interval, inverse_interval: steps between updates of the statistics and of the inverses.
        accumulation_steps: micro-batches per step; each loss is divided by it (by the caller).
        fisher: ``empirical``: from the gradients of the actual loss (the paper's, and free). ``mc``: from labels
            sampled from the model, ``exact``: the generalised Gauss-Newton; both need :meth:`kfac.KFAC.curvature`.
        fisher_samples: sampled labels per input of ``mc``; each costs a backward pass.
        inverse_method: ``cholesky``; ``eigh``: eigendecompositions; ``ekfac``: these, with eigenvalues corrected by the
            per-sample gradients of the steps between two inversions (George et al. 2018).
        damping_adaptation: ``none``, or ``levenberg_marquardt``: every ``damping_interval`` steps the damping is scaled
            by how well the quadratic model predicted the loss, see :meth:`kfac.KFAC.adapt_damping`.
        scaling: how statistics become factors, see :mod:`kfac.curvature.scaling`.
        loss_reduction: whether the loss is the ``mean`` or the ``sum`` over its terms.
        weight_sharing: for weights that are applied at several positions of a sample (pixels, tokens): ``expand``:
            positions count as samples; ``reduce``: they are summed first (Eschenhagen et al. 2023).
        layers: the kinds of layers to precondition, of :data:`LAYER_KINDS`; other scalings than ``standard`` are
            defined for linear layers and convolutions only.
        include, exclude: patterns (``fnmatch``) of module names to precondition, and not to.
        max_dim: wider factors become the fewest equal diagonal blocks within it.
        overrides: per pattern of module names options that differ there, of :data:`PER_LAYER`; later patterns win.
        nonfinite: a NaN or infinite statistic raises :class:`~kfac.preconditioner.NonFiniteError` on every rank, or
            skips the step's preconditioning and statistics (``skip``), on every rank together.

    Raises:
        ValueError: for an impossible value, naming the option.
    """

    lr: float | Callable[[int], float] = 0.1
    damping: float | Callable[[int], float] = 1e-3
    damping_method: str = "pi"
    factor_decay: float | Callable[[int], float] = 0.95
    average_from: str = "zero"
    kl_clip: float | Callable[[int], float] | None = 1e-3
    factor_interval: int | Callable[[int], int] = 1
    inverse_interval: int | Callable[[int], int] = 1
    accumulation_steps: int = 1
    fisher: str = "empirical"
    fisher_samples: int = 1
    inverse_method: str = "cholesky"
    damping_adaptation: str = "none"
    damping_interval: int = 5
    scaling: str = "standard"
    loss_reduction: str = "mean"
    weight_sharing: str = "expand"
    layers: tuple[str, ...] = LAYER_KINDS
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    max_dim: int = 8192
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    nonfinite: str = "raise"

    def __new__(cls, *_: Any, **options: Any) -> KFACConfig:
        """Refuses misspelt options before ``__init__`` would, with a remedy."""
        _require_known(options, [f.name for f in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("include", "exclude", "layers"):
            value = (getattr(self, name),) if isinstance(getattr(self, name), str) else getattr(self, name) or ()
            if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
                raise ValueError(f"kfac.{name}={value!r} must be a text or a list of texts")
            object.__setattr__(self, name, tuple(value))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"kfac.{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}")
        for name in (*_NUMBERS, *_COUNTS):
            value = getattr(self, name)
            if not (callable(value) and name in VARYING) and not (value is None and name == "kl_clip"):
                _check(name, value)
        self._check_layers()
        self._check_methods()

    def _check_methods(self) -> None:
        """Refuse combinations that contradict each other."""
        if self.damping_method == "exact" and self.inverse_method == "cholesky":
            raise ValueError("kfac.damping_method='exact' works on eigenvalues: set inverse_method to eigh or ekfac")
        if self.inverse_method == "ekfac":
            if self.damping_method != "exact":
                raise ValueError("kfac.inverse_method='ekfac' needs damping_method='exact'")
            if self.inverse_interval == 1:
                raise ValueError(
                    "kfac.inverse_method='ekfac' corrects eigenvalues between two inversions: set inverse_interval > 1"
                )
            if self.scaling != "standard":
                raise ValueError(f"kfac.inverse_method='ekfac' is not defined for scaling={self.scaling!r}")

    def _check_layers(self) -> None:
        unknown = [kind for kind in self.layers if kind not in LAYER_KINDS]
        if unknown:
            raise ValueError(f"kfac.layers: {unknown[0]!r} is not one of: {', '.join(LAYER_KINDS)}")
        if self.scaling != "standard":
            object.__setattr__(self, "layers", tuple(k for k in self.layers if k in ("linear", "convolution")))
            for name, value in (("weight_sharing", "expand"), ("loss_reduction", "mean")):
                if getattr(self, name) != value:
                    raise ValueError(f"kfac.scaling={self.scaling!r} is defined for {name}={value!r} only")
        overrides: object = self.overrides if self.overrides is not None else {}
        if not isinstance(overrides, Mapping) or not all(
            isinstance(key, str) and isinstance(value, Mapping) for key, value in overrides.items()
        ):
            raise ValueError(
                f"kfac.overrides={overrides!r} must give options per pattern, as {{'head*': {{'lr': 0.1}}}}"
            )
        object.__setattr__(self, "overrides", {key: dict(value) for key, value in overrides.items()})
        for pattern, changes in self.overrides.items():
            wrong = sorted(set(changes) - set(PER_LAYER))
            if wrong:
                raise ValueError(
                    f"kfac.overrides[{pattern!r}]: {wrong[0]} cannot differ between layers; what can: "
                    f"{', '.join(PER_LAYER)}"
                )
            try:
                replace(self, overrides={}, **changes)
            except ValueError as error:
                raise ValueError(f"kfac.overrides[{pattern!r}]: {error}") from error

    def for_layer(self, *names: str) -> KFACConfig:
        """The options that hold for a layer that goes by these names."""
        changes: dict[str, Any] = {}
        for pattern, values in self.overrides.items():
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                changes.update(values)
        return replace(self, overrides={}, **changes) if changes else self

    def intervals(self, step: int) -> Intervals:
        """The steps between updates, as they are at a step."""
        return Intervals(self.at("factor_interval", step), self.at("inverse_interval", step))

    def at(self, name: str, step: int) -> Any:
        """The value of an option that may be a callable, at a step.

        Raises:
            ValueError: if the callable gives an impossible value, naming the option and the step.
        """
        value = getattr(self, name)
        if callable(value):
            value = value(step)
            if not (value is None and name == "kl_clip"):
                _check(name, value, f" at step {step}")
        return value

    @classmethod
    def paper(cls, **changes: Any) -> KFACConfig:
        """The settings of the paper's runs (their code at the time of submission), changed by keyword."""
        settings: dict[str, Any] = {
            "damping": 0.002,
            "damping_method": "plain",
            "scaling": "spdkfac",
            "average_from": "identity",
            "layers": ("linear", "convolution"),
        }
        return cls(**{**settings, **changes})

    def covers(self, *names: str) -> bool:
        """Whether ``include`` and ``exclude`` let a module that goes by these names be preconditioned."""

        def match(patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)

        return match(self.include) and not match(self.exclude)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; a callable is written as the text ``<callable>``."""
        values: dict[str, Any] = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KFACConfig:
        """The value of a JSON form.

        Raises:
            ValueError: for an unknown key, naming the keys there are.
        """
        _require_known(data, [f.name for f in fields(cls)])
        return cls(**data)
