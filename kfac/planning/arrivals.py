"""When the sums of factors arrive, and the order in which to invert them then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kfac.planning.costs import Cost
from kfac.planning.plan import FactorSpec, Message
from kfac.planning.profiles import ModelProfile
from kfac.planning.ready_times import ready_times


class Arrivals(NamedTuple):
    """Seconds from the end of the backward pass, 0 for what is earlier.

    Args:
        there_s: per factor until both sums of its layer have arrived on every rank.
        channel_free_s: until all messages have.
    """

    there_s: tuple[float, ...]
    channel_free_s: float

    def waiting_s(self, invert_s: Sequence[float]) -> float:
        """Seconds that a rank which inverts everything, as it arrives, waits for sums."""
        now = 0.0
        for there, seconds in sorted(zip(self.there_s, invert_s, strict=True)):
            now = max(now, there) + seconds
        return now - sum(invert_s)


def plan_arrivals(
    messages: Sequence[Message], factors: Sequence[FactorSpec], model: ModelProfile, all_reduce: Cost
) -> Arrivals:
    """When an iteration's sums arrive if nothing else is sent.

    Args:
        messages: all of an iteration, in their order, each an all-reduce.
        factors: that they carry, ``A0 G0 A1 G1 ...``.
        model: seconds of the layers' work.
        all_reduce: seconds of a message as a function of its elements.
    """
    times = ready_times(model)
    position = {layer.name: k for k, layer in enumerate(model.layers)}
    of_side = {"A": times.a_s, "G": times.g_s}
    ready = [of_side[factor.side][position[factor.layer]] for factor in factors]
    arrived = [0.0] * len(factors)
    free = 0.0
    for message in messages:
        released = times.backward_end_s
        if message.release == "ready":
            of_items = times.gradient_s if message.kind == "gradient" else ready
            released = max(of_items[i] for i in message.items)
        free = max(free, released) + all_reduce(message.elements)
        for i in message.factors:
            arrived[i] = max(0.0, free - times.backward_end_s)
    there = tuple(max(arrived[i], arrived[i ^ 1]) for i in range(len(factors)))
    return Arrivals(there, max(0.0, free - times.backward_end_s))


def in_order_of_arrival(
    order: Sequence[int],
    arrived_s: Sequence[float],
    invert_s: Mapping[int, float],
    inverted_by: Mapping[int, float],
) -> tuple[int, ...]:
    """A sequence in which no rank waits for a sum while it has others to invert, as far as one clock can tell.

    Whenever a rank is free, the first factor of ``order`` that has arrived comes next; where none has, the first to
    arrive. One clock stands for all ranks: an inversion takes of it the share of the ranks that do it.

    Args:
        order: the factors in the best order if all of them were there.
        arrived_s: per factor when it is.
        invert_s: seconds of each factor's inversion.
        inverted_by: the share of the ranks that invert it.
    """
    waiting, now = list(order), 0.0
    sequence: list[int] = []
    while waiting:
        there = next((i for i in waiting if arrived_s[i] <= now), None)
        following = min(waiting, key=lambda i: arrived_s[i]) if there is None else there
        now = max(now, arrived_s[following]) + invert_s[following] * inverted_by[following]
        sequence.append(following)
        waiting.remove(following)
    return tuple(sequence)
