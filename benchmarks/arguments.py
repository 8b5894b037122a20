"""Options of the benchmarks' commands that are wrong end them before anything is measured."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Several of them, as in ``2,4``."""
    return tuple(count(part) for part in text.split(","))


def seconds(text: str) -> float:
    """A time that is longer than nothing."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def check_folder(folder: Path) -> None:
    """Make a folder for results.

    Raises:
        ValueError: if it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--output: {folder} cannot be written to: {error.strerror}") from error
