"""The tables of a comparison of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from analysis.comparison import Comparison, Group, differences, history
from analysis.report import BREAKDOWN_KINDS, HIDDEN_NOTE, breakdown_table, runs_table
from analysis.runs import Run
from analysis.statistics import bootstrap_median, bootstrap_speedup
from analysis.tables import Cell, Column, Table
from kfac.timeline import COMMUNICATION_KINDS

ENOUGH_RUNS = 3
"""From so many runs on an interval is over runs; with fewer, over the iterations of those there are."""
_MS = 1e3


def overview_table(comparison: Comparison) -> Table:
    """One row per group: how fast, how much faster, how well it learned, each with its interval."""
    base = comparison.baseline
    columns = (
        Column("runs of", align="left"),
        Column("ranks", "d"),
        Column("runs", "d"),
        *(Column(title, ".2f", group="iteration [ms]") for title in ("median", "low", "high")),
        *(Column(title, ".3f", group=f"speed-up over {base}") for title in ("median", "low", "high")),
        *(Column(title, ".4f", group="test loss") for title in ("mean", "±")),
        *(Column(title, ".4f", group="test accuracy") for title in ("mean", "±")),
    )
    rows = []
    for group in comparison.groups:
        middle = group.median_s
        low, high = _interval_s(comparison, group)
        times: tuple[Cell, ...] = (None if middle is None else middle * _MS, low, high)
        losses = [run.loss for run in group.runs if run.loss is not None]
        accuracies = [run.accuracy for run in group.runs if run.accuracy is not None]
        identity = (group.label, group.first.world_size, len(group.runs))
        rows.append((*identity, *times, *_speedup(comparison, group), *_mean(losses), *_mean(accuracies)))
    notes = (
        "Median: of the finished runs' median iterations, warm-up left out; low and high: its 95 % bootstrap interval, "
        f"over runs where there are at least {ENOUGH_RUNS}, else over the iterations of those there are, which says "
        f"nothing of how runs differ. Speed-up: the {base} runs' median over this one, of the same sweep, model, data, "
        "options and machine. ±: standard deviation over runs.",
    )
    return Table("Overview", columns, tuple(rows), notes)


def _interval_s(comparison: Comparison, group: Group) -> tuple[float | None, float | None]:
    if len(group.medians_s) >= ENOUGH_RUNS:
        low, high = bootstrap_median(group.medians_s)
        return low * _MS, high * _MS
    pooled = _pooled(comparison, group.runs)
    if len(pooled) < 2:
        return None, None
    low, high = bootstrap_median(pooled)
    return low * _MS, high * _MS


def _pooled(comparison: Comparison, runs: Sequence[Run]) -> list[float]:
    finished = [run for run in runs if run.status == "finished"] or runs
    return [s for run in finished for s in comparison.samples_s.get(run.path, ())]


def _speedup(comparison: Comparison, group: Group) -> tuple[Cell, Cell, Cell]:
    key, middle = group.first.comparable, group.median_s
    base_s = comparison.baselines.median_s.get(key)
    if base_s is None or middle is None:
        return None, None, None
    base = comparison.baselines.by_setting[key]
    medians = [run.iteration_s.median for run in base if run.iteration_s]
    if min(len(medians), len(group.medians_s)) >= ENOUGH_RUNS:
        low, high = bootstrap_speedup(medians, group.medians_s)
    else:
        over, under = _pooled(comparison, base), _pooled(comparison, group.runs)
        if min(len(over), len(under)) < 2:
            return base_s / middle, None, None
        low, high = bootstrap_speedup(over, under)
    return base_s / middle, low, high


def _mean(values: Sequence[float]) -> tuple[Cell, Cell]:
    return (fmean(values) if values else None, stdev(values) if len(values) > 1 else None)


def groups_breakdown_table(groups: Sequence[Group], *, share: bool = False) -> Table:
    """One row per group: exposed time of each kind, and how much of the communication computing hides.

    Args:
        groups: of runs that recorded timelines; others are left out.
        share: of the recorded iteration instead of milliseconds.
    """
    unit, spec = ("share", ".1%") if share else ("[ms]", ".2f")
    columns = (
        Column("runs of", align="left"),
        Column("ranks", "d"),
        Column("runs", "d"),
        Column("iteration [ms]", ".2f"),
        *(Column(kind, spec, group=f"exposed {unit}") for kind in BREAKDOWN_KINDS),
        *(Column(kind, spec, group=f"hidden {unit}") for kind in COMMUNICATION_KINDS),
        Column("hidden of communication", ".1%"),
    )
    rows = []
    for group in groups:
        recorded = [run for run in group.runs if run.breakdown_s]
        if not recorded:
            continue
        exposed = group.breakdown_s()
        hidden = {kind: fmean(run.hidden_s.get(kind, 0.0) for run in recorded) for kind in COMMUNICATION_KINDS}
        whole = sum(exposed.values())
        scale = (1 / whole if whole else 0.0) if share else _MS
        sent = sum(hidden.values()) + sum(exposed.get(kind, 0.0) for kind in COMMUNICATION_KINDS)
        cells = [exposed.get(kind, 0.0) * scale for kind in BREAKDOWN_KINDS] + [of * scale for of in hidden.values()]
        overlap = sum(hidden.values()) / sent if sent else None
        rows.append((group.label, group.first.world_size, len(recorded), whole * _MS, *cells, overlap))
    note = f"The mean of recorded iterations; the exposed times are all of it. {HIDDEN_NOTE}"
    return Table("Where the time goes", columns, tuple(rows), (note,))


def scaling_table(comparison: Comparison) -> Table | None:
    """One row per number of ranks: each schedule's iteration, and how much of the smallest world's speed is kept.

    Returns:
        None where all runs have the same number of ranks.
    """
    sizes = sorted({group.first.world_size for group in comparison.groups})
    lines = scaling_lines(comparison)
    if len(sizes) < 2 or not lines:
        return None
    columns = (
        Column("ranks", "d"),
        *(Column(label, ".2f", group="iteration [ms]") for label in lines),
        *(Column(label, ".1%", group="efficiency") for label in lines),
    )
    rows = []
    for size in sizes:
        times = [dict(points).get(size) for points in lines.values()]
        firsts = [points[0][1] for points in lines.values()]
        efficiency = [None if t is None else first / t for first, t in zip(firsts, times, strict=True)]
        rows.append((size, *(None if t is None else t * _MS for t in times), *efficiency))
    note = "Efficiency: the iteration on the fewest ranks over the one here, a rank's batch is the same (weak scaling)."
    return Table("Scaling", columns, tuple(rows), (note,))


def scaling_lines(comparison: Comparison) -> dict[str, list[tuple[int, float]]]:
    """Seconds of an iteration over the number of ranks, of groups that differ in nothing else."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for group in comparison.groups:
        if group.median_s is not None:
            words = [word for word in group.label.split() if word != f"w{group.first.world_size}"]
            lines.setdefault(" ".join(words), []).append((group.first.world_size, group.median_s))
    return {label: sorted(points) for label, points in lines.items()}


def learning_table(comparison: Comparison, parts: int = 4) -> Table | None:
    """One row per run: the training loss after each quarter of it, averaged over the iterations around that point."""
    curves = comparison.curves()
    if not curves:
        return None
    shares = [(i + 1) / parts for i in range(parts)]
    columns = (
        Column("run of", align="left"),
        Column("iterations", "d"),
        Column("seconds", ".1f"),
        *(Column(f"after {share:.0%}", ".4f", group="training loss") for share in shares),
        Column("test loss", ".4f"),
    )
    rows = []
    for curve in curves:
        count = len(curve.loss)
        width = max(1, count // 20)
        ends = [max(1, round(share * count)) for share in shares]
        losses = [fmean(curve.loss[max(0, end - width) : end]) for end in ends]
        tested = curve.eval_loss[-1] if curve.eval_loss else None
        rows.append((curve.label, count, curve.seconds[-1], *losses, tested))
    note = "Loss: mean over the last twentieth of the iterations up to there. Seconds: spent in training iterations."
    return Table("Learning", columns, tuple(rows), (note,))


def differences_table(comparison: Comparison) -> Table | None:
    """One row per key of the configuration that is not the same in all groups; None where all are the same."""
    found = differences(comparison.groups)
    if not found:
        return None
    columns = (Column("key", align="left"), *(Column(group.label, align="left") for group in comparison.groups))
    rows = tuple((key, *(_plain(value) for value in values)) for key, values in found.items())
    return Table("Differences of the configurations", columns, rows)


def provenance_table(comparison: Comparison) -> Table:
    """One row per run: code, machine, versions, and what it went through."""
    columns = tuple(
        Column(title, align="left")
        for title in ("run", "status", "seed", "code", "machine", "torch", "python", "starts and how they ended")
    )
    rows = []
    for run in comparison.runs:
        code = run.code
        commit = str(code.get("commit", code.get("version", "")))[:12] + (" + code.diff" if code.get("dirty") else "")
        try:
            machine = run.machine()
        except ValueError:
            machine = {}
        gpus = machine.get("gpus") or []
        hardware = f"{len(gpus)} x {gpus[0]}" if gpus else str(machine.get("cpu", ""))
        where = ", ".join(filter(None, (str(machine.get("host", run.host)), hardware)))
        versions = machine.get("packages") or {}
        facts = (commit, where, str(versions.get("torch", "")), str(machine.get("python", "")))
        rows.append((run.run_id, run.status, str(run.seed), *facts, "; ".join(history(run))))
    return Table("Provenance", columns, tuple(rows))


def all_tables(comparison: Comparison) -> dict[str, Table]:
    """Every table of a report by its section."""
    runs = comparison.runs
    found = {
        "overview": overview_table(comparison),
        "breakdown": breakdown_table([run for run in runs if run.breakdown_s]),
        "learning": learning_table(comparison),
        "scaling": scaling_table(comparison),
        "runs": runs_table(runs, comparison.baseline, samples_s=comparison.samples_s),
        "differences": differences_table(comparison),
        "provenance": provenance_table(comparison),
    }
    return {name: table for name, table in found.items() if table is not None and table.rows}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
