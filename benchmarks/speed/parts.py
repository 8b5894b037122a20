"""The matrix: which parts there are, how long each takes, and where its result is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.variants import AUTO, FEW, HALF, PREDICTED, VARIANTS
from benchmarks.workloads import WORKLOADS
from kfac.finals import longest
from kfac.replanning import ITERATIONS, WARM_UP
from paper_figures.published import communication_share

ROOT = Path(__file__).parent.parent.parent

MATCHED = {"ResNet-50": "resnet50", "ResNet-152": "resnet152"}
"""The models of the paper whose ratio of communication to computing the links are made to give."""
UNLIMITED = "unlimited"
UNSEEN = {"DenseNet-201": "densenet201"}
"""Another such model, between the two: nothing was looked at there before predictions were made of it."""
NEW = "vit"
"""A workload of which nothing but D-KFAC's profile is used for predictions."""

ITERATION_S = {
    "resnet20": (0.42, 0.8),
    "resnet20_b16": (0.25, 0.8),
    "gpt": (0.25, 0.8),
    "vit": (0.35, 0.8),
    "resnet18": (3.3, 0.15),
    "tiny": (0.1, 0.5),
}
"""Seconds of an iteration of D-KFAC that two ranks took on two cores, unlimited (resnet20_b16, vit, tiny: estimates),
and the share of it that communication is proportional to: what durations are estimated from."""
_EXPOSED = 0.5
"""Of communication, on average over the variants."""
_START_S, _CALIBRATION, _KAISA = 30.0, 11, 2.5
"""Starting the processes and timing collectives, in seconds; calibration, in iterations; an iteration of KAISA's, in
iterations of D-KFAC."""

_CODE = (
    "kfac/**/*.py",
    "experiments/models.py",
    "experiments/transformers.py",
    "benchmarks/ranks.py",
    "benchmarks/netns.py",
)
_CODE_OF_SPEED = ("variants", "worker", "kaisa", "measure")


@dataclass(frozen=True)
class Part:
    """One model on one kind of link: what is measured in one go.

    Args:
        workload: of :data:`benchmarks.workloads.WORKLOADS`.
        workers: ranks.
        link: a model of the paper whose ratio of communication to computing it gives, or ``unlimited``.
        variants: of :data:`benchmarks.speed.variants.VARIANTS`.
        rounds: turns of every variant.
        iterations: of a turn.
        kaisa: version and commit of kfac-pytorch; None: it is not measured.
    """

    workload: str
    workers: int
    link: str
    variants: tuple[str, ...] = tuple(VARIANTS)
    rounds: int = 7
    iterations: int = 2
    kaisa: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.workload}-{self.workers}-{self.link}"

    @property
    def auto_turns(self) -> int:
        """Turns of each plan while ``auto`` decides: fewer where iterations are long."""
        return 1 if self.rounds < 7 or self.workers > 2 else 2

    @property
    def title(self) -> str:
        """For people."""
        ratio = self.ratio
        link = "unlimited links" if ratio is None else f"links that give the ratio of {self.link}, {ratio:.2f}"
        return f"{WORKLOADS[self.workload].title} per worker, {self.workers} workers, {link}"

    @property
    def ratio(self) -> float | None:
        """Of channel time to computing time that the links are made to give."""
        return None if self.link == UNLIMITED else communication_share({**MATCHED, **UNSEEN}[self.link])

    @property
    def estimate_s(self) -> float:
        """How long measuring it takes on two cores."""
        iteration_s, share = ITERATION_S[self.workload]
        one = iteration_s * (1 + _EXPOSED * share * (self.ratio or 0.0)) * max(1.0, self.workers / 2)
        turns: float = len(self.variants) * (1 + self.rounds)
        if self.kaisa is not None:
            strategies = 8 if self.workers == 2 else 12
            turns += _KAISA * (self.rounds + 1.5 * strategies)
        deciding = WARM_UP + ITERATIONS + longest(self.auto_turns) if AUTO in self.variants else 0
        return _START_S + one * (_CALIBRATION + deciding + self.iterations * turns)

    def key(self) -> dict[str, Any]:
        """What a kept result must have been measured with; switches included."""
        switches = {name: dict(VARIANTS[name]) for name in self.variants}
        key: dict[str, Any] = json.loads(json.dumps({**asdict(self), "variants": switches}))
        return key


def matrix(kaisa: Mapping[str, str] | None, workloads: tuple[str, ...], workers: tuple[int, ...]) -> list[Part]:
    """All parts of these models and numbers of workers, the quickest to tell something first.

    Four workers share two cores, and their iterations take twice as long: a turn is one iteration then. ResNet-18's
    take seconds: it gets few variants, three rounds, two workers and the two matched links. The second batch size, the
    third link and the last model are there to test predictions on (:mod:`benchmarks.speed.validation`).
    """
    links = (*MATCHED, UNLIMITED)
    parts = []
    for count in workers:
        for name in workloads:
            if name == "resnet18":
                if count == 2:
                    parts += [Part(name, 2, link, FEW, rounds=3, iterations=1, kaisa=kaisa) for link in MATCHED]
            elif name == "resnet20_b16":
                if count == 2:
                    parts.append(Part(name, 2, "ResNet-50", HALF, rounds=5, kaisa=kaisa))
            elif name == NEW:
                parts += [Part(name, count, "ResNet-50", PREDICTED, rounds=5)] if count == 2 else []
            elif name == "tiny":
                parts.append(Part(name, count, "ResNet-50", FEW, rounds=2, iterations=1, kaisa=kaisa))
            else:
                parts += [Part(name, count, link, iterations=2 if count == 2 else 1, kaisa=kaisa) for link in links]
    for count in workers:
        unseen = [name for name in workloads if name in ("resnet20", "gpt", NEW)]
        parts += [
            Part(name, count, link, PREDICTED, rounds=5, iterations=2 if count == 2 else 1)
            for link in UNSEEN
            for name in unseen
        ]
    return parts


def code_digest() -> str:
    """A short name of the code that is measured; prose, reports and tests are not part of it."""
    digest = hashlib.sha256()
    patterns = (*_CODE, *(f"benchmarks/speed/{name}.py" for name in _CODE_OF_SPEED))
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class Store:
    """Finished parts, one JSON file each.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, part: Part) -> Path:
        """Of a part's result."""
        return self._folder / f"{part.name}.json"

    def load(self, part: Part, code: str) -> tuple[dict[str, Any] | None, str]:
        """A part's result where it was measured with this setting and code, and otherwise why not."""
        path = self.path(part)
        if not path.is_file():
            return None, "not measured yet"
        try:
            result: dict[str, Any] = json.loads(path.read_text())
            key, digest = result["key"], result["code"]["digest"]
        except (ValueError, KeyError, TypeError):
            return None, f"{path} is no result"
        if key != part.key():
            return None, "measured with another setting"
        if digest != code:
            return None, f"the code has changed since it was measured (from {digest} to {code})"
        return result, "measured already"

    def save(self, part: Part, result: Mapping[str, Any]) -> None:
        """Keep a result; seconds to the microsecond. Never half of it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        rounded = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.7g}"))
        unfinished = self.path(part).with_suffix(".tmp")
        unfinished.write_text(json.dumps(rounded, indent=1) + "\n")
        unfinished.rename(self.path(part))
