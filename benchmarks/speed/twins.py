"""Variants of a part that are one plan by different names: measured apart, they tell the noise between variants.

Where nothing is cheaper to broadcast than to invert, for example, LBP places as "every rank inverts all" does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

Result = Mapping[str, Any]

PLANNERS = ("placement", "lbp_rule", "fusion", "threshold_bytes")
"""Switches that say how a plan is found, and nothing of what is done."""


def work_of(plan: Mapping[str, Any]) -> str:
    """What a plan (its JSON form) has every rank do, as one text: the same for plans that differ in names only."""
    schedule = {key: value for key, value in plan["schedule"].items() if key not in PLANNERS}
    return json.dumps({**plan, "schedule": schedule}, sort_keys=True)


def same_plans(result: Result) -> list[tuple[str, ...]]:
    """The variants of a part that are one plan, in the part's order; those that are by themselves are left out."""
    groups: dict[str, list[str]] = {}
    for variant, plan in result.get("plans", {}).items():
        groups.setdefault(work_of(plan), []).append(variant)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def spreads(results: Sequence[Result]) -> list[float]:
    """How far apart the medians of two variants of one plan are, as shares of the lower one, of all pairs."""
    found = []
    for result in results:
        for group in same_plans(result):
            medians = [median(result["variants"][variant]["seconds"]) for variant in group]
            found += [max(a, b) / min(a, b) - 1 for a, b in combinations(medians, 2)]
    return found
