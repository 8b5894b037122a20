"""Iteration-time table: the three algorithms and both speed-ups on 64 GPUs, published and simulated."""

from __future__ import annotations

import json

from analysis.tables import Cell, Column, Table
from kfac.planning import ScheduleConfig
from kfac.schedules import NAMED_SCHEDULES
from paper_figures import interference, published, simulated
from paper_figures.interference import SPEEDUPS
from paper_figures.item import Context, Made, Provenance, write_table

NAME = "iteration_time"
BY_COST = "SPD, cost rule"

FITTED, IDEAL = "simulated with interference", "simulated ideally"
GROUPS = ("published", FITTED, IDEAL)
COLUMNS = (
    Column("model", align="left"),
    *(
        column
        for group in GROUPS
        for column in (
            *(Column(algorithm, ".4f", group=group) for algorithm in published.ALGORITHMS),
            *(Column(name, ".2f", group=group) for name in SPEEDUPS),
        )
    ),
    Column(BY_COST, ".4f", group=IDEAL),
)


def table() -> tuple[Table, Provenance]:
    """Seconds of one iteration; the tags of the columns are never mixed in one."""
    provenance = Provenance(NAME)
    record = json.loads(interference.PATH.read_text())
    predicted = record["predicted"]
    provenance.inputs["residuals"] = {key: record[key] for key in ("relative_error", "speedup_difference", "predicted")}
    rows = tuple(_row(key, provenance) for key in published.model_keys())
    name = published.model(interference.FITTED_MODEL).name
    notes = (
        "Seconds per iteration. SP1 = D-KFAC / SPD-KFAC, SP2 = MPD-KFAC / SPD-KFAC.",
        "published: the values of the paper's figure; the speed-ups are their ratios. Which of the paper's SP1 and SP2 "
        "is which is inferred.",
        "simulated with interference: D-KFAC is fitted on all models, MPD-KFAC and SPD-KFAC on "
        f"{name}; those of the other models are predicted, with errors of {predicted['mean_error']:.1%} on average and "
        f"{predicted['max_error']:.1%} at most, by the variant that did best of those tried; in their parts the errors "
        "are greater (docs/reproduction.md).",
        "simulated ideally: on profiles derived from other published numbers (paper64); computing and communication do "
        f"not slow each other down. {simulated.PRECONDITIONING}",
        f"SPD-KFAC: with the dimension threshold d < {published.lbp_threshold_dim()} of the paper's runs; {BY_COST}: "
        "with the rule that the paper describes.",
    )
    return Table("Iteration time on 64 GPUs [s], published and simulated", COLUMNS, rows, notes), provenance


def _row(key: str, provenance: Provenance) -> tuple[Cell, ...]:
    row: list[Cell] = [published.model(key).name]
    for group in GROUPS:
        seconds_of = {}
        for algorithm in published.ALGORITHMS:
            if group == "published":
                number = published.iteration_s(key, algorithm)
                seconds_of[algorithm] = number.value
                provenance.add(f"{key}/{group}/{algorithm}", number.value, number.status, **number.origin())
            else:
                schedule = interference.SCHEDULES[algorithm]
                seconds_of[algorithm] = _simulate(key, algorithm, schedule, group, provenance)
        row += seconds_of.values()
        for name, over in SPEEDUPS.items():
            ratio = seconds_of[over] / seconds_of["SPD-KFAC"]
            row.append(ratio)
            of = [f"{key}/{group}/{a}" for a in (over, "SPD-KFAC")]
            provenance.add(f"{key}/{group}/{name}", ratio, group.partition(" ")[0], ratio_of=of)
    return (*row, _simulate(key, BY_COST, NAMED_SCHEDULES["spdkfac"], IDEAL, provenance))


def _simulate(key: str, algorithm: str, schedule: ScheduleConfig, group: str, provenance: Provenance) -> float:
    fitted = group == FITTED
    seconds = simulated.simulated(key, schedule, fitted).iteration_s
    name = simulated.add_input(provenance, key, algorithm, schedule, fitted)
    provenance.add(f"{key}/{group}/{algorithm}", seconds, "simulated", input=name)
    return seconds


def make(context: Context) -> Made:
    """Write the table."""
    return write_table(context, *table())
