"""Ablation table: pipelining and load-balancing placement, each alone and both, published and simulated."""

from __future__ import annotations

from dataclasses import replace

from analysis.tables import Cell, Column, Table
from paper_figures import published, simulated
from paper_figures.interference import AS_RUN, SCHEDULES
from paper_figures.item import Context, Made, Provenance, write_table

NAME = "ablation"
CELLS = {
    "-Pipe-LBP": SCHEDULES["D-KFAC"],
    "+Pipe-LBP": replace(AS_RUN, placement="non_dist"),
    "-Pipe+LBP": replace(AS_RUN, pipelining="none", fusion="threshold"),
    "+Pipe+LBP": AS_RUN,
}
"""The schedule of each cell."""
SUMS = ("+Pipe-LBP", "-Pipe+LBP")
"""The cells that the paper's figure has as sums of other bars, not as measurements."""
COLUMNS = (
    Column("model", align="left"),
    *(
        Column(cell, ".4f", group=group)
        for group in ("published", "simulated with interference", "simulated ideally")
        for cell in CELLS
    ),
)


def table() -> tuple[Table, Provenance]:
    """Seconds of an iteration in all four cells."""
    provenance = Provenance(NAME)
    rows: list[tuple[Cell, ...]] = []
    for key in published.model_keys():
        row: list[Cell] = [published.model(key).name]
        for cell in CELLS:
            number = published.ablation_s(key, cell)
            provenance.add(f"{key}/published/{cell}", number.value, number.status, **number.origin())
            row.append(number.value)
        for fitted in (True, False):
            for cell, schedule in CELLS.items():
                seconds = simulated.simulated(key, schedule, fitted).iteration_s
                origin = simulated.add_input(provenance, key, cell, schedule, fitted)
                tag = "S" if fitted else "I"
                provenance.add(f"{key}/simulated/{cell} ({tag})", seconds, "simulated", input=origin)
                row.append(seconds)
        rows.append(tuple(row))
    notes = (
        "Seconds per iteration on 64 GPUs. Pipe: factors are sent layer by layer with fusion; LBP: load-balancing "
        "placement of inversions, else every rank inverts everything.",
        f"published: {' and '.join(SUMS)} are sums of other bars (to 0.0001 s), not measurements. All simulated cells "
        "are iterations of their own.",
        "simulated with interference: fitted to ResNet-50's MPD-KFAC and SPD-KFAC rows (paper_figures/"
        "interference.json); ideally: the profile paper64.",
    )
    return Table("Ablation on 64 GPUs [s], published and simulated", COLUMNS, tuple(rows), notes), provenance


def make(context: Context) -> Made:
    """Write the table."""
    return write_table(context, *table())
