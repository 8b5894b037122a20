"""Checks of numbers and JSON objects: whatever is wrong becomes a ValueError that names the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any


def whole(what: str, value: Any, at_least: int = 0) -> int:
    """``value`` as an int.

    Raises:
        ValueError: if it is no whole number (true and false are none) or less than ``at_least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise ValueError(f"{what} must be a whole number and at least {at_least}, got {value!r}")
    return int(value)


def number(what: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        ValueError: if it is no number (true and false are none), not finite, or negative.
    """
    try:
        result = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or result < 0:
        raise ValueError(f"{what} must be finite and not negative, got {value!r}")
    return result


def numbers(what: str, values: Any) -> tuple[float, ...]:
    """``values`` as floats.

    Raises:
        ValueError: if it is no list of numbers, or as :func:`number`, naming the index.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{what} must be a list of numbers, got {values!r}")
    return tuple(number(f"{what}[{k}]", value) for k, value in enumerate(values))


def text(what: str, value: Any) -> str:
    """``value``, which must be a string.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {value!r}")
    return value


def mapping(what: str, value: Any) -> Mapping[str, Any]:
    """``value``, which must be a mapping (a JSON object).

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object with keys, got {value!r}")
    return value


def sequence(what: str, value: Any) -> tuple[Any, ...]:
    """``value``, which must be a list, as a tuple.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} must be a list, got {value!r}")
    return tuple(value)


def keys_of(cls: type, what: str, data: Any) -> dict[str, Any]:
    """The keyword arguments for the dataclass ``cls`` in a JSON object.

    Raises:
        ValueError: if a field without a default is missing or there is a key that is no field, naming them.
    """
    found = dict(mapping(what, data))
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    missing = [key for key, required in known.items() if required and key not in found]
    if missing:
        raise ValueError(f"{what}: missing key(s) {', '.join(missing)}")
    extra = [str(key) for key in found if key not in known]
    if extra:
        raise ValueError(f"{what}: unknown key(s) {', '.join(extra)}; keys: {', '.join(known)}")
    return found
