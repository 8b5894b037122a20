"""``python -m benchmarks gpu``: all parts within a limit of time, their report, and the profile for the planner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import parts, step
from benchmarks.gpu.packings import packing
from benchmarks.gpu.parts import QUICK, Row, Sizes
from benchmarks.gpu.timing import Timer, timer_for
from benchmarks.pages import into_page, table
from kfac.communication import LocalCommunicator
from kfac.planning import ClusterProfile
from kfac.planning.costs import cost_to_dict
from kfac.planning.shipped_profiles import load_shipped_cluster
from kfac.profiling import fit_inverse, profile_cluster

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHIPPED = ROOT / "kfac" / "planning" / "shipped"
SHARES = {
    "tests": 0.2,
    "products": 0.04,
    "copies": 0.04,
    "statistics": 0.14,
    "inverses": 0.28,
    "packing": 0.1,
    "beside_copies": 0.06,
    "step": 0.1,
}
"""Of the limit of time. What a part leaves over is the next ones'; what does not fit is left out, the largest first."""


@dataclass(frozen=True)
class Setting:
    """What is asked for.

    Args:
        device: ``cuda`` or ``cpu``.
        quick: seconds instead of minutes, on small sizes; no measurement.
        limit_s: of everything.
        repeats: of each measurement.
        collectives: the shipped cluster profile whose collectives the new profile takes.
    """

    device: str = "cuda"
    quick: bool = False
    limit_s: float = 480.0
    repeats: int = 10
    collectives: str = "default"


@dataclass
class Budget:
    """Seconds of the parts."""

    limit_s: float
    begun_s: float = field(default_factory=time.monotonic)
    due: float = 0.0
    stopped: list[str] = field(default_factory=list)

    def left_s(self, part: str) -> float:
        """Seconds until the part must end; asked once for each, in their order."""
        self.due += SHARES[part]
        return self.begun_s + self.due * self.limit_s - time.monotonic()

    def rows(self, part: str, rows: Iterator[Row]) -> list[Row]:
        """As many of a part's rows as there is time for; at least one."""
        end_s = time.monotonic() + self.left_s(part)
        found = list(islice(rows, 1))
        for row in rows:
            found.append(row)
            if time.monotonic() > end_s:
                self.stopped.append(f"{part} after {_last(row)}")
                break
        return found


def _last(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, float))


def marked_tests(folder: Path) -> list[str]:
    """The test files that hold tests marked gpu."""
    return [str(p) for p in sorted(folder.rglob("test_*.py")) if re.search(r"pytest\.mark\.gpu\b", p.read_text())]


def run_tests(files: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run the tests marked gpu; how many passed, failed and were skipped, and what was said if not all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"ended": False, "limit_s": timeout_s}
    counts = {kind: _count(kind, done.stdout) for kind in ("passed", "failed", "error", "skipped")}
    said = {} if done.returncode == 0 else {"output": done.stdout[-4000:] + done.stderr[-1000:]}
    return {"ended": True, **counts, **said}


def _count(kind: str, output: str) -> int:
    found = re.search(rf"(\d+) {kind}", output.strip().splitlines()[-1] if output.strip() else "")
    return int(found[1]) if found else 0


def measure(setting: Setting, output: Path, *, tests: bool = True) -> dict[str, Any]:
    """Measure every part and write what there is after each of them, so that an early end loses nothing.

    Args:
        setting: what is asked for.
        output: a folder: ``results.json``, ``timeline.json`` (for Perfetto), ``cluster.json`` (for the planner).
        tests: whether the tests marked gpu are run, first.

    Raises:
        ValueError: if the device is not there.
    """
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no GPU here: --device cpu --quick tries the code without one")
    output.mkdir(parents=True, exist_ok=True)
    sizes, budget = QUICK if setting.quick else Sizes(), Budget(setting.limit_s)
    timer = timer_for(setting.device, 3 if setting.quick else setting.repeats)
    found: dict[str, Any] = {"setting": asdict(setting), "provenance": {**timer.hardware, "torch": torch.__version__}}

    def add(**more: Any) -> None:
        found.update(more, stopped=budget.stopped)
        (output / "results.json").write_text(json.dumps(found, indent=1) + "\n")

    left_s = budget.left_s("tests")
    if tests:
        add(tests=run_tests(marked_tests(ROOT / "tests"), left_s))
    for name, part in (("products", parts.products), ("copies", parts.copies)):
        add(**{name: budget.rows(name, part(timer, sizes))})
    roofline = parts.peaks(found["products"], found["copies"])
    add(peaks=asdict(roofline))
    for name, against in (("statistics", parts.statistics), ("inverses", parts.inverses), ("packing", packing)):
        add(**{name: budget.rows(name, against(timer, sizes, roofline))})
    add(beside_copies=budget.rows("beside_copies", parts.beside_copies(timer, sizes)))
    cluster(setting, timer, found["inverses"]).save(output / "cluster.json")
    row, timeline = step.recorded_steps(timer, quick=setting.quick)
    timeline.to_chrome_trace(output / "timeline.json")
    add(step=row, seconds=time.monotonic() - budget.begun_s)
    return found


def cluster(setting: Setting, timer: Timer, inverses: Sequence[Row]) -> ClusterProfile:
    """What the planner needs of this device: seconds of inverses, with the collectives of a cluster that is shipped.

    A profile has one cost of inverses, here that of the default options (Cholesky). That of eigendecompositions is in
    the provenance.
    """
    dims = sorted({row["dim"] for row in inverses})
    own = profile_cluster(LocalCommunicator(), timer.device, dims, repeats=3 if setting.quick else setting.repeats)
    network = load_shipped_cluster(setting.collectives)
    eigh = [row for row in inverses if (row["method"], row["way"], row["precision"]) == ("eigh", "single", "float32")]
    cost, points = fit_inverse([row["dim"] for row in eigh], [row["seconds"] for row in eigh])
    what = f"inverses measured on one {timer.hardware['hardware']}; collectives of the shipped profile, not measured"
    provenance = {
        **own.provenance,
        **timer.hardware,
        "what": what,
        "collectives": {"profile": setting.collectives, **network.provenance},
        "eigh": {**points, "cost": cost_to_dict(cost)},
    }
    return replace(network, inverse=own.inverse, provenance=provenance)


def report(found: dict[str, Any]) -> str:
    """Tables of what was measured."""
    peaks, said = found["peaks"], found["provenance"]
    rates = ", ".join(f"{rate / 1e12:.3g} Tflop/s in {name}" for name, rate in peaks["flop_per_s"].items())
    copied = f"copies read and write {peaks['bytes_per_s'] / 1e9:.4g} GB/s"
    lines = [f"{said['hardware']}, torch {said['torch']}: {rates}; {copied}."]
    if "tests" in found:
        counts = ", ".join(f"{found['tests'].get(kind, 0)} {kind}" for kind in ("passed", "failed", "error", "skipped"))
        lines.append(f"Tests marked gpu: {counts if found['tests']['ended'] else 'not ended in time'}.")
    lines += [f"Left out for want of time: {one} and what follows." for one in found["stopped"]]
    columns = {
        "statistics": ("precision", "way"),
        "inverses": ("method", "precision", "way"),
        "packing": ("packing",),
    }
    for name, keys in columns.items():
        lines += ["", f"{name.capitalize()}: ms each (share of the roofline)", "", _pivot(found[name], keys)]
    beside = [
        [f"{row['work']} of {row['dim']}", row["copies"], f"{row['alone_s'] * 1e3:.3g}", f"{row['slowdown']:.2f}"]
        for row in found["beside_copies"]
    ]
    lines += ["", "Beside copies", "", table(["work", "copies", "alone, ms", "times as long"], beside)]
    step = found["step"]
    kinds = [[kind, f"{seconds * 1e3:.1f}"] for kind, seconds in step["seconds"].items()]
    lines += ["", f"One step of {step['model']}: {step['iteration_s'] * 1e3:.1f} ms", "", table(["kind", "ms"], kinds)]
    return "\n".join(lines)


def _pivot(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """A table with a line per way and a column per dimension."""
    dims = sorted({row["dim"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        cell = f"{row['seconds'] * 1e3:.3g} ({row['fraction']:.0%})"
        cells.setdefault(", ".join(str(row[key]) for key in keys), {})[row["dim"]] = cell
    return table(["", *map(str, dims)], [[way, *(by.get(dim, "") for dim in dims)] for way, by in cells.items()])


def main(setting: Setting, output: Path, *, tests: bool, docs: bool, ship: str | None) -> str:
    """Measure, and say what was found.

    Args:
        setting: what is asked for.
        output: folder of the raw numbers.
        tests: whether to run the tests marked gpu.
        docs: also into ``docs/gpu.md`` and ``docs/gpu.json``.
        ship: under this name the planner gets the profile (``cluster=NAME``), or None.

    Raises:
        ValueError: if the device is not there, or what is no measurement is to be kept.
    """
    if (docs or ship) and (setting.quick or setting.device != "cuda"):
        raise ValueError("--docs and --ship are for a measurement on a GPU")
    if ship and not re.fullmatch(r"[a-z0-9_]+", ship):
        raise ValueError(f"--ship={ship!r}: a name of small letters, digits and _")
    found = measure(setting, output, tests=tests)
    text = report(found)
    if ship:
        ClusterProfile.load(output / "cluster.json").save(SHIPPED / f"{ship}.json")
    if docs:
        page = DOCS / "gpu.md"
        page.write_text(into_page(page.read_text(), text))
        (DOCS / "gpu.json").write_text(json.dumps(found) + "\n")
    return f"{text}\n\nRaw numbers, timeline and profile: {output}"
