"""Measuring what is still missing of the matrix, part by part, and reporting all of it."""

from __future__ import annotations

import gzip
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkout import check_checkout, kaisa_identity
from benchmarks.netns import emulated_network
from benchmarks.pages import into_page
from benchmarks.speed import validation_report
from benchmarks.speed.measure import measure
from benchmarks.speed.parts import MATCHED, ROOT, UNLIMITED, UNSEEN, Part, Store, code_digest, matrix
from benchmarks.speed.report import report
from benchmarks.speed.validation import predictions
from benchmarks.workloads import WORKLOADS
from experiments.provenance import code_identity, environment_facts

DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Setting:
    """What is run.

    Args:
        workloads: names in :data:`benchmarks.workloads.WORKLOADS`.
        workers: numbers of ranks.
        kaisa: a checkout of kfac-pytorch; None: it is not measured.
        links: only parts on these; none: all.

    Raises:
        ValueError: for an unknown workload or link, an impossible number of ranks, or what is no checkout.
    """

    workloads: tuple[str, ...] = ("resnet20", "gpt", "resnet20_b16", "resnet18", "vit")
    workers: tuple[int, ...] = (2, 4)
    kaisa: Path | None = None
    links: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.workloads) - set(WORKLOADS))
        if unknown or not self.workloads:
            raise ValueError(f"no such workload(s): {', '.join(unknown)}; choose from: {', '.join(WORKLOADS)}")
        all_links = (*MATCHED, *UNSEEN, UNLIMITED)
        if unknown := sorted(set(self.links) - set(all_links)):
            raise ValueError(f"no such link(s): {', '.join(unknown)}; choose from: {', '.join(all_links)}")
        if not self.workers or min(self.workers) < 2:
            raise ValueError("workers: at least 2, or nothing travels")
        check_checkout(self.kaisa)

    @property
    def parts(self) -> list[Part]:
        """Of the matrix."""
        found = matrix(kaisa_identity(self.kaisa) if self.kaisa else None, self.workloads, self.workers)
        return [part for part in found if not self.links or part.link in self.links]


def main(setting: Setting, output: Path, docs: bool = False, measuring: bool = True) -> str:
    """Measure the parts that ``output`` does not hold yet, and return the report of all.

    Args:
        setting: what to measure.
        output: a folder for results and pictures.
        docs: also into ``docs/speed.json.gz`` and ``docs/speed.md``, and what simulations predict of it, into
            ``docs/validation.md``. Parts that the docs have and ``output`` has not stay.
        measuring: False: report what there is, in ``output`` or else in the docs, whatever code it was measured with.

    Raises:
        ValueError: if there is nothing to report, or the docs' results are damaged.
        NetworkError: if a rank fails or namespaces cannot be made here; finished parts are kept.
    """
    store = Store(output)
    if measuring:
        run(setting.parts, store, setting.kaisa, output, _say)
    names = [part.name for part in setting.parts]
    known = stored([store.path(part) for part in setting.parts], with_docs=docs or not measuring)
    results = [result for name, result in known.items() if docs or name in names]
    if not results:
        raise ValueError(f"nothing to report: neither {output} nor {published()} has results of {', '.join(names)}")
    text = report(results)
    if docs:
        published().write_bytes(gzip.compress(json.dumps(results, separators=(",", ":")).encode(), mtime=0))
        _write_page("speed.md", text)
        _write_page("validation.md", validation_report.report(results))
        if predicted := predictions(results):
            validation_report.scatter(predicted, DOCS / "images" / "validation.png")
    return text


def published() -> Path:
    """The results that the docs' figures are made from: plans, profiles and all."""
    return DOCS / "speed.json.gz"


def stored(paths: Iterable[Path], with_docs: bool) -> dict[str, dict[str, Any]]:
    """Results by the names of their parts: those of these files that exist, before what the docs have of the same.

    Raises:
        ValueError: for a file that holds no results, naming it.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in [published(), *paths] if with_docs else paths:
        if not path.is_file():
            continue
        try:
            data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
            for result in data if isinstance(data, list) else [data]:
                key = result["key"]
                found[Part(key["workload"], key["workers"], key["link"]).name] = result
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no results of this benchmark: {error!r}") from error
    return found


def _write_page(name: str, text: str) -> None:
    page = DOCS / name
    page.write_text(into_page(page.read_text(), text))


def run(parts: Sequence[Part], store: Store, kaisa: Path | None, pictures: Path, say: Callable[[str], None]) -> None:
    """Measure what the store does not hold, saying what is done, why, and how long it will take."""
    todo = []
    for part in parts:
        code = code_digest()
        result, why = store.load(part, code)
        say(f"{part.name}: {why}" + ("" if result else f", will take about {minutes(part.estimate_s)}"))
        if result is None:
            todo.append(part)
    pace = Pace([part.estimate_s for part in todo])
    for number, part in enumerate(todo, start=1):
        say(f"[{number} of {len(todo)}] {part.title}; left: about {minutes(pace.left_s)}")
        code, start = code_digest(), time.monotonic()
        with emulated_network(part.workers) as network:
            result = measure(part, network, kaisa, pictures / part.name, lambda text: say(f"  {text}"))
        changed = code_digest() != code
        if changed:
            say("  the code changed while this was measured")
        store.save(part, {**result, "code": _code(code, changed), "machine": _machine()})
        pace.took(time.monotonic() - start)


class Pace:
    """How long the rest takes, by what the estimates of the finished parts were worth.

    Args:
        estimates_s: of all parts in order.
    """

    def __init__(self, estimates_s: Sequence[float]) -> None:
        self._waiting = list(estimates_s)
        self._estimated_s = self._took_s = 0.0

    def took(self, seconds: float) -> None:
        """The next part is finished."""
        self._estimated_s += self._waiting.pop(0)
        self._took_s += seconds

    @property
    def left_s(self) -> float:
        """Seconds until all are."""
        scale = self._took_s / self._estimated_s if self._estimated_s else 1.0
        return scale * sum(self._waiting)


def minutes(seconds: float) -> str:
    """For people."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _code(digest: str, changed: bool) -> dict[str, Any]:
    identity, _ = code_identity()
    commit = identity.get("commit", identity.get("version"))
    return {"digest": digest, "commit": commit, "dirty": identity.get("dirty", False), "changed": changed}


def _machine() -> Mapping[str, Any]:
    facts = environment_facts({})
    return {key: facts[key] for key in ("python", "packages", "cpu", "cpus")}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
