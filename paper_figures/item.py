"""What a table or figure script gets and gives, and how it is written down with where each number came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.tables import Table, for_screen

TABLE_FORMATS = {"markdown": ".md", "latex": ".tex", "csv": ".csv"}


@dataclass(frozen=True)
class Context:
    """Where a script reads and writes.

    Args:
        out: folder of the outputs.
        runs: folder of the run records, which need not exist.
    """

    out: Path
    runs: Path


@dataclass(frozen=True)
class Made:
    """What a script made.

    Args:
        paths: the files, the provenance file last.
        text: what to print in a terminal, if anything.
        warnings: what the user should know, one line each.
    """

    paths: tuple[Path, ...]
    text: str = ""
    warnings: tuple[str, ...] = ()


@dataclass
class Provenance:
    """Where each number of a table or figure came from.

    Args:
        item: the script's name.
        numbers: by a path such as ``resnet50/simulated/D-KFAC``: the value, its tag (published, simulated, measured or
            traced) and what leads to its source.
        inputs: what many numbers share, by a name that they refer to.
    """

    item: str
    numbers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)

    def add(self, path: str, value: float | None, tag: str, **origin: Any) -> None:
        """Record one number.

        Raises:
            ValueError: if the path already has one.
        """
        if path in self.numbers:
            raise ValueError(f"{self.item}: two numbers called {path}")
        self.numbers[path] = {"value": value, "tag": tag, **origin}

    def write(self, out: Path) -> Path:
        """Write ``<item>.provenance.json``."""
        command = f"python -m paper_figures {self.item}"
        data = {"item": self.item, "command": command, "numbers": self.numbers, "inputs": self.inputs}
        path = out / f"{self.item}.provenance.json"
        path.write_text(json.dumps(data, indent=1) + "\n")
        return path


def write_table(context: Context, table: Table, provenance: Provenance) -> Made:
    """Write a table as Markdown, LaTeX and CSV with its provenance beside it; its text is for the terminal."""
    paths = []
    for style, suffix in TABLE_FORMATS.items():
        path = context.out / f"{provenance.item}{suffix}"
        path.write_text(table.render(style))
        paths.append(path)
    return Made((*paths, provenance.write(context.out)), for_screen(table))
