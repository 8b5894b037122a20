"""The rows of a metrics file, as a crash or a full disk may have left it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file; a last row that was cut off by a crash is left out.

    Raises:
        ValueError: for a damaged row in the middle, naming file and line.
    """
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            yield _row(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is damaged: {error}") from error


def read_whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file without the damaged ones, which one warning names."""
    rows, damaged = [], []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            rows.append(_row(line))
        except ValueError:
            damaged.append(number)
    if damaged:
        logger.warning("%s: damaged rows are left out, line %s", path, ", ".join(map(str, damaged)))
    return rows


def _whole_lines(path: Path) -> list[bytes]:
    """A complete row ends with a newline."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line.decode())
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or type(row.get("iter")) is not int:
        raise ValueError("a row without kind or iter")
    return row


def last_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kind and iteration, the last one written (a resumed run repeats some), in order of iteration."""
    last = {(row["kind"], row["iter"]): row for row in rows}
    return [last[key] for key in sorted(last, key=lambda key: (key[1], key[0] == "eval"))]
