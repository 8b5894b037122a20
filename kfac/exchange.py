"""Factor statistics as messages: packed sums with their sample counts out, global sums in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfac.collection import StatisticsCollector
from kfac.communication import Communicator
from kfac.curvature.packing import pack
from kfac.planning import Message, Plan
from kfac.streams import on_device, used_here


@dataclass(frozen=True, slots=True)
class Sums:
    """What a step's statistics of one factor come to.

    Args:
        total: the sum over all ranks (packed triangles, unless one is alone); None where only another rank has it.
        count: of samples or loss terms.
        trace: of the sum, where it travels beside it.
    """

    total: Tensor | None
    count: float
    trace: float | None = None


Received = dict[int, Sums]
"""By factor."""


class FactorExchange:
    """Packs a step's statistics into the Plan's messages and takes them out again.

    A message holds the packed triangles of its factors and, behind them, one count (of samples or loss terms) each.
    Where the Plan has a summary, because not every rank gets all sums in full, counts and traces travel in it instead:
    what every rank must know. As a sum of squares is finite only if all its entries are (Cauchy-Schwarz), the trace
    also says whether the sum is.

    Args:
        plan: the Plan.
        collector: holds the statistics, per layer in the Plan's order.
        communicator: the ranks.
        like: a tensor of the factors' dtype, on their device.
    """

    def __init__(self, plan: Plan, collector: StatisticsCollector, communicator: Communicator, like: Tensor) -> None:
        self._plan, self._collector, self._communicator, self._like = plan, collector, communicator, like
        self._dtype = like.dtype if plan.schedule.message_dtype == "full" else torch.bfloat16
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._local_sums: list[tuple[tuple[int, ...], Tensor]] = []
        self._local: dict[int, tuple[float | Tensor, Tensor]] = {}
        self._kept: dict[int, Tensor] = {}
        self._bad: set[int] = set()

    def _parts(self, items: Sequence[int], buffer: Tensor) -> tuple[list[Tensor], Tensor]:
        """Views of a message's triangles and of its counts."""
        counts = 0 if self._plan.summarised else len(items)
        *triangles, rest = buffer.split([*(self._plan.factors[i].elements for i in items), counts])
        return triangles, rest

    def pack(self, items: Sequence[int]) -> Tensor:
        """The message of the factors ``items``; a factor without a statistic is zero, with no samples."""
        summarised = self._plan.summarised
        elements = sum(self._plan.factors[i].elements for i in items)
        buffer = self._like.new_empty(elements + (0 if summarised else len(items)), dtype=self._dtype)
        triangles, counts = self._parts(items, buffer)
        samples: list[float | Tensor] = []
        for i, triangle in zip(items, triangles, strict=True):
            total, count = self._collector.take(self._plan.factors[i].side, i // 2)
            samples.append(count)
            if summarised:
                self._local[i] = count, self._trace(total)
            if total is None:
                triangle.zero_()
            else:
                pack(total, triangle)
                used_here(total)
        if not summarised:
            self._local_sums.append((tuple(items), buffer[:elements].sum()))
            counts.copy_(_row(samples, buffer))
        return buffer

    def _trace(self, total: Tensor | None) -> Tensor:
        return self._like.new_zeros(()) if total is None else total.diagonal(dim1=1, dim2=2).sum()

    def summary(self) -> Tensor:
        """Counts of all factors and then their traces, of this rank; where factors do not travel, of those it owns."""
        if self._plan.schedule.factor_collective == "none":
            self._keep()
        zero = self._like.new_zeros(())
        local = [self._local.get(i, (0.0, zero)) for i in range(len(self._plan.factors))]
        traces = torch.stack([trace for _, trace in local])
        return torch.cat([_row([count for count, _ in local], traces), traces])

    def _keep(self) -> None:
        """Take the statistics that this rank uses alone; the others are dropped."""
        for i, spec in enumerate(self._plan.factors):
            total, count = self._collector.take(spec.side, i // 2)
            if self._plan.inverse_owner[i] != self._communicator.rank:
                continue
            self._local[i] = count, self._trace(total)
            if total is not None:
                self._kept[i] = total.new_empty(spec.elements)
                pack(total, self._kept[i])
                used_here(total)

    @property
    def nothing(self) -> Tensor:
        """The message of a process that is alone."""
        return self._like.new_zeros(1)

    def local(self) -> Received:
        """The sums of this process alone, as ``[blocks, dim, dim]``; a factor without a statistic is zero."""
        taken = [self._collector.take(spec.side, i // 2) for i, spec in enumerate(self._plan.factors)]
        totals = [
            self._like.new_zeros(spec.blocks, spec.dim, spec.dim) if total is None else total
            for spec, (total, _) in zip(self._plan.factors, taken, strict=True)
        ]
        return self._checked(range(len(totals)), totals, _row([count for _, count in taken], self._like))

    def unpack(self, messages: Sequence[tuple[Message, Tensor]], summary: Tensor | None = None) -> Received:
        """The factors of summed messages and, where there is one, of the summed summary; waits once for the device."""
        if summary is not None:
            return self._summarised(messages, summary)
        if not messages:
            return {}
        counts = torch.cat([self._parts(message.items, buffer)[1] for message, buffer in messages])
        items = [i for message, _ in messages for i in message.items]
        triangles = [t for message, buffer in messages for t in self._parts(message.items, buffer)[0]]
        return self._checked(items, triangles, counts)

    def _checked(self, items: Sequence[int], totals: Sequence[Tensor], counts: Tensor) -> Received:
        """Sums and their counts, having noted which are not finite."""
        sums = torch.stack([total.sum() for total in totals])
        numbers = torch.cat([counts.to(sums), sums]).tolist()
        for i, total, checksum in zip(items, totals, numbers[len(items) :], strict=True):
            # Finite entries may have a sum that overflows.
            if not math.isfinite(checksum) and not bool(torch.isfinite(total).all()):
                self._bad.add(i)
        return {i: Sums(total, n) for i, total, n in zip(items, totals, numbers, strict=False)}

    def _summarised(self, messages: Sequence[tuple[Message, Tensor]], summary: Tensor) -> Received:
        totals = self._kept
        for total in totals.values():
            used_here(total)
        for message, buffer in messages:
            if message.root in (None, self._communicator.rank):
                triangles, _ = self._parts(message.items, buffer.to(self._like.dtype))
                totals.update(zip(message.items, triangles, strict=True))
        numbers = summary.tolist()
        count = len(self._plan.factors)
        # What is finite here may overflow on the wire, as a float64 in bfloat16; half, since sums are rounded there.
        limit = torch.finfo(self._dtype).max / 2
        self._bad.update(i for i in range(count) if not abs(numbers[count + i]) < limit)
        return {i: Sums(totals.pop(i, None), numbers[i], numbers[count + i]) for i in range(count)}

    def fault(self) -> str | None:
        """What of the step's sums is not finite and on which ranks it came up, or None; collective where it is not
        None.

        All ranks hold the same sums, so that they agree on whether there is a fault.
        """
        bad = self._bad
        if not bad:
            return None
        if self._plan.summarised:
            locally = [self._local[i][1] for i in bad if i in self._local]
        else:
            locally = [total for items, total in self._local_sums if bad.intersection(items)]
        alone = self._communicator.world_size == 1
        guilty = alone or any(not bool(torch.isfinite(total)) for total in locally)
        ranks = [rank for rank, flag in enumerate(self._communicator.all_gather_object(guilty)) if flag]
        names = [f"{self._plan.factors[i].side} of {self._plan.factors[i].layer}" for i in sorted(bad)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        name = str(self._dtype).removeprefix("torch.")
        where = f"rank(s) {', '.join(map(str, ranks))}" if ranks else f"the sum over the ranks (overflow of {name})"
        return f"the statistics of {shown} are not finite on {where}"


def _row(counts: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Numbers, of which some may still be under way on the device, as one tensor."""
    known = [count for count in counts if not isinstance(count, Tensor)]
    if len(known) == len(counts):
        return on_device(known, like)
    return torch.stack([count.to(like) if isinstance(count, Tensor) else like.new_full((), count) for count in counts])
