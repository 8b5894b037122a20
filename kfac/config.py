"""The hyper-parameters of K-FAC."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kfac.curvature.damping import DAMPING_METHODS
from kfac.curvature.scaling import SCALINGS

CHOICES: dict[str, tuple[str, ...]] = {
    "damping_method": DAMPING_METHODS,
    "average_from": ("zero", "identity"),
    "inverse_method": ("cholesky",),
    "fisher": ("empirical", "mc", "exact"),
    "scaling": SCALINGS,
    "nonfinite": ("raise", "skip"),
}
"""The values of every option that has a fixed set of them."""


VARYING = ("lr", "damping", "factor_decay", "kl_clip", "factor_interval", "inverse_interval")
"""The options that may be callables of the step."""

_NUMBERS: dict[str, tuple[float, bool, float]] = {
    "lr": (0.0, True, math.inf),
    "damping": (0.0, True, math.inf),
    "factor_decay": (0.0, False, 1.0),
    "kl_clip": (0.0, True, math.inf),
}
"""Lower bound, whether it is excluded, and excluded upper bound."""
_COUNTS = ("factor_interval", "inverse_interval", "accumulation_steps", "fisher_samples", "max_dim")


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


@dataclass(frozen=True, kw_only=True)
class KFACConfig:
    """What K-FAC computes. ``lr``, ``damping``, ``factor_decay``, ``kl_clip`` and the intervals may be callables.

    Args:
        lr: the optimizer's current learning rate; only the KL clip uses it.
        damping: the damping lambda.
        damping_method: ``pi`` (factored Tikhonov) or ``plain`` (lambda on each factor).
        factor_decay: rho of the running average ``M <- rho M + (1 - rho) S``.
        average_from: ``zero``: start at zero and use ``M / (1 - rho^t)``; ``identity``: start at I (the paper's code).
        kl_clip: kappa of the KL clip, or None for no clip.
        factor_interval, inverse_interval: steps between updates of the statistics and of the inverses.
        accumulation_steps: micro-batches per step; each loss is divided by it (by the caller).
        fisher: ``empirical``: from the gradients of the actual loss (the paper's, and free). ``mc``: from labels
            sampled from the model, ``exact``: the generalised Gauss-Newton; both need :meth:`kfac.KFAC.curvature`.
        fisher_samples: sampled labels per input of ``mc``; each costs a backward pass.
        inverse_method: ``cholesky``.
        scaling: how statistics become factors, see :mod:`kfac.curvature.scaling`.
        include, exclude: patterns (``fnmatch``) of module names to precondition, and not to.
        max_dim: layers with a wider factor keep their plain gradient.
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
    scaling: str = "standard"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    max_dim: int = 8192
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"kfac.{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}")
        for name in (*_NUMBERS, *_COUNTS):
            value = getattr(self, name)
            if not (callable(value) and name in VARYING) and not (value is None and name == "kl_clip"):
                _check(name, value)

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
        }
        return cls(**{**settings, **changes})

    def covers(self, name: str) -> bool:
        """Whether ``include`` and ``exclude`` let the module ``name`` be preconditioned."""
        included = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.include)
        return included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; a callable is written as the text ``<callable>``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: "<callable>" if callable(v) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KFACConfig:
        """The value of a JSON form.

        Raises:
            ValueError: for an unknown key, naming the keys there are.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ValueError(f"unknown kfac option(s) {', '.join(unknown)}; options: {', '.join(known)}")
        return cls(**data)
