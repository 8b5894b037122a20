"""The tables that answer the usual questions about runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from analysis.runs import Run, load_timelines, sweep_names
from analysis.statistics import Resampled, central, resampled_medians
from analysis.tables import Cell, Column, Table
from kfac.timeline import COMMUNICATION_KINDS, KINDS, OTHER, Timeline

BASELINE = "dkfac"
"""The schedule that others are compared with unless the user names another one."""
BREAKDOWN_KINDS = (*KINDS, OTHER)

HIDDEN_NOTE = (
    "Hidden: the time of messages during which the rank computes. A message's time is from when it could leave until "
    "it has arrived, waiting for slower ranks included."
)

_MS = 1e3
_IDENTITY = (
    Column("schedule", align="left"),
    Column("model", align="left"),
    Column("data", align="left"),
    Column("ranks", "d"),
    Column("batch/rank", "d"),
    Column("seed", "d"),
)


def _sweeps(runs: Sequence[Run]) -> tuple[tuple[Column, ...], list[tuple[Cell, ...]]]:
    """A column that tells sweeps apart and each row's cell of it; no column where there is only one sweep."""
    names = sweep_names(runs)
    if len(names) < 2:
        return (), [()] * len(runs)
    return (Column("sweep", align="left"),), [(names[run.sweep],) for run in runs]


def _identity(run: Run) -> tuple[Cell, ...]:
    return (run.schedule, run.model, run.data, run.world_size, run.batch_size, run.seed)


@dataclass(frozen=True)
class Baselines:
    """The finished runs of the schedule that speed-ups are over.

    Args:
        by_setting: those that may be compared with one another, by :attr:`~analysis.runs.Run.comparable`.
        median_s: the median of their median iterations; of several runs, such as seeds.
    """

    by_setting: Mapping[str, Sequence[Run]]
    median_s: Mapping[str, float]

    @classmethod
    def among(cls, runs: Iterable[Run], schedule: str) -> Baselines:
        """Those of a schedule among other runs."""
        by_setting: dict[str, list[Run]] = {}
        for run in runs:
            if run.schedule == schedule and run.status == "finished" and run.iteration_s:
                by_setting.setdefault(run.comparable, []).append(run)
        medians_s = {key: [r.iteration_s.median for r in of if r.iteration_s] for key, of in by_setting.items()}
        return cls(by_setting, {key: median(of) for key, of in medians_s.items()})

    def speedup(self, run: Run) -> float | None:
        """How many times shorter a run's median iteration is than the comparable baseline's; None without one."""
        baseline_s = self.median_s.get(run.comparable)
        return None if baseline_s is None or run.iteration_s is None else baseline_s / run.iteration_s.median

    def intervals(
        self, runs: Iterable[Run], samples_s: Mapping[Path, Sequence[float]]
    ) -> list[tuple[float, float] | None]:
        """The 95 % bootstrap interval of each run's :meth:`speedup` over iterations, the baseline's runs pooled.

        Args:
            runs: whose.
            samples_s: seconds of each iteration by the runs' directories; runs that are not there do not count.
        """
        medians_s: dict[str, Resampled | None] = {}  # many runs have the same baseline
        found = []
        for run in runs:
            if run.comparable not in medians_s:
                pooled_s = [s for r in self.by_setting.get(run.comparable, ()) for s in samples_s.get(r.path, ())]
                medians_s[run.comparable] = resampled_medians(pooled_s) if pooled_s else None
            over, own_s = medians_s[run.comparable], samples_s.get(run.path)
            found.append(central(over / resampled_medians(own_s, stream=1)) if over is not None and own_s else None)
        return found


def runs_table(
    runs: Sequence[Run],
    baseline: str = BASELINE,
    *,
    among: Sequence[Run] | None = None,
    samples_s: Mapping[Path, Sequence[float]] | None = None,
) -> Table:
    """One row per run: what it was, how fast it was, how well it learned.

    Args:
        runs: the rows.
        baseline: the schedule that speed-ups are over.
        among: where to look for baselines; the rows by default.
        samples_s: seconds of each iteration by the runs' directories; adds bootstrap intervals of the speed-ups.
    """
    baselines = Baselines.among(runs if among is None else among, baseline)
    times = ("median", "q25", "q75")
    interval = tuple(Column(f"{end} of speed-up", ".3f") for end in ("low", "high")) if samples_s is not None else ()
    ends_of = baselines.intervals(runs, samples_s) if samples_s is not None else [None] * len(runs)
    sweep, sweep_of = _sweeps(runs)
    columns = (
        *sweep,
        *_IDENTITY,
        Column("status", align="left"),
        Column("iterations", "d"),
        *(Column(f"{name} [ms]", ".1f", group="iteration") for name in times),
        Column("n", "d", group="iteration"),
        Column(f"speed-up over {baseline}", ".3f"),
        *interval,
        Column("loss", ".4f"),
        Column("accuracy", ".4f"),
        Column("run", align="left"),
    )
    rows: list[tuple[Cell, ...]] = []
    for run, of_sweep, interval_of in zip(runs, sweep_of, ends_of, strict=True):
        spread = run.iteration_s
        of_times: tuple[Cell, ...] = (None,) * 4
        if spread:
            of_times = (spread.median * _MS, spread.q25 * _MS, spread.q75 * _MS, spread.n)
        ends: tuple[Cell, ...] = () if samples_s is None else interval_of or (None, None)
        identity = (*of_sweep, *_identity(run), run.status, run.iterations or None)
        rows.append((*identity, *of_times, baselines.speedup(run), *ends, run.loss, run.accuracy, run.run_id))
    notes = [
        "Iteration times: median and quartiles over n iterations, warm-up left out. Speed-up: median of the finished "
        f"{baseline} run with the same sweep (folder), model, data, K-FAC options, ranks, batch size, threads and "
        f"device, over this run's median; of several such runs (seeds) the median of their medians, and a {baseline} "
        "run's own value is its ratio to that."
    ]
    if samples_s is not None:
        notes.append(
            f"Interval: 95 % bootstrap over iterations, those of all {baseline} runs pooled; runs differ by more than "
            "the iterations of one run do."
        )
    return Table("Runs", columns, tuple(rows), tuple(notes))


def breakdown_table(runs: Sequence[Run]) -> Table:
    """One row per run: exposed milliseconds per kind, and the communication that computing hides."""
    sweep, sweep_of = _sweeps(runs)
    columns = (
        *sweep,
        *(column for column in _IDENTITY if column.title in ("schedule", "model", "ranks", "seed")),
        Column("recorded [ms]", ".1f"),
        *(Column(kind, ".1f", group="exposed [ms]") for kind in BREAKDOWN_KINDS),
        *(Column(kind, ".1f", group="hidden [ms]") for kind in COMMUNICATION_KINDS),
    )
    rows = tuple(
        (*of_sweep, r.schedule, r.model, r.world_size, r.seed, _sum(r.breakdown_s), *_kinds(r.breakdown_s, r.hidden_s))
        for r, of_sweep in zip(runs, sweep_of, strict=True)
    )
    notes = (
        "Exposed: what a rank computes, else the message it waits for, else Other; averaged over ranks and recorded "
        "iterations, whose mean they add up to (recorded). Those are few, and where something else kept the machine "
        f"busy their mean is not the median of all iterations. {HIDDEN_NOTE}",
    )
    return Table("Where the time goes", columns, rows, notes)


def _sum(exposed_s: Mapping[str, float]) -> Cell:
    return sum(exposed_s.values()) * _MS if exposed_s else None


def _kinds(exposed_s: Mapping[str, float], hidden_s: Mapping[str, float]) -> tuple[Cell, ...]:
    def cell(seconds: float | None) -> Cell:
        return None if seconds is None else seconds * _MS

    exposed = (cell(exposed_s.get(kind)) for kind in BREAKDOWN_KINDS)
    return (*exposed, *(cell(hidden_s.get(kind)) for kind in COMMUNICATION_KINDS))


def wide_table(tables: Sequence[Table]) -> Table:
    """Tables of the same rows as one, each column once: the form for other programs."""
    columns: list[Column] = []
    cells: list[list[Cell]] = [[] for _ in tables[0].rows]
    for table in tables:
        for i, column in enumerate(table.columns):
            if column.full_title not in {c.full_title for c in columns}:
                columns.append(column)
                for row, source in zip(cells, table.rows, strict=True):
                    row.append(source[i])
    notes = tuple(note for table in tables for note in table.notes)
    return Table(tables[0].title, tuple(columns), tuple(map(tuple, cells)), notes)


def timeline_table(name: str, timeline: Timeline) -> Table:
    """One row per rank and kind: seconds in all, exposed and hidden.

    Args:
        name: of the run and iteration, for the title.
        timeline: all ranks of one iteration.
    """
    columns = (
        Column("rank", "d"),
        Column("kind", align="left"),
        Column("spans", "d"),
        Column("total [ms]", ".2f"),
        Column("exposed [ms]", ".2f"),
        Column("hidden [ms]", ".2f"),
        Column("exposed share", ".1%"),
    )
    rows: list[tuple[Cell, ...]] = []
    for rank in timeline.ranks:
        spans = [s for s in timeline.spans if s.rank == rank]
        alone = Timeline(tuple(spans), total_s=timeline.iteration_s, source=timeline.source)
        busy, exposed, hidden = alone.busy_s(), alone.breakdown_s(), alone.hidden_s()
        for kind in BREAKDOWN_KINDS:
            count = sum(s.kind == kind for s in spans)
            if count or (kind == OTHER and exposed[OTHER] > 0):
                share = exposed[kind] / timeline.iteration_s if timeline.iteration_s else 0.0
                total = busy.get(kind, exposed[kind])
                own_hidden = hidden[kind] * _MS if kind in hidden else None
                rows.append((rank, kind, count, total * _MS, exposed[kind] * _MS, own_hidden, share))
    title = f"{name}: {timeline.iteration_s * _MS:.2f} ms, {timeline.source}"
    return Table(title, columns, tuple(rows), (HIDDEN_NOTE,))


def timeline_tables(run: Path, iterations: Iterable[int] | None = None) -> list[Table]:
    """The recorded iterations of a run, or those named.

    Raises:
        ValueError: if it has none, or not one that is named.
    """
    recorded = load_timelines(run)
    if not recorded:
        others = "".join(f"; {file} is none" for file in sorted((run / "timelines").glob("*"))[:1])
        raise ValueError(f"{run} has no timelines: none were recorded{others}")
    wanted = list(recorded if iterations is None else iterations)
    missing = [i for i in wanted if i not in recorded]
    if missing:
        raise ValueError(f"{run} has no timeline of iteration {missing[0]}; it has: {', '.join(map(str, recorded))}")
    return [timeline_table(f"{run.name}, iteration {i}", recorded[i]) for i in wanted]
