"""What ``python -m benchmarks.planning`` computed: distances of plans to bounds, and iteration times over sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("scheduling.json")
COMMAND = "python -m benchmarks.planning"


@cache
def load() -> Mapping[str, Any]:
    """The data: ``fusion``, ``placement`` and ``scaling``."""
    data: Mapping[str, Any] = json.loads(PATH.read_text())
    return data


def origin(part: str) -> dict[str, str]:
    """What leads from numbers to their source."""
    return {"file": f"paper_figures/{PATH.name}", "part": part, "made_by": COMMAND}
