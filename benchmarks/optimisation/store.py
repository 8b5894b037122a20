"""Results of jobs as they come, kept in a file, so that an interrupted comparison goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Store:
    """A file of JSON lines ``{"job": ..., "result": ...}``; the last line of a job counts.

    Args:
        path: of the file; made when the first result comes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results: dict[str, Any] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                    self._results[_key(row["job"])] = row["result"]
                except (ValueError, KeyError, TypeError):  # half a line, where a process was killed while writing
                    continue

    def get(self, job: dict[str, Any]) -> Any:
        """The result of a job, or None."""
        return self._results.get(_key(job))

    def put(self, job: dict[str, Any], result: Any) -> None:
        """Keep a result (JSON)."""
        self._results[_key(job)] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(("" if whole else "\n") + json.dumps({"job": job, "result": result}) + "\n")


def _key(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)
