"""What K-FAC costs on one process: time per step and peak memory over SGD, beside kfac-pytorch (KAISA).

Every optimizer has a process of its own. All are started together, but only one computes at a time: a round gives each
its turn of a few steps, with a turn of SGD before and after, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from benchmarks.checkout import check_checkout, kaisa_identity
from benchmarks.cost_report import VARIANTS, Variant, report
from benchmarks.pages import into_page
from benchmarks.workloads import WORKLOADS
from experiments.provenance import code_identity, environment_facts

ROOT = Path(__file__).parent.parent


class CostError(RuntimeError):
    """A process of the benchmark failed."""


@dataclass(frozen=True)
class Setting:
    """What is run.

    Args:
        workloads: names in :data:`benchmarks.workloads.WORKLOADS`.
        rounds: turns of every process.
        threads: of each process.
        kaisa: a checkout of kfac-pytorch; None: it is not measured.
    """

    workloads: tuple[str, ...] = ("resnet20", "resnet18", "gpt")
    rounds: int = 7
    threads: int = 1
    kaisa: Path | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.workloads) - set(WORKLOADS))
        if unknown or not self.workloads:
            raise ValueError(f"no such workload(s): {', '.join(unknown)}; choose from: {', '.join(WORKLOADS)}")
        if self.rounds < 1 or self.threads < 1:
            raise ValueError("rounds and threads must be at least 1")
        check_checkout(self.kaisa)


class Worker:
    """A process of :mod:`benchmarks.cost_worker`; it ends with the ``with`` block."""

    def __init__(self, variant: Variant, workload: str, setting: Setting) -> None:
        self._name = f"{variant.key} on {workload}"
        command = [sys.executable, "-m", "benchmarks.cost_worker", "--workload", workload]
        command += ["--optimizer", variant.optimizer, "--interval", str(variant.interval)]
        command += ["--threads", str(setting.threads)]
        command += ["--kaisa", str(setting.kaisa.resolve())] if setting.kaisa else []
        environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), "DS_ACCELERATOR": "cpu"}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=self._errors, text=True
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def answer(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            CostError: if it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            raise CostError(f"{self._name} ended with exit status {status}:\n{self._errors.read()[-3000:]}")
        result: dict[str, Any] = json.loads(line)
        return result

    def turn(self, steps: int) -> dict[str, Any]:
        """Let it compute so many steps."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self.answer()


def measure(workload: str, setting: Setting) -> dict[str, Any]:
    """Per variant ``{"turns": [[seconds of each step]], "sgd_s", "peak_bytes"}`` of one workload.

    ``sgd_s`` holds what SGD's step took before and after each turn, for a machine whose speed changes with what else it
    does.

    Raises:
        CostError: if a process fails, or the two K-FACs do not precondition the same layers.
    """
    variants = [v for v in VARIANTS if v.optimizer != "kaisa" or setting.kaisa]
    with ExitStack() as stack:
        workers = {v: stack.enter_context(Worker(v, workload, setting)) for v in variants}
        layers = {v.optimizer: worker.answer()["layers"] for v, worker in workers.items()}
        if "kaisa" in layers and layers["kaisa"] != layers["ours"]:
            different = sorted(set(layers["kaisa"]) ^ set(layers["ours"]))
            raise CostError(f"only one of the K-FACs preconditions {', '.join(different)}")
        for v, worker in workers.items():
            worker.turn(v.turn)  # warm-up
        sgd, *others = variants
        turns: dict[str, list[dict[str, Any]]] = {v.key: [] for v in variants}
        for number in range(setting.rounds):
            first = number % len(others)
            turns[sgd.key].append(workers[sgd].turn(sgd.turn))
            for v in [*others[first:], *others[:first]]:
                turns[v.key].append(workers[v].turn(v.turn))
                turns[sgd.key].append(workers[sgd].turn(sgd.turn))
                around = turns[sgd.key][-2:]
                turns[v.key][-1]["sgd_s"] = fmean(fmean(turn["seconds"]) for turn in around)
    return {
        key: {
            "turns": [turn["seconds"] for turn in rows],
            "sgd_s": [turn.get("sgd_s", fmean(turn["seconds"])) for turn in rows],
            "peak_bytes": rows[-1]["peak_bytes"],
        }
        for key, rows in turns.items()
    }


def provenance(setting: Setting) -> dict[str, Any]:
    """Hardware, versions, date and setting; nothing about the machine's name, users or paths."""
    facts = environment_facts({})
    identity, _ = code_identity()
    kept = {key: facts[key] for key in ("python", "packages", "cpu", "cpus")}
    return {
        **kept,
        "commit": identity.get("commit", identity.get("version")),
        "dirty": identity.get("dirty", False),
        "date": datetime.now(UTC).date().isoformat(),
        "rounds": setting.rounds,
        "threads": setting.threads,
        "kaisa": kaisa_identity(setting.kaisa) if setting.kaisa else None,
    }


def main(setting: Setting, output: Path, docs: bool = False) -> str:
    """Measure every workload, write the raw numbers, return the report.

    Args:
        setting: what to measure.
        output: a JSON file.
        docs: also into ``docs/cost.json`` and ``docs/cost.md``.
    """
    results: dict[str, Any] = {"provenance": provenance(setting), "workloads": {}}
    for workload in setting.workloads:
        print(f"measuring {WORKLOADS[workload].title} ...", file=sys.stderr, flush=True)  # noqa: T201
        results["workloads"][workload] = measure(workload, setting)
    write(results, output)
    if docs:
        write(results, ROOT / "docs" / "cost.json")
        page = ROOT / "docs" / "cost.md"
        page.write_text(into_page(page.read_text(), report(results)))
    return report(results)


def write(results: dict[str, Any], path: Path) -> None:
    """As JSON; seconds to the microsecond."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 6))
    path.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")
