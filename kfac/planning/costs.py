"""Cost models: seconds of an operation as a function of its size.

A cost is any callable from a size (elements of a message, or the dimension of a matrix) to seconds. The classes here
are the ones that can be written to JSON; a :class:`~kfac.planning.profiles.ClusterProfile` accepts any callable.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cost = Callable[[float], float]
"""Seconds as a function of a size: elements for collectives, the dimension for inverses."""


def _require_finite_nonnegative(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{owner}.{name} must be finite and not negative, got {value!r}")


@dataclass(frozen=True)
class LinearCost:
    """``alpha_s + beta_s_per_element * elements``: the start-up/bandwidth model of a collective.

    Args:
        alpha_s: start-up time in seconds.
        beta_s_per_element: seconds per element.

    Raises:
        ValueError: if a coefficient is negative or not finite.
    """

    alpha_s: float
    beta_s_per_element: float

    def __post_init__(self) -> None:
        _require_finite_nonnegative("LinearCost", alpha_s=self.alpha_s, beta_s_per_element=self.beta_s_per_element)

    def __call__(self, elements: float) -> float:
        """Seconds of ``elements``."""
        return self.alpha_s + self.beta_s_per_element * elements


@dataclass(frozen=True)
class PolynomialCost:
    """``sum_k coefficients_s[k] * (dim / unit_dim) ** k``: the cost of a dense inverse of dimension ``dim``."""

    coefficients_s: tuple[float, ...]
    unit_dim: float = 1000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients_s", tuple(float(c) for c in self.coefficients_s))
        if not self.coefficients_s:
            raise ValueError("PolynomialCost.coefficients_s is empty")
        for k, c in enumerate(self.coefficients_s):
            _require_finite_nonnegative("PolynomialCost", **{f"coefficients_s[{k}]": c})
        if not self.unit_dim > 0:
            raise ValueError(f"PolynomialCost.unit_dim must be positive, got {self.unit_dim!r}")

    def __call__(self, dim: float) -> float:
        """Seconds at dimension ``dim``."""
        x = dim / self.unit_dim
        total = 0.0
        for c in reversed(self.coefficients_s):
            total = total * x + c
        return total


@dataclass(frozen=True)
class ExponentialCost:
    """``alpha_s * exp(beta_per_dim * dim)``: the form in which the paper's code states the inverse cost."""

    alpha_s: float
    beta_per_dim: float

    def __post_init__(self) -> None:
        _require_finite_nonnegative("ExponentialCost", alpha_s=self.alpha_s, beta_per_dim=self.beta_per_dim)

    def __call__(self, dim: float) -> float:
        """Seconds at dimension ``dim``."""
        return self.alpha_s * math.exp(self.beta_per_dim * dim)


@dataclass(frozen=True)
class TableCost:
    """Measured points, linear between them; beyond the last point the last slope goes on.

    Args:
        sizes: strictly increasing sizes, at least two.
        seconds: the seconds measured at each size.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(float(s) for s in self.sizes))
        object.__setattr__(self, "seconds", tuple(float(s) for s in self.seconds))
        if len(self.sizes) != len(self.seconds) or len(self.sizes) < 2:
            raise ValueError("TableCost needs at least two sizes and as many seconds")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("TableCost.sizes must be strictly increasing")
        for k, s in enumerate(self.seconds):
            _require_finite_nonnegative("TableCost", **{f"seconds[{k}]": s})

    def __call__(self, size: float) -> float:
        """Seconds at ``size``."""
        k = min(max(bisect.bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        x0, x1, y0, y1 = self.sizes[k - 1], self.sizes[k], self.seconds[k - 1], self.seconds[k]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


_TYPES: dict[str, Callable[..., Cost]] = {
    "linear": LinearCost,
    "polynomial": PolynomialCost,
    "exponential": ExponentialCost,
    "table": TableCost,
}


def cost_to_dict(cost: Cost) -> dict[str, Any]:
    """The JSON form of a cost model.

    Raises:
        TypeError: for a plain callable, which has no JSON form.
    """
    for name, cls in _TYPES.items():
        if type(cost) is cls:
            return {"type": name, **{k: _plain(v) for k, v in vars(cost).items()}}
    raise TypeError(f"{cost!r} has no JSON form; use one of {', '.join(c.__name__ for c in _classes())}")


def cost_from_dict(data: Mapping[str, Any]) -> Cost:
    """The cost model of a JSON form written by :func:`cost_to_dict`.

    Raises:
        ValueError: for an unknown type or wrong fields, naming the choices.
    """
    fields = dict(data)
    kind = fields.pop("type", None)
    if kind not in _TYPES:
        raise ValueError(f"unknown cost type {kind!r}; choices: {', '.join(_TYPES)}")
    try:
        return _TYPES[kind](**{k: tuple(v) if isinstance(v, Sequence) else v for k, v in fields.items()})
    except TypeError as error:
        raise ValueError(f"cost of type {kind!r}: {error}") from error


def _classes() -> tuple[type, ...]:
    return (LinearCost, PolynomialCost, ExponentialCost, TableCost)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
