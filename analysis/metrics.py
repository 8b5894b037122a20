"""The metrics rows of a record, as tables need them."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

from experiments.records import RunRecord


def rows_by_kind(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each kind by iteration, repeated iterations once; ``train`` and ``eval`` are always there.

    Raises:
        ValueError: if the file is damaged or cannot be read.
    """
    by_kind: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    try:
        for row in RunRecord.load(path).rows():
            by_kind.setdefault(row["kind"], []).append(row)
    except OSError as error:
        raise ValueError(f"metrics.jsonl cannot be read: {error}") from error
    return by_kind


def plain_training_rows(file: Path) -> list[dict[str, Any]] | None:
    """The training rows of a file in which nothing is damaged or repeated, in half the time; else None.

    The lines are read as one JSON list. Lines that are damaged in such a way that only their whole is valid are fewer
    or more than its items.
    """
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
        rows = json.loads(b"[%s]" % b",".join(lines))
        train = [row for row in rows if row["kind"] == "train"]
        numbers = [row["iter"] for row in train]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = len(rows) == len(lines) and all(type(number) is int for number in numbers)
    return train if whole and all(map(operator.lt, numbers, numbers[1:])) else None
