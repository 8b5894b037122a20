"""Factor statistics as messages: packed sums with their sample counts out, global sums in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kfac.collection import StatisticsCollector
from kfac.communication import Communicator
from kfac.curvature.packing import pack
from kfac.planning import Message, Plan

Received = dict[int, tuple[Tensor, float]]
"""Per factor its sum over all ranks (packed triangles, unless one is alone), and the count of samples or loss terms."""


class FactorExchange:
    """Packs a step's statistics into the Plan's messages and takes them out again.

    A message holds the packed triangles of its factors and, behind them, one count (of samples or loss terms) each.

    Args:
        plan: the Plan.
        collector: holds the statistics, per layer in the Plan's order.
        communicator: the ranks.
        like: a tensor of the factors' dtype, on their device.
    """

    def __init__(self, plan: Plan, collector: StatisticsCollector, communicator: Communicator, like: Tensor) -> None:
        self._plan, self._collector, self._communicator, self._like = plan, collector, communicator, like
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._local_sums: list[tuple[tuple[int, ...], Tensor]] = []

    def _parts(self, items: Sequence[int], buffer: Tensor) -> tuple[list[Tensor], Tensor]:
        """Views of a message's triangles and of its counts."""
        *triangles, counts = buffer.split([*(self._plan.factors[i].elements for i in items), len(items)])
        return triangles, counts

    def pack(self, items: Sequence[int]) -> Tensor:
        """The message of the factors ``items``; a factor without a statistic is zero, with no samples."""
        elements = sum(self._plan.factors[i].elements for i in items)
        buffer = self._like.new_empty(elements + len(items))
        triangles, counts = self._parts(items, buffer)
        samples: list[float | Tensor] = []
        for i, triangle in zip(items, triangles, strict=True):
            total, count = self._collector.take(self._plan.factors[i].side, i // 2)
            samples.append(count)
            if total is None:
                triangle.zero_()
            else:
                pack(total, triangle)
        self._local_sums.append((tuple(items), buffer[:elements].sum()))
        counts.copy_(_row(samples, buffer))
        return buffer

    @property
    def nothing(self) -> Tensor:
        """The message of a process that is alone."""
        return self._like.new_zeros(1)

    def local(self) -> Received:
        """The sums of this process alone, as ``[blocks, dim, dim]``; a factor without a statistic is zero."""
        taken = [self._collector.take(spec.side, i // 2) for i, spec in enumerate(self._plan.factors)]
        counts = _row([count for _, count in taken], self._like).tolist()
        totals = [
            self._like.new_zeros(spec.blocks, spec.dim, spec.dim) if total is None else total
            for spec, (total, _) in zip(self._plan.factors, taken, strict=True)
        ]
        return dict(enumerate(zip(totals, counts, strict=True)))

    def unpack(self, messages: Sequence[tuple[Message, Tensor]]) -> Received:
        """The factors of summed messages; waits once for the device."""
        if not messages:
            return {}
        samples = torch.cat([self._parts(message.items, buffer)[1] for message, buffer in messages]).tolist()
        items = [i for message, _ in messages for i in message.items]
        triangles = [t for message, buffer in messages for t in self._parts(message.items, buffer)[0]]
        return {i: (t, n) for i, t, n in zip(items, triangles, samples, strict=True)}

    def fault(self, received: Received) -> str | None:
        """What is not finite and on which ranks it came up, or None; collective where it is not None.

        All ranks hold the same sums, so that they agree on whether there is a fault.
        """
        if not received or bool(torch.isfinite(torch.stack([t.sum() for t, _ in received.values()])).all()):
            return None
        bad = {i for i, (triangle, _) in received.items() if not bool(torch.isfinite(triangle).all())}
        if not bad:
            return None  # finite entries whose sum overflows
        alone = self._communicator.world_size == 1
        guilty = alone or any(
            not bool(torch.isfinite(total)) for items, total in self._local_sums if bad.intersection(items)
        )
        ranks = [rank for rank, flag in enumerate(self._communicator.all_gather_object(guilty)) if flag]
        names = [f"{self._plan.factors[i].side} of {self._plan.factors[i].layer}" for i in sorted(bad)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        where = f"rank(s) {', '.join(map(str, ranks))}" if ranks else "the sum over the ranks (overflow)"
        return f"the statistics of {shown} are not finite on {where}"


def _row(counts: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Numbers, of which some may still be under way on the device, as one tensor."""
    if not any(isinstance(count, Tensor) for count in counts):
        return torch.tensor(counts)
    return torch.stack([torch.as_tensor(count, dtype=like.dtype, device=like.device) for count in counts])
