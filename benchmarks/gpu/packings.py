"""Ways to write the upper triangles of symmetric matrices ``[count, d, d]`` into ``count d (d + 1) / 2`` elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.parts import FLOAT_BYTES, Peaks, Row, Sizes
from benchmarks.gpu.timing import Timer
from kfac.curvature.packing import pack, packed_elements

Packing = Callable[[Tensor, Tensor], object]


def gather(dim: int, device: torch.device) -> Packing:
    """By an index of every element, made once."""
    row, column = torch.triu_indices(dim, dim, device=device)
    index = row * dim + column
    return lambda matrices, out: torch.index_select(matrices.view(-1), 0, index, out=out)


def slices(dim: int, device: torch.device) -> Packing:
    """Row by row."""

    def run(matrices: Tensor, out: Tensor) -> None:
        for row, part in enumerate(out.split([dim - row for row in range(dim)])):
            part.copy_(matrices[0, row, row:])

    return run


def folded_rows(dim: int, device: torch.device) -> Packing:
    """Rows i and n - 1 - i share a row of a rectangle, all equally long; an odd n has a middle one."""
    half = dim // 2

    def run(matrices: Tensor, out: Tensor) -> None:
        matrix = matrices[0]
        rectangle = out[: half * (dim + 1)].view(half, dim + 1)
        rectangle[:, 0].zero_()
        rectangle[:, 1:].copy_(torch.triu(matrix[:half]))
        rectangle[:, :half].add_(torch.tril(matrix[dim - half :, dim - half :].flip(0, 1)))
        if dim % 2:
            out[half * (dim + 1) :].copy_(matrix[half, half:])

    return run


def two_in_a_square(dim: int, device: torch.device) -> Packing:
    """One triangle above and one below a diagonal."""

    def run(matrices: Tensor, out: Tensor) -> None:
        square = out.view(dim, dim + 1)
        square[:, 0].zero_()
        square[:, 1:].copy_(torch.triu(matrices[0]))
        square[:, :dim].add_(torch.triu(matrices[1]).T)

    return run


def quarters(dim: int, device: torch.device) -> Packing:
    """As the library does: a rectangle, and two small triangles folded into another."""
    return pack


PACKINGS: Mapping[str, tuple[Callable[[int, torch.device], Packing], int]] = {
    "index gather": (gather, 1),
    "row slices": (slices, 1),
    "folded rows": (folded_rows, 1),
    "two in a square": (two_in_a_square, 2),
    "library": (quarters, 1),
}
"""By name: how, and how many matrices at a time."""


def packing(timer: Timer, sizes: Sizes, roofline: Peaks) -> Iterator[Row]:
    """Seconds per matrix; the least bytes are those of its triangle, read once and written once."""
    for dim in sizes.dims:
        elements = packed_elements(dim)
        for name, (make, count) in PACKINGS.items():
            matrices = torch.randn(count, dim, dim, device=timer.device)
            out, run = torch.empty(count * elements, device=timer.device), make(dim, timer.device)
            seconds = timer.seconds(partial(run, matrices, out)) / count
            moved = 2 * FLOAT_BYTES * elements
            yield {
                "dim": dim,
                "packing": name,
                "seconds": seconds,
                "bytes_per_s": moved / seconds,
                "fraction": roofline.fraction(seconds, 0.0, moved),
            }
