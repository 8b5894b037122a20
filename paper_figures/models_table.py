"""Models table: parameters, layers, batch size, and the elements of all factors of the paper's four models."""

from __future__ import annotations

from analysis.tables import Cell, Column, Table
from paper_figures import published
from paper_figures.item import Context, Made, Provenance, write_table
from paper_figures.paper_cluster import architectures

NAME = "models"

COLUMNS = (
    Column("model", align="left"),
    Column("parameters", ","),
    Column("layers", "d"),
    Column("factors", "d"),
    Column("batch/GPU", "d"),
    Column("A elements", ","),
    Column("G elements", ","),
    Column("largest A", "d"),
    Column("largest G", "d"),
)


def _triangle(dim: int) -> int:
    return dim * (dim + 1) // 2


def table() -> tuple[Table, Provenance]:
    """Counts traced from the architectures; the batch size is the paper's."""
    provenance = Provenance(NAME)
    provenance.inputs["architectures"] = {
        "file": "paper_figures/architectures.json",
        "made_by": "python -m experiments.architectures",
    }
    rows: list[tuple[Cell, ...]] = []
    for key in published.model_keys():
        model, traced = published.model(key), architectures()[key]
        a = [layer["a_dim"] for layer in traced["layers"]]
        g = [layer["g_dim"] for layer in traced["layers"]]
        counts = (traced["parameters"], len(a), 2 * len(a))
        sizes = (sum(map(_triangle, a)), sum(map(_triangle, g)), max(a), max(g))
        row = (model.name, *counts, model.batch_size, *sizes)
        rows.append(row)
        for column, value in zip(COLUMNS[1:], row[1:], strict=True):
            path = f"{key}/{column.title}"
            if column.title == "batch/GPU":
                source = published.load()["models"][key]["source_batch"]
                provenance.add(path, value, "published", source=source)
            else:
                provenance.add(path, value, "traced", input="architectures")
    notes = (
        "Layers: Conv2d and Linear. Elements: triangles with the diagonal, d(d+1)/2 of each d x d factor, which is "
        "what travels. Counted from the architectures; batch sizes are the paper's.",
    )
    return Table("The paper's models, at 224 x 224 pixels and 1000 classes", COLUMNS, tuple(rows), notes), provenance


def make(context: Context) -> Made:
    """Write the table."""
    return write_table(context, *table())
