"""Measured iteration-time table: the small model's runs on this machine, with their noise and both speed-ups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from analysis.tables import Cell, Column, Table
from paper_figures import published
from paper_figures.item import Context, Made, Provenance, write_table
from paper_figures.measured import NO_RUNS, Measured, Setting, add_runs, by_comparable, measured, settings

NAME = "measured_iteration_time"
SPEEDUPS = {f"{schedule} / schedule": schedule for schedule in ("dkfac", "mpdkfac")}
"""Ratios of times, by name, and the schedules that they are over."""

COLUMNS = (
    Column("model", align="left"),
    Column("data", align="left"),
    Column("ranks", "d"),
    Column("batch/rank", "d"),
    Column("schedule", align="left"),
    *(Column(f"{name} [ms]", ".1f", group="measured") for name in ("median", "q25", "q75")),
    Column("n", "d", group="measured"),
    Column("runs", "d", group="measured"),
    *(Column(name, ".2f", group="measured") for name in SPEEDUPS),
)

_EXTRA: dict[Column, Callable[[Setting], str]] = {
    Column("sweep", align="left"): lambda setting: setting.sweep,
    Column("settings", align="left"): lambda setting: ", ".join(setting.others),
}
"""Columns that stand only where rows differ in them."""


def table(runs_folder: Path) -> tuple[Table, Provenance, list[str]]:
    """One row per schedule, and the warnings of records left out."""
    provenance = Provenance(NAME)
    groups, warnings = measured(runs_folder)
    add_runs(provenance, groups)
    which = settings(groups)
    extra = [c for c in _EXTRA if any(_EXTRA[c](setting) for setting in which)]
    comparable = by_comparable(groups)
    rows = tuple(
        (*(_EXTRA[column](setting) for column in extra), *_row(group, comparable, provenance))
        for group, setting in zip(groups, which, strict=True)
    )
    machines = sorted({_machine(group) for group in groups})
    notes = [
        "measured: real processes of this project. Median and quartiles over n iterations, warm-up left out; of "
        "several runs the median of each. dkfac / schedule, mpdkfac / schedule: that schedule's median over the row's, "
        "where it has the same sweep (folder), model, data, K-FAC options, ranks, batch size, threads and device.",
        *(f"Machine: {machine}." for machine in machines),
        *_what_there_is_to_hide(groups, which, provenance),
    ]
    if not groups:
        notes = [NO_RUNS.format(runs_folder)]
    return Table("Iteration time, measured", (*extra, *COLUMNS), rows, tuple(notes)), provenance, warnings


def _row(group: Measured, comparable: Mapping[tuple[str, str], Measured], provenance: Provenance) -> tuple[Cell, ...]:
    run, spread = group.run, group.spread
    times_ms = {f"{name} [ms]": 1e3 * getattr(spread, name) for name in ("median", "q25", "q75")}
    for name, value in {**times_ms, "n": spread.n}.items():
        provenance.add(f"{group.label}/{name}", value, "measured", **group.origin())
    ratios: list[Cell] = []
    for name, schedule in SPEEDUPS.items():
        over = comparable.get((run.comparable, schedule))
        ratio = over.spread.median / spread.median if over else None
        ratios.append(ratio)
        if over:
            of = [f"{over.label}/median [ms]", f"{group.label}/median [ms]"]
            provenance.add(f"{group.label}/{name}", ratio, "measured", ratio_of=of)
    identity = (run.model, run.data, run.world_size, run.batch_size, run.schedule)
    return (*identity, *times_ms.values(), spread.n, len(group.runs), *ratios)


def _what_there_is_to_hide(groups: list[Measured], which: list[Setting], provenance: Provenance) -> list[str]:
    """How much communication the measured ranks had, beside the paper's: nothing else can be hidden."""
    found = []
    of_paper = f"for ResNet-50 on the paper's cluster it was {published.communication_share('resnet50'):.2f}"
    for group, setting in zip(groups, which, strict=True):
        share = group.communication_share()
        if group.run.schedule != "dkfac" or share is None:
            continue
        provenance.add(f"{group.label}/communication over computing", share, "measured", **group.origin())
        where = ", ".join(filter(None, (setting.sweep, group.run.model, *setting.others)))
        found.append(f"{share:.2f} ({where}, {group.run.world_size} ranks)")
    if not found:
        return []
    return [
        f"Communication / computing of dkfac: {', '.join(found)}. "
        f"A schedule can hide no more than there is; {of_paper}; make bench measures over links that give it."
    ]


def _machine(group: Measured) -> str:
    facts = group.run.machine()
    gpus = ", ".join(facts.get("gpus", []))
    return f"{facts.get('cpu', 'unknown')}, {facts.get('cpus', '?')} CPUs" + (f", {gpus}" if gpus else "")


def make(context: Context) -> Made:
    """Write the table."""
    made_table, provenance, warnings = table(context.runs)
    made = write_table(context, made_table, provenance)
    return Made(made.paths, made.text, tuple(warnings))
