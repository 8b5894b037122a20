"""The cost benchmark's arithmetic, tables and page in the docs, from its raw results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import pages
from benchmarks.pages import quartiles
from benchmarks.workloads import WORKLOADS

GOAL_OF_KAISA = 0.6
"""Extra time over kfac-pytorch's that the project set itself, at every interval."""
GOAL_OVER_SGD = {"resnet20": 0.15}
"""Extra time over SGD's step at interval 10 that it set itself."""
INTERVALS = (1, 10)
SGD_TURN, SHORT_TURN = 5, 3
"""Steps of a turn of SGD, and of a K-FAC that updates in every step."""

NOT_MEASURED = "not measured"
NOT_RESOLVED = "not resolved"
"""Where KAISA took no more time than SGD within the noise, so that nothing can be divided by it."""


@dataclass(frozen=True)
class Variant:
    """One process: an optimizer (of :mod:`benchmarks.cost_worker`) and its interval."""

    optimizer: str
    interval: int

    @property
    def key(self) -> str:
        """As results name it."""
        return self.optimizer if self.optimizer == "sgd" else f"{self.optimizer}/{self.interval}"

    @property
    def turn(self) -> int:
        """Steps of one turn."""
        if self.optimizer == "sgd":
            return SGD_TURN
        return SHORT_TURN if self.interval == 1 else self.interval


VARIANTS = (Variant("sgd", 1), *(Variant(name, i) for i in INTERVALS for name in ("ours", "ours_all", "kaisa")))
TITLES = {"sgd": "SGD", "ours": "K-FAC", "ours_all": "K-FAC, all layers", "kaisa": "KAISA"}


def step_s(result: Mapping[str, Any], key: str) -> list[float]:
    """Seconds per step of every turn."""
    return [statistics.fmean(turn) for turn in result[key]["turns"]]


def extra_s(result: Mapping[str, Any], key: str) -> list[float]:
    """Seconds per step over SGD's before and after the same turn."""
    return [mine - sgd for mine, sgd in zip(step_s(result, key), result[key]["sgd_s"], strict=True)]


def over_sgd(result: Mapping[str, Any], key: str) -> list[float]:
    """:func:`extra_s` as a share of SGD's step."""
    return [extra / sgd for extra, sgd in zip(extra_s(result, key), result[key]["sgd_s"], strict=True)]


@dataclass(frozen=True)
class Ratio:
    """A ratio of two medians, and the least and the greatest ratio of their quartiles.

    Args:
        value: of the medians; NaN where the divisor's is not above zero, so that their quotient says nothing.
        low, high: None where the divisor's quartiles include zero: the ratio has no bounds.
    """

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, mine: tuple[float, float, float], theirs: tuple[float, float, float]) -> Ratio:
        """The ratio of two (lower quartile, median, upper quartile), any of which may be negative."""
        value = mine[1] / theirs[1] if theirs[1] > 0 else math.nan
        if theirs[0] <= 0:
            return cls(value, None, None)
        quotients = [own / their for own in (mine[0], mine[2]) for their in (theirs[0], theirs[2])]
        return cls(value, min(quotients), max(quotients))

    def __str__(self) -> str:
        if math.isnan(self.value):
            return NOT_RESOLVED
        bounds = "unbounded" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.value:.2f} ({bounds})"


def of_kaisa(result: Mapping[str, Any], optimizer: str, interval: int) -> Ratio | None:
    """:func:`over_sgd` over KAISA's at the same interval; None where it was not measured."""
    if f"kaisa/{interval}" not in result:
        return None
    return Ratio.of(
        quartiles(over_sgd(result, f"{optimizer}/{interval}")), quartiles(over_sgd(result, f"kaisa/{interval}"))
    )


def extra_bytes(result: Mapping[str, Any], key: str) -> int:
    """Peak memory of the process over that of SGD's."""
    return int(result[key]["peak_bytes"]) - int(result["sgd"]["peak_bytes"])


HEADER = ("", "ms per step", "quartiles", "over SGD", "of SGD's step", "of KAISA's extra", "peak MB", "over SGD")


def _row(result: Mapping[str, Any], variant: Variant) -> list[str]:
    every = {1: "every step", 10: "every 10 steps"}
    label = TITLES[variant.optimizer]
    label += "" if variant.optimizer == "sgd" else f", {every[variant.interval]}"
    if variant.key not in result:
        return [label, NOT_MEASURED, *[""] * (len(HEADER) - 2)]
    low, median, high = quartiles(step_s(result, variant.key))
    row = [label, f"{median * 1e3:.0f}", f"{low * 1e3:.0f} to {high * 1e3:.0f}"]
    peak = f"{result[variant.key]['peak_bytes'] / 1e6:.0f}"
    if variant.optimizer == "sgd":
        return [*row, "", "", "", peak, ""]
    row += [f"{quartiles(extra_s(result, variant.key))[1] * 1e3:+.0f} ms"]
    row += [f"{quartiles(over_sgd(result, variant.key))[1]:+.0%}"]
    share = None if variant.optimizer == "kaisa" else of_kaisa(result, variant.optimizer, variant.interval)
    row += ["" if share is None else str(share)]
    return [*row, peak, f"{extra_bytes(result, variant.key) / 1e6:+.0f}"]


def table(result: Mapping[str, Any]) -> str:
    """A workload's figures: medians over rounds."""
    return pages.table(HEADER, [_row(result, variant) for variant in VARIANTS])


def goals(name: str, result: Mapping[str, Any]) -> list[str]:
    """What the project set itself, and what came of it."""
    lines = []
    for interval in INTERVALS:
        ratio = of_kaisa(result, "ours", interval)
        text = f"extra time at interval {interval} at most {GOAL_OF_KAISA:.1f} of KAISA's"
        lines.append(_goal(text, None if ratio is None else ratio.value, GOAL_OF_KAISA, ".2f"))
    if name in GOAL_OVER_SGD:
        goal = GOAL_OVER_SGD[name]
        measured = quartiles(over_sgd(result, "ours/10"))[1]
        lines.append(_goal(f"at most {goal:.0%} over SGD at interval 10", measured, goal, ".0%"))
    for interval in INTERVALS:
        key = f"kaisa/{interval}"
        text = f"no more memory than KAISA at interval {interval}"
        share = result[f"ours/{interval}"]["peak_bytes"] / result[key]["peak_bytes"] if key in result else None
        lines.append(_goal(text, share, 1.0, ".2f"))
    return lines


def _goal(text: str, measured: float | None, goal: float, form: str) -> str:
    if measured is None:
        return f"- {text}: {NOT_MEASURED}"
    if math.isnan(measured):
        return f"- {text}: {NOT_RESOLVED}"
    return f"- {text}: {measured:{form}}, {'met' if measured <= goal else 'not met'}"


def report(results: Mapping[str, Any]) -> str:
    """All workloads' tables and goals, and where they were measured, in Markdown that is also for terminals."""
    facts = results["provenance"]
    kaisa = facts["kaisa"]
    kaisa = f"kfac-pytorch {kaisa['version']} at {kaisa['commit'][:7]}" if kaisa else "no checkout of kfac-pytorch"
    packages = facts["packages"]
    parts = [
        f"{facts['cpu']} with {facts['cpus']} cores, {facts['threads']} thread(s) per process, "
        f"PyTorch {packages['torch']}, Python {facts['python']}; {kaisa}; {facts['date']}, commit {facts['commit'][:7]}"
        f"{' with changes' if facts['dirty'] else ''}; {facts['rounds']} rounds."
    ]
    for name, result in results["workloads"].items():
        parts.append(f"### {WORKLOADS[name].title}\n\n{table(result)}")
        parts.append("\n".join(goals(name, result)))
    return "\n\n".join(parts)
