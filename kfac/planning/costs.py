"""Cost models: seconds of an operation as a function of its size.

A cost is any callable from a size (elements of a message, or the dimension of a matrix) to seconds. The classes here
are the ones that can be written to JSON; a :class:`~kfac.planning.profiles.ClusterProfile` accepts any callable.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kfac.planning.checks import keys_of, number, numbers

Cost = Callable[[float], float]
"""Seconds as a function of a size: elements for collectives, the dimension for inverses."""


Size = int | tuple[int, int]
"""A factor's dimension, or (blocks, dimension) of a block-diagonal one."""


def packed_elements(size: Size) -> int:
    """Elements of a factor's packed triangles: ``d (d + 1) / 2`` per block."""
    blocks, dim = size if isinstance(size, tuple) else (1, size)
    return blocks * (dim * (dim + 1) // 2)


def inverse_dim(size: Size) -> int:
    """The dimension of the one matrix whose inverse takes as many multiplications as all blocks of a factor.

    Blocks are inverted in one batched call, so that a start-up cost counts once for all of them.
    """
    if isinstance(size, int):
        return size
    blocks, dim = size
    return max(dim, round(dim * math.cbrt(blocks)))


def checked_cost(name: str, cost: Cost) -> Cost:
    """``cost`` whose every answer is a number of seconds.

    Returns:
        A callable that raises ValueError, naming the cost and the size, where ``cost`` returns anything that is not
        finite and not negative.
    """

    def checked(size: float) -> float:
        seconds = cost(size)
        if type(seconds) is float and 0.0 <= seconds < math.inf:  # planners ask very often: the quick way first
            return seconds
        return number(f"cost {name}({size})", seconds)

    return checked


@dataclass(frozen=True)
class LinearCost:
    """``alpha_s + beta_s_per_element * elements``: the start-up/bandwidth model of a collective.

    Args:
        alpha_s: start-up time in seconds.
        beta_s_per_element: seconds per element.

    Raises:
        ValueError: if a coefficient is no number, negative or not finite.
    """

    alpha_s: float
    beta_s_per_element: float

    def __post_init__(self) -> None:
        number("LinearCost.alpha_s", self.alpha_s)
        number("LinearCost.beta_s_per_element", self.beta_s_per_element)

    def __call__(self, elements: float) -> float:
        """Seconds of ``elements``."""
        return self.alpha_s + self.beta_s_per_element * elements


@dataclass(frozen=True)
class PolynomialCost:
    """``sum_k coefficients_s[k] * (dim / unit_dim) ** k``: the cost of a dense inverse of dimension ``dim``."""

    coefficients_s: tuple[float, ...]
    unit_dim: float = 1000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients_s", numbers("PolynomialCost.coefficients_s", self.coefficients_s))
        if not self.coefficients_s:
            raise ValueError("PolynomialCost.coefficients_s is empty")
        if not number("PolynomialCost.unit_dim", self.unit_dim) > 0:
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
        number("ExponentialCost.alpha_s", self.alpha_s)
        number("ExponentialCost.beta_per_dim", self.beta_per_dim)

    def __call__(self, dim: float) -> float:
        """Seconds at dimension ``dim``; infinite where floats end."""
        try:
            return self.alpha_s * math.exp(self.beta_per_dim * dim)
        except OverflowError:
            return math.inf if self.alpha_s else 0.0


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
        object.__setattr__(self, "sizes", numbers("TableCost.sizes", self.sizes))
        object.__setattr__(self, "seconds", numbers("TableCost.seconds", self.seconds))
        if len(self.sizes) != len(self.seconds) or len(self.sizes) < 2:
            raise ValueError("TableCost needs at least two sizes and as many seconds")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("TableCost.sizes must be strictly increasing")

    def __call__(self, size: float) -> float:
        """Seconds at ``size``."""
        k = min(max(bisect.bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        x0, x1, y0, y1 = self.sizes[k - 1], self.sizes[k], self.seconds[k - 1], self.seconds[k]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


_TYPES: dict[str, type[LinearCost | PolynomialCost | ExponentialCost | TableCost]] = {
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
    if not isinstance(data, Mapping):
        raise ValueError(f"a cost must be an object with a type ({', '.join(_TYPES)}), got {data!r}")
    fields = dict(data)
    kind = fields.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ValueError(f"unknown cost type {kind!r}; choices: {', '.join(_TYPES)}")
    return _TYPES[kind](**keys_of(_TYPES[kind], f"cost of type {kind!r}", fields))


def _classes() -> tuple[type, ...]:
    return (LinearCost, PolynomialCost, ExponentialCost, TableCost)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
