"""What stands in a record's files, checked field by field: what is wrong with one is an error that names it."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from analysis.statistics import Spread

LARGEST_BYTES = 64_000_000
"""Of a record's own JSON files; real ones have some kilobytes."""


@contextmanager
def damage_in(name: str, *, known: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Whatever turns out to be wrong with the content of a file is an error that names it; a known one does already."""
    try:
        yield
    except known:
        raise
    except KeyError as error:
        raise ValueError(f"no {error} in {name}") from error
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is damaged: {error}") from error


def check_file(file: Path) -> None:
    """Raise ValueError for a file that would block the reader or fill its memory; one that is not there is none."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{file.name} is damaged: it is no file")
    if found.st_size > LARGEST_BYTES:
        raise ValueError(f"{file.name} is damaged: {found.st_size / 1e6:.0f} MB, no record's file is so large")


def positive(name: str, value: Any) -> int:
    """A whole number that counts something that is there."""
    if int(value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return int(value)


def duration_s(value: Any) -> float:
    """Seconds that something took."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"iteration_s must be positive and finite, got {value!r}")
    return float(value)


def spread_of(times: Mapping[str, Any]) -> Spread:
    """The median and quartiles of iterations' seconds."""
    middle, low, high = (duration_s(times[key]) for key in ("median", "q25", "q75"))
    found = Spread(middle, low, high, int(times["n"]))
    if not found.q25 <= found.median <= found.q75:
        raise ValueError(f"quartiles of iteration_s are out of order: {times}")
    return found


def seconds_by_kind(value: Mapping[str, Any] | None) -> dict[str, float]:
    """Exposed or hidden seconds; none where there is no value."""
    seconds = {str(kind): float(of_kind) for kind, of_kind in (value or {}).items()}
    if not all(0 <= of_kind < math.inf for of_kind in seconds.values()):
        raise ValueError(f"seconds must be finite and not negative, got {seconds}")
    return seconds


def number_or_none(value: Any) -> float | None:
    """A number, or what stands for none."""
    return None if value is None else float(value)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a record's file.

    Raises:
        ValueError: if it is not there or damaged, naming it.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"no {file.name} in it") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file.name} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file.name} is damaged: no JSON object")
    return data
