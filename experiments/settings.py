"""Reading plain nested data into frozen dataclasses: unknown keys and wrong types are errors that name the key."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
LARGEST_INT = 2**63 - 1
"""What fits into 64 bits."""


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
    missing = [f.name for f in fields(cls) if f.name not in data and f.default is f.default_factory is MISSING]
    if missing:
        raise ConfigError(f"{_join(path, missing[0])} is missing: it has no default here, so it cannot be deleted")
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


def at_least(path: str, value: float | None, low: float, *, open_: bool = False, high: float | None = None) -> None:
    """Raise a :class:`ConfigError` unless ``value`` is None or at least ``low`` (above it, if ``open_``).

    Args:
        path, value: the dotted key and what it was given.
        low: the bound.
        open_: whether the bound itself is excluded.
        high: an upper bound, included.
    """
    if value is None:
        return
    if value <= low if open_ else value < low:
        raise ConfigError(f"{path}={value:g} must be {'above' if open_ else 'at least'} {low:g}")
    if high is not None and value > high:
        raise ConfigError(f"{path}={value} must be at most {high}")


def fits(path: str, value: Any) -> None:
    """Raise a :class:`ConfigError` for a whole number that 64 bits do not hold, also one inside ``value``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            fits(_join(path, str(key)), item)
    elif isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ConfigError(f"{path}={_short(value)} must be at most {LARGEST_INT}")


def file_name(path: str, value: str | None) -> None:
    """Raise a :class:`ConfigError` unless ``value`` is None or can name a file or folder inside another folder."""
    if value is not None and (not value.strip() or value in (".", "..") or "/" in value or not value.isprintable()):
        raise ConfigError(f"{path}={value!r} is not the name of a folder: no '/', not blank, not '..'")


def folder(path: str, value: str) -> None:
    """Raise a :class:`ConfigError` for a blank path of a folder."""
    if not value.strip():
        raise ConfigError(f"{path}={value!r} is not a folder ({path}=. is the current one)")


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
    if kind is int and number and abs(value) <= LARGEST_INT and value == int(value):
        return int(value)
    if kind is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is str and (isinstance(value, str) or number):
        return str(value)
    names = {bool: "true or false", int: "a whole number of at most 64 bits", float: "a number", str: "a text"}
    return _refuse(path, value, names[kind])


def _refuse(path: str, value: Any, what: str) -> NoReturn:
    raise ConfigError(f"{path}={_short(value)} is not {what}")


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_INT:
        return f"(a number of {value.bit_length()} bits)"  # Python may refuse to write it out
    return "null" if value is None else repr(value)
