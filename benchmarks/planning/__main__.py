"""``python -m benchmarks.planning``: plans against proven bounds and over world sizes, into data, page and figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.planning import fusions, placements, scale
from benchmarks.planning.page import with_tables
from paper_figures import placement_bounds, scaling
from paper_figures.item import Context
from paper_figures.scheduling import PATH

PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"
PARTS = {"fusion": fusions.rows, "placement": placements.rows, "scaling": scale.curves}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the parts (all: some minutes), write the data, then the page's tables and figures from it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=main.__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which to compute anew: {', '.join(PARTS)} (all)")
    parser.add_argument("--page", action="store_true", help="compute nothing, write page and figures from the data")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    data = json.loads(PATH.read_text()) if PATH.exists() else {}
    for name, rows in PARTS.items():
        if options.page or (options.parts and name not in options.parts):
            continue
        data[name] = []
        for row in rows():
            data[name].append(row)
            print(f"{name}: {', '.join(str(v) for v in row.values() if isinstance(v, (str, int)))}", flush=True)
        if name == "fusion":
            data["greedy_on_random_instances"] = fusions.greedy_on_random_instances()
    PATH.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), data))
    images = PAGE.parent / "images"
    for item in (placement_bounds, scaling):
        picture = next(path for path in item.make(Context(_scratch(), Path())).paths if path.suffix == ".png")
        (images / picture.name).write_bytes(picture.read_bytes())
    print(f"wrote {PATH}, {PAGE} and its figures")


def _scratch() -> Path:
    folder = Path(__file__).parents[1] / "out" / "planning"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
