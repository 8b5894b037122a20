"""What is measured. Every part gives rows with units in their keys, the cheapest sizes first.

``fraction`` is the roofline's: the least time that the operations take at the highest rate of a product of matrices
measured here, or that their bytes take at the highest rate of a copy measured here, whichever is longer, as a share of
the measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import Action, Timer, precision
from kfac.curvature.inverses import begin_inverse, damped_inverse, eigendecomposition, inverse_from_eigen
from kfac.curvature.packing import packed_elements
from kfac.curvature.statistics import add_moment, add_moments

Row = dict[str, Any]
FLOAT_BYTES = 4
DAMPING = 1e-2


@dataclass(frozen=True)
class Sizes:
    """How large things are.

    Args:
        dims: dimensions of factors.
        rows: of the matrix that a statistic is of: samples times positions.
        batch: equal factors that are taken together.
        streams: at once.
        gemm_dims: of square products that give the highest rate.
        copy_elements: of copies that give the highest rate.
    """

    dims: tuple[int, ...] = (64, 128, 256, 512, 576, 1024, 1152, 2048, 2304, 4096, 4608)
    rows: int = 8192
    batch: int = 8
    streams: int = 4
    gemm_dims: tuple[int, ...] = (1024, 2048, 4096, 8192)
    copy_elements: tuple[int, ...] = (2**18, 2**20, 2**22, 2**24, 2**26, 2**28)


QUICK = Sizes((16, 32, 64), 128, 2, 2, (64, 256), (2**12, 2**16))
"""Seconds on one core; no measurement."""


@dataclass(frozen=True)
class Peaks:
    """The roofline.

    Args:
        flop_per_s: of products, by precision.
        bytes_per_s: read and written by a copy.
    """

    flop_per_s: Mapping[str, float]
    bytes_per_s: float

    def fraction(self, seconds: float, flop: float, moved_bytes: float, precision: str = "float32") -> float:
        """See the module."""
        return max(flop / self.flop_per_s[precision], moved_bytes / self.bytes_per_s) / seconds


# ---------------------------------------------------------------------- the roofline


def products(timer: Timer, sizes: Sizes) -> Iterator[Row]:
    """Square products of matrices."""
    for name in timer.precisions:
        for dim in sizes.gemm_dims:
            a, b = (torch.randn(dim, dim, device=timer.device) for _ in range(2))
            out = torch.empty_like(a)
            with precision(name):
                seconds = timer.seconds(partial(torch.mm, a, b, out=out))
            yield {"precision": name, "dim": dim, "seconds": seconds, "flop_per_s": 2 * dim**3 / seconds}


def copies(timer: Timer, sizes: Sizes) -> Iterator[Row]:
    """Copies within the device, and to and from the host."""
    for elements in sizes.copy_elements:
        here, there = (torch.zeros(elements, device=timer.device) for _ in range(2))
        host = timer.host_buffer(elements)
        pairs = {"device": (there, here), "to host": (host, here), "from host": (here, host)}
        for kind, (target, source) in pairs.items():
            seconds = timer.seconds(partial(target.copy_, source, non_blocking=True))
            crossings = 2 if kind == "device" else 1
            rate = crossings * FLOAT_BYTES * elements / seconds
            yield {"kind": kind, "elements": elements, "seconds": seconds, "bytes_per_s": rate}


def peaks(products: list[Row], copies: list[Row]) -> Peaks:
    """The highest rates."""
    names = {row["precision"] for row in products}
    return Peaks(
        {name: max(row["flop_per_s"] for row in products if row["precision"] == name) for name in names},
        max(row["bytes_per_s"] for row in copies if row["kind"] == "device"),
    )


# ---------------------------------------------------------------------- by dimension


SLOW_S = 0.25
"""What takes so long fills the device alone: it is not measured several at a time."""


def _by_way(
    timer: Timer, sizes: Sizes, each: Sequence[Action], batched: Action, begun: Sequence[Action] = ()
) -> Iterator[tuple[str, str, float]]:
    """Precision, way and seconds of each: one alone, several in one batched call, in turn, and on several streams.

    ``begun``: on streams these instead, which issue the work and return what waits for its result.
    """
    ways = {
        "single": each[0],
        "batched": batched,
        "in turn": timer.together(each, 1),
        "streams": timer.together(begun or each, sizes.streams),
    }
    for name in timer.precisions:
        for way, action in ways.items():
            with precision(name):
                seconds = timer.seconds(action)
            yield name, way, seconds if way == "single" else seconds / len(each)
            if way == "single" and (seconds > SLOW_S or name != timer.precisions[0]):
                break


def statistics(timer: Timer, sizes: Sizes, roofline: Peaks) -> Iterator[Row]:
    """Sums of x x^T over the rows of a matrix, as the library adds them up."""
    for dim in sizes.dims:
        rows = torch.randn(sizes.batch, sizes.rows, dim, device=timer.device)
        totals = torch.zeros(sizes.batch, dim, dim, device=timer.device)
        each = [partial(add_moment, x, total, 1.0) for x, total in zip(rows, totals, strict=True)]
        flop = sizes.rows * dim * (dim + 1)  # of the upper triangle alone, a multiplication and an addition each
        moved = FLOAT_BYTES * (sizes.rows * dim + 2 * packed_elements(dim))
        for name, way, seconds in _by_way(timer, sizes, each, partial(add_moments, rows, totals, 1.0)):
            yield {
                "dim": dim,
                "rows": sizes.rows,
                "precision": name,
                "way": way,
                **_rates(roofline, seconds, flop, moved, name),
            }


def _rates(roofline: Peaks, seconds: float, flop: float, moved_bytes: float, precision: str) -> Row:
    fraction = roofline.fraction(seconds, flop, moved_bytes, precision)
    return {"seconds": seconds, "flop_per_s": flop / seconds, "fraction": fraction}


def _by_eigen(factor: Tensor) -> Tensor | None:
    parts = eigendecomposition(factor)
    return None if parts is None else inverse_from_eigen(*parts, DAMPING)


INVERSES: Mapping[str, tuple[Callable[[Tensor], Tensor | None], float]] = {
    "cholesky": (lambda factor: damped_inverse(factor, DAMPING), 1.0),
    "eigh": (_by_eigen, 16 / 3),
}
"""By method: how, and floating-point operations over d^3. Cholesky: 1/3 for the factor, 2/3 for the inverse. eigh: 4/3
to reduce the matrix to a tridiagonal one, 2 to take its eigenvectors back and 2 for the product that makes the inverse;
the eigenvectors of the tridiagonal matrix are not counted, because deflation may make them cheap."""


def inverses(timer: Timer, sizes: Sizes, roofline: Peaks) -> Iterator[Row]:
    """Inverses of damped factors, with all that the library does to be sure of them."""
    for dim in sizes.dims:
        data = torch.randn(sizes.batch, dim, dim, device=timer.device)
        factors = data @ data.mT / dim
        for method, (invert, operations) in INVERSES.items():
            each = [partial(invert, factor[None]) for factor in factors]
            flop, moved = operations * dim**3, FLOAT_BYTES * 2 * dim**2
            begun = (
                [partial(begin_inverse, factor[None], DAMPING) for factor in factors] if method == "cholesky" else ()
            )
            for name, way, seconds in _by_way(timer, sizes, each, partial(invert, factors), begun):
                rates = _rates(roofline, seconds, flop, moved, name)
                yield {"dim": dim, "method": method, "precision": name, "way": way, **rates}


# ---------------------------------------------------------------------- beside copies


def beside_copies(timer: Timer, sizes: Sizes) -> Iterator[Row]:
    """Products and inverses alone, and while memory is copied: within the device, or to the host, as messages are."""
    dim, elements = sizes.dims[-1], sizes.copy_elements[-1]
    square = torch.randn(dim, dim, device=timer.device)
    factor, out = (square @ square.T / dim)[None], torch.empty_like(square)
    here, there = (torch.zeros(elements, device=timer.device) for _ in range(2))
    host = timer.host_buffer(elements)
    work: dict[str, Action] = {
        "product": lambda: torch.mm(square, square, out=out),
        "inverse": lambda: damped_inverse(factor, DAMPING),
    }
    traffic: dict[str, Action] = {
        "device": lambda: there.copy_(here),
        "to host": lambda: host.copy_(here, non_blocking=True),
    }
    for what, action in work.items():
        alone_s = timer.seconds(action)
        for kind, copy in traffic.items():
            beside_s = timer.seconds_beside(action, copy)
            yield {
                "work": what,
                "dim": dim,
                "copies": kind,
                "alone_s": alone_s,
                "beside_s": beside_s,
                "slowdown": beside_s / alone_s,
            }
