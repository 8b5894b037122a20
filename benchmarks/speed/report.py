"""The speed benchmark's arithmetic, goals and tables, from the results of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pages import quartiles, table
from benchmarks.speed.parts import MATCHED, UNLIMITED, Part
from benchmarks.speed.twins import same_plans
from benchmarks.speed.variants import AUTO, BASELINE, KAISA, NAMED, PAPER, TITLES
from kfac.timeline import COMMUNICATION_KINDS, KINDS, OTHER

Result = Mapping[str, Any]
"""Of :func:`benchmarks.speed.measure.measure`."""

COLUMNS = ("SPD-KFAC / D-KFAC", "auto / D-KFAC", "auto / KAISA", "auto / bound", "auto / fastest of paper's")
"""Of the table of goals."""

GOAL_OF_PAPER = 0.80
"""spdkfac / dkfac in time per iteration that the project set itself, on links that give either ratio."""
GOALS_OF_AUTO = {"ResNet-50": 0.72, "ResNet-152": 0.65}
"""auto / dkfac, by the ratio that the links give."""
GOAL_OF_KAISA = 0.5
"""auto / KAISA at its best strategy."""
GOAL_OF_BOUND = 1.10
"""auto / the bound that respects when messages become ready."""


def seconds(result: Result, variant: str) -> list[float]:
    """Per iteration, of each round."""
    return [float(value) for value in result["variants"][variant]["seconds"]]


def ratios(result: Result, variant: str, of: str = BASELINE) -> list[float]:
    """A variant's time over another's in the same round."""
    return [mine / other for mine, other in zip(seconds(result, variant), seconds(result, of), strict=True)]


def full_overlap_s(result: Result, variant: str) -> float:
    """The greater of computing alone and channel alone of a variant's plan."""
    found = result["variants"][variant]
    return max(float(found["computing_alone_s"]), float(found["channel_alone_s"]))


def hidden_s(result: Result, variant: str) -> dict[str, float]:
    """Seconds of each kind of message that computing hid."""
    found = result["variants"][variant]
    return {kind: max(0.0, found["busy_s"][kind] - found["exposed_s"][kind]) for kind in COMMUNICATION_KINDS}


def reached_ratio(result: Result) -> float:
    """Of communication to computing, in the baseline's recorded iterations."""
    busy = result["variants"][BASELINE]["busy_s"]
    computing = busy["FF"] + busy["BP"] + busy["FactorComp"]
    return float((busy["FactorComm"] + busy["GradComm"]) / computing)


@dataclass(frozen=True)
class Goal:
    """What the project set itself, and what came of it.

    Args:
        column: its short name.
        text: what.
        limit: at most this.
        value: measured; None: it was not.
        low: of quartiles, where noise may excuse: met if this is within the limit.
    """

    column: str
    text: str
    limit: float
    value: float | None
    low: float | None = None

    @property
    def met(self) -> bool:
        """Whether it was measured and reached."""
        return self.value is not None and (self.value if self.low is None else self.low) <= self.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.text}: not measured"
        said = "met" if self.met else "not met"
        noise = f" (lower quartile {self.low:.2f})" if self.low is not None else ""
        return f"{self.text}: {self.value:.2f}{noise}, {said}"


def goals(result: Result) -> list[Goal]:
    """Those that there are for a part's link and variants; KAISA's also where it was not measured."""
    link, variants = result["key"]["link"], result["variants"]

    def ratio(variant: str, of: str) -> tuple[float, float, float] | None:
        return quartiles(ratios(result, variant, of)) if variant in variants and of in variants else None

    def goal(column: str, limit: float, found: tuple[float, float, float] | None) -> Goal:
        return Goal(column, f"{column}, at most {limit:.2f}", limit, found[1] if found else None)

    rows = []
    if link in MATCHED:
        rows.append(goal(COLUMNS[0], GOAL_OF_PAPER, ratio(PAPER, BASELINE)))
    if link in MATCHED and AUTO in variants:
        rows.append(goal(COLUMNS[1], GOALS_OF_AUTO[link], ratio(AUTO, BASELINE)))
        rows.append(goal(COLUMNS[2], GOAL_OF_KAISA, ratio(AUTO, KAISA)))
        bound = quartiles([s / result["bound_s"] for s in seconds(result, AUTO)])
        rows.append(goal(COLUMNS[3], GOAL_OF_BOUND, bound))
    named = [name for name in NAMED if name in variants]
    if AUTO in variants and named:
        best = min(named, key=lambda name: quartiles(seconds(result, name))[1])
        low, value, _ = quartiles(ratios(result, AUTO, best))
        text = f"auto / the fastest of the paper's schedules ({best}), at most 1.00 within noise"
        rows.append(Goal(COLUMNS[4], text, 1.0, value, low))
    return rows


# ---------------------------------------------------------------------- tables

TIMES = (
    *("", "ms", "quartiles", "/ D-KFAC", "quartiles", "MB sent", "CPU ms", "computing alone", "channel alone"),
    *("/ greater of both", "simulated", "/ bound"),
)


def times(result: Result) -> str:
    """Every variant's time, its ratio to the baseline, and its distances to the limits."""
    return table(TIMES, [_times(result, name) for name in result["variants"]])


def _times(result: Result, name: str) -> list[str]:
    low, median, high = quartiles(seconds(result, name))
    row = [_title(result, name), _ms(median), f"{_ms(low)} to {_ms(high)}"]
    if BASELINE in result["variants"]:
        first, ratio, third = quartiles(ratios(result, name))
        row += [f"{ratio:.2f}", f"{first:.2f} to {third:.2f}"]
    else:
        row += ["", ""]
    found = result["variants"][name]
    row.append(f"{found['sent_bytes'] / 1e6:.2f}")
    row.append(f"{_ms(found['computing_cpu_s'])} + {_ms(found['other_cpu_s'])}")
    if "simulated_s" not in found:
        return [*row, "", "", "", "", f"{median / result['bound_s']:.2f}"]
    row += [_ms(found["computing_alone_s"]), _ms(found["channel_alone_s"])]
    row += [f"{median / full_overlap_s(result, name):.2f}", _ms(found["simulated_s"])]
    curvature = found["schedule"]["curvature"]
    return [*row, f"{median / result['bound_s']:.2f}" if curvature else ""]


def shares(result: Result) -> str:
    """Where the time of every variant's recorded iterations went, in ms: exposed, and hidden where that can be."""
    own = {name: found for name, found in result["variants"].items() if "exposed_s" in found}
    kinds = [k for k in (*KINDS, OTHER) if any(found["exposed_s"].get(k, 0) > 5e-5 for found in own.values())]
    rows = []
    for name, found in own.items():
        hidden = hidden_s(result, name)
        cells = [_ms(found["exposed_s"][k]) + (f" + {_ms(hidden[k])}" if k in hidden else "") for k in kinds]
        rows.append([_title(result, name), *cells])
    return table(["ms, exposed + hidden", *kinds], rows)


def _title(result: Result, name: str) -> str:
    return f"KAISA, {result['kaisa']['best']}" if name == KAISA and result.get("kaisa") else TITLES.get(name, name)


def _ms(value: float) -> str:
    return f"{value * 1e3:.0f}" if value >= 0.01 else f"{value * 1e3:.1f}"


def chosen(result: Result) -> str:
    """What ``auto`` took."""
    switches = result["variants"][AUTO]["schedule"]
    names = [name for name in switches if name not in ("curvature", "threshold_bytes", "lbp_rule")]
    return ", ".join(f"{name}={switches[name]}" for name in names)


def part_report(result: Result) -> str:
    """A part's tables, goals, and what else there is to say, in Markdown that is also for terminals."""
    key, link = result["key"], result["link"]
    part = Part(key["workload"], key["workers"], key["link"])
    rate = f"{link['rate_mbit_s']:.0f} Mbit/s" if link["rate_mbit_s"] else "no limit"
    if not link["rate_mbit_s"] and part.link != UNLIMITED:
        rate += f" (without one the ratio is {link['unlimited_ratio']:.2f} already)"
    facts = [
        f"Links: {rate}; measured communication / computing of D-KFAC: {reached_ratio(result):.2f}.",
        f"Bound that respects ready times: {_ms(result['bound_s'])} ms.",
        f"{key['rounds']} rounds of {key['iterations']} iteration(s); machine's load {result['load'][0]:.1f} before, "
        f"{result['load'][1]:.1f} after; {result['date']}.",
    ]
    for group in same_plans(result):
        names = " and ".join(
            f"{_title(result, name)} ({_ms(quartiles(seconds(result, name))[1])} ms)" for name in group
        )
        facts.append(f"One plan by {len(group)} names: {names}.")
    if result["code"]["changed"]:
        facts.append("**The code changed while this was measured.**")
    parts = [f"### {part.title}", "\n".join(facts), times(result), shares(result)]
    if AUTO in result["variants"]:
        tried = result.get("auto", {}).get("decision", {}).get("replanned", {}).get("tried_s", {})
        turns = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in tried.items())
        by_turns = f" By turns in its run, ms: {turns}." if turns else ""
        parts.append(f"`auto` took {chosen(result)}.{by_turns}")
    if result.get("kaisa"):
        tried = ", ".join(f"{name} {_ms(value)}" for name, value in result["kaisa"]["tried_s"].items())
        parts.append(f"KAISA's strategies, ms: {tried}.")
    parts.append("\n".join(f"- {goal}" for goal in goals(result)))
    return "\n\n".join(part for part in parts if part)


def report(results: Sequence[Result]) -> str:
    """All parts: where they were measured, the goals of all of them at a glance, and each one's tables."""
    if not results:
        return "Not measured."
    parts = [_provenance(results), overview(results), beyond_bound(results), *map(part_report, results)]
    return "\n\n".join(part for part in parts if part)


def overview(results: Sequence[Result]) -> str:
    """Ratios of the goals, part by part; in bold where one is missed."""
    header = ["", *COLUMNS]
    rows = []
    for result in (result for result in results if goals(result)):
        found = {goal.column: _cell(goal) for goal in goals(result)}
        cells = [found.get(column, "") for column in COLUMNS]
        key = result["key"]
        rows.append([f"{key['workload']}, {key['workers']} workers, {key['link']}", *cells])
    missed = sum(not goal.met for result in results for goal in goals(result))
    count = sum(len(goals(result)) for result in results)
    return f"{table(header, rows)}\n\n{count - missed} of {count} goals are met; what misses its goal is bold."


def beyond_bound(results: Sequence[Result]) -> str:
    """Where the time goes that ``auto`` takes beyond the bound, part by part.

    The bound takes computing as D-KFAC's, which nothing disturbs, and messages as what the channel needs. The parts of
    the difference are those of recorded iterations, and need not add up: what messages leave exposed is within the
    bound, too, where the channel is the bottleneck.
    """
    header = ["auto, ms", "time", "bound", "beyond it", "passes and statistics slower", "exposed messages", "no kind's"]
    rows = []
    for result in results:
        if AUTO not in result["variants"] or BASELINE not in result["variants"]:
            continue
        key, mine, base = result["key"], result["variants"][AUTO], result["variants"][BASELINE]
        time_s = quartiles(seconds(result, AUTO))[1]
        slower_s = sum(mine["busy_s"][kind] - base["busy_s"][kind] for kind in ("FF", "BP", "FactorComp"))
        exposed_s = sum(mine["exposed_s"][kind] for kind in COMMUNICATION_KINDS)
        found = (time_s, result["bound_s"], time_s - result["bound_s"], slower_s, exposed_s, mine["exposed_s"][OTHER])
        name = f"{key['workload']}, {key['workers']} workers, {key['link']}"
        rows.append([name, *(f"{1e3 * value:.0f}" for value in found)])
    return table(header, rows) if rows else ""


def _cell(goal: Goal) -> str:
    if goal.value is None:
        return "not measured"
    return f"{goal.value:.2f}" if goal.met else f"**{goal.value:.2f}**"


def _provenance(results: Sequence[Result]) -> str:
    def all_of(values: list[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    machines = [result["machine"] for result in results]
    cpus = all_of([f"{m['cpu']} with {m['cpus']} cores" for m in machines])
    packages = all_of([f"PyTorch {m['packages'].get('torch')}, Python {m['python']}" for m in machines])
    commits = [r["code"]["commit"][:7] + (" with changes" if r["code"]["dirty"] else "") for r in results]
    kaisa = [k for r in results if (k := r["key"]["kaisa"])]
    version = all_of([f"kfac-pytorch {k['version']} at {k['commit'][:7]}" for k in kaisa])
    return (
        f"{cpus}, one thread per worker, {packages}; "
        f"{version or 'no checkout of kfac-pytorch'}; {all_of([r['date'][:10] for r in results])}, "
        f"commit {all_of(commits)}."
    )
