"""Reading plain nested data into frozen dataclasses: unknown keys and wrong types are errors that name the key."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A mistake in what the user asked for; its text is one line that names the key and the choices."""


def read(cls: type[T], data: Any, path: str = "") -> T:
    """The dataclass ``cls`` of plain data.

    Args:
        cls: a dataclass whose fields are numbers, strings, tuples, optional values, dictionaries, or dataclasses of
            such. A class with a ``from_dict`` of its own is left to that.
        data: a mapping of its fields.
        path: the dotted key of ``data``, for messages.

    Raises:
        ConfigError: for an unknown key, a missing one or a value of the wrong type, or if the class refuses the values.
    """
    if not isinstance(data, Mapping):
        _refuse(path, data, "a group of keys")
    assert is_dataclass(cls)
    kinds = _kinds(cls)
    unknown = [str(key) for key in data if key not in kinds]
    if unknown:
        raise ConfigError(f"unknown key {_join(path, unknown[0])}; keys: {', '.join(kinds)}")
    values = {key: _value(kinds[key], value, _join(path, key)) for key, value in data.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{path or 'the configuration'}: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def one_of(path: str, value: Any, choices: Iterable[str]) -> None:
    """Raise a :class:`ConfigError` unless ``value`` is one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        raise ConfigError(f"{path}={value} is not one of: {', '.join(choices)}")


def at_least(path: str, value: float | None, low: float, *, open_: bool = False) -> None:
    """Raise a :class:`ConfigError` unless ``value`` is None or at least ``low`` (above it, if ``open_``)."""
    if value is not None and (value <= low if open_ else value < low):
        raise ConfigError(f"{path}={value:g} must be {'above' if open_ else 'at least'} {low:g}")


@cache
def _kinds(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _value(kind: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(k for k in typing.get_args(kind) if k is not type(None))
        return None if value is None else _value(inner, value, path)
    if origin is tuple:
        return _list(typing.get_args(kind)[0], value, path)
    if origin is dict:
        return dict(value) if isinstance(value, Mapping) else _refuse(path, value, "a group of keys")
    if hasattr(kind, "from_dict"):
        return _parse(kind.from_dict, value, path)
    return read(typing.cast("type[Any]", kind), value, path) if is_dataclass(kind) else _scalar(kind, value, path)


def _list(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        _refuse(path, value, f"a list, as in {path}=[1,2]")
    return tuple(_value(kind, item, f"{path}[{k}]") for k, item in enumerate(value))


def _parse(from_dict: Callable[[Any], Any], value: Any, path: str) -> Any:
    try:
        return from_dict(value)
    except (ValueError, TypeError) as error:
        text = str(error)
        raise ConfigError(text if path in text else f"{path}: {text}") from error


def _scalar(kind: Any, value: Any, path: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and number and value == int(value):
        return int(value)
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind is str and (isinstance(value, str) or number):
        return str(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return _refuse(path, value, names[kind])


def _refuse(path: str, value: Any, what: str) -> NoReturn:
    raise ConfigError(f"{path}={value!r} is not {what}")
