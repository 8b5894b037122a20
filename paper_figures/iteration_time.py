"""Iteration-time table: the three algorithms and both speed-ups on 64 GPUs, published and simulated."""

from __future__ import annotations

from analysis.tables import Cell, Column, Table
from kfac.planning import ScheduleConfig
from paper_figures import interference, published, simulated
from paper_figures.item import Context, Made, Provenance, write_table

NAME = "iteration_time"
SPEEDUPS = {"SP1": "D-KFAC", "SP2": "MPD-KFAC"}
"""The paper's two speed-ups of SPD-KFAC, and over what."""
AS_RUN = f"SPD-KFAC, d<{published.lbp_threshold_dim()}"

COLUMNS = (
    Column("model", align="left"),
    *(
        column
        for tag in ("published", "simulated")
        for column in (
            *(Column(algorithm, ".4f", group=tag) for algorithm in published.ALGORITHMS),
            *(Column(name, ".2f", group=tag) for name in SPEEDUPS),
        )
    ),
    Column(AS_RUN, ".4f", group="simulated"),
)


def table() -> tuple[Table, Provenance]:
    """Seconds of one iteration; the tags of the columns are never mixed in one."""
    provenance = Provenance(NAME)
    cluster = simulated.cluster().provenance
    explained = [1.0 / ratio for ratio in cluster["all_reduce"]["published_over_constants"].values()]
    rows = tuple(_row(key, provenance) for key in published.model_keys())
    notes = (
        "Seconds per iteration. SP1 = D-KFAC / SPD-KFAC, SP2 = MPD-KFAC / SPD-KFAC.",
        "published: the values of the paper's figure; the speed-ups are their ratios. Which of the paper's SP1 and SP2 "
        "is which is inferred.",
        "simulated: kfac.simulation on profiles derived from other published numbers (paper64). Computing and "
        "communication do not slow each other down there, so more is hidden than in the paper's runs; and the "
        f"all-reduce constants of the authors' code, which it uses, explain {min(explained):.0%} to "
        f"{max(explained):.0%} of the published D-KFAC FactorComm. {simulated.PRECONDITIONING}",
        f"{AS_RUN}: with the dimension threshold that the paper's runs had in place of the cost rule.",
    )
    return Table("Iteration time on 64 GPUs [s], published and simulated", COLUMNS, rows, notes), provenance


def _row(key: str, provenance: Provenance) -> tuple[Cell, ...]:
    of_paper_s, of_simulation_s = {}, {}
    for algorithm in published.ALGORITHMS:
        number = published.iteration_s(key, algorithm)
        of_paper_s[algorithm] = number.value
        provenance.add(f"{key}/published/{algorithm}", number.value, number.status, **number.origin())
        of_simulation_s[algorithm] = _simulate(key, algorithm, simulated.SCHEDULES[algorithm], provenance)
    row: list[Cell] = [published.model(key).name]
    for tag, seconds_of in (("published", of_paper_s), ("simulated", of_simulation_s)):
        row += seconds_of.values()
        for name, over in SPEEDUPS.items():
            ratio = seconds_of[over] / seconds_of["SPD-KFAC"]
            row.append(ratio)
            provenance.add(f"{key}/{tag}/{name}", ratio, tag, ratio_of=[f"{key}/{tag}/{a}" for a in (over, "SPD-KFAC")])
    return (*row, _simulate(key, AS_RUN, interference.AS_RUN, provenance))


def _simulate(key: str, algorithm: str, schedule: ScheduleConfig, provenance: Provenance) -> float:
    seconds = simulated.simulated(key, schedule).iteration_s
    name = simulated.add_input(provenance, key, algorithm, schedule)
    provenance.add(f"{key}/simulated/{algorithm}", seconds, "simulated", input=name)
    return seconds


def make(context: Context) -> Made:
    """Write the table."""
    return write_table(context, *table())
