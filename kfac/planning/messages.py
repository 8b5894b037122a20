"""The sums over the ranks in an iteration: what is fused with what, and in which order messages leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kfac.planning.costs import Cost
from kfac.planning.family_fusion import OwnFamily, fuse_families
from kfac.planning.fusion import Groups, fusion_finish_s, plan_fusion
from kfac.planning.joint_fusion import Family, plan_joint_fusion
from kfac.planning.plan import FactorSpec, Message, MessageKind, Release
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.ready_times import ready_times
from kfac.planning.schedule_config import ScheduleConfig

GRADIENT_FUSION = {"none": "none", "threshold": "threshold", "greedy": "threshold"}
"""How gradients are fused under the rules that plan kinds one by one: the paper leaves them to Horovod's threshold."""


@dataclass(frozen=True)
class _Stream:
    """Everything of one kind that goes to the same ranks, in the order in which it becomes ready."""

    kind: MessageKind
    release: Release
    items: tuple[int, ...]
    ready_s: tuple[float, ...]
    elements: tuple[int, ...]
    root: int | None = None

    def message(self, group: Sequence[int]) -> Message:
        """The message of these places."""
        items, elements = tuple(self.items[k] for k in group), sum(self.elements[k] for k in group)
        return Message(self.kind, items, elements, self.release, self.root)

    def to(self, root: int | None, items: Sequence[int]) -> _Stream:
        """The part of these items, which goes to one rank, or to all."""
        places = [k for k, i in enumerate(self.items) if i in set(items)]
        return replace(
            self,
            items=tuple(self.items[k] for k in places),
            ready_s=tuple(self.ready_s[k] for k in places),
            elements=tuple(self.elements[k] for k in places),
            root=root,
        )


def plan_messages(
    schedule: ScheduleConfig,
    model: ModelProfile,
    factors: Sequence[FactorSpec],
    cluster: ClusterProfile,
    inverse_owner: Sequence[int | None] = (),
) -> tuple[Message, ...]:
    """All messages in the order in which they leave.

    First the A messages that leave in the forward pass; then G and gradient messages that leave in the backward pass,
    in the order in which their last item becomes ready; then what leaves after it: gradients, A, G. ``optimal`` plans
    all of them by one program for the channel that they share. Under the other rules each kind is fused by itself, with
    the channel taken as busy until the messages planned before it have arrived.

    Under ``reduce_to_owner`` the factors of every owner (``inverse_owner``, per factor) are kinds of their own, and all
    messages leave in the order in which they are ready.
    """
    # Where factors do not travel a rank has few statistics to compute: taken as none.
    local = schedule.factor_collective == "none"
    times = ready_times(model, curvature=schedule.curvature and not local)
    position = {layer.name: k for k, layer in enumerate(model.layers)}
    layer_of = [position[factor.layer] for factor in factors]
    last = len(model.layers) - 1

    def of_factors(kind: MessageKind, release: Release, ready_s: Sequence[float], order: int) -> _Stream:
        items = tuple(i for i, factor in enumerate(factors) if factor.side == kind)[::order]
        at = tuple(times.backward_end_s if release == "step" else ready_s[layer_of[i]] for i in items)
        return _Stream(kind, release, items, at, tuple(factors[i].elements for i in items))

    def of_gradients(release: Release) -> _Stream:
        items = tuple(range(last, -1, -1))
        at = tuple(times.backward_end_s if release == "step" else times.gradient_s[i] for i in items)
        return _Stream("gradient", release, items, at, tuple(model.layers[i].gradient_elements for i in items))

    factor_release: Release = "ready" if schedule.pipelining == "layerwise" else "step"
    a = of_factors("A", factor_release, times.a_s, 1)
    g = of_factors("G", factor_release, times.g_s, -1)  # as the backward pass produces them
    gradients = of_gradients("ready" if schedule.gradient_pipelining else "step")
    streams = [gradients, a, g] if factor_release == "step" else [a, g, gradients]
    if local:
        streams = [gradients]
    if schedule.factor_collective == "reduce_to_owner" and any(rank is not None for rank in inverse_owner):
        return _to_owners(streams, inverse_owner, schedule, cluster)
    in_one_pass = factor_release == gradients.release == "ready"
    if schedule.fusion == "optimal":
        groups = _together(streams, schedule, cluster)
    else:
        groups = _one_by_one(streams, in_one_pass, schedule, cluster)
    sent = [stream.message(group) for stream, of_stream in zip(streams, groups, strict=True) for group in of_stream]
    if not in_one_pass:
        return tuple(sent)

    def reached(message: Message) -> int:
        """Place in the backward pass (G of the last layer, its gradient, G of the layer before it, ...)."""
        item = message.items[-1]
        if message.kind == "gradient":
            return 2 * (last - item) + 1
        return 2 * (last - layer_of[item]) if message.kind == "G" else -1

    return tuple(sorted(sent, key=reached))


def _to_owners(
    streams: Sequence[_Stream],
    inverse_owner: Sequence[int | None],
    schedule: ScheduleConfig,
    cluster: ClusterProfile,
) -> tuple[Message, ...]:
    parts: list[_Stream] = []
    for stream in streams:
        owners: dict[int | None, list[int]] = {}
        for i in stream.items:
            owners.setdefault(None if stream.kind == "gradient" else inverse_owner[i], []).append(i)
        parts += [stream.to(root, items) for root, items in owners.items()]
    costs = [message_cost(part.kind, part.root, schedule, cluster) for part in parts]
    if schedule.fusion == "optimal":
        groups = fuse_families(
            [OwnFamily(part.ready_s, part.elements, cost) for part, cost in zip(parts, costs, strict=True)]
        )
    else:
        rules = [GRADIENT_FUSION[schedule.fusion] if part.kind == "gradient" else schedule.fusion for part in parts]
        groups = [
            plan_fusion(part.ready_s, part.elements, cost, rule, **_threshold(part.kind, schedule))
            for part, cost, rule in zip(parts, costs, rules, strict=True)
        ]
    sent = [
        (part.ready_s[group[-1]], part.message(group))
        for part, found in zip(parts, groups, strict=True)
        for group in found
    ]
    return tuple(message for _, message in sorted(sent, key=lambda pair: pair[0]))


def message_cost(kind: MessageKind, root: int | None, schedule: ScheduleConfig, cluster: ClusterProfile) -> Cost:
    """Seconds of a message as a function of its elements; half as many where two of them take the bytes of one."""
    cost = cluster.all_reduce if root is None else cluster.reduce
    if kind == "gradient" or schedule.message_dtype == "full":
        return cost
    return lambda elements: cost(elements / 2)


def _threshold(kind: MessageKind, schedule: ScheduleConfig) -> dict[str, int]:
    full = kind == "gradient" or schedule.message_dtype == "full"
    return {"threshold_bytes": schedule.threshold_bytes, "bytes_per_element": 4 if full else 2}


def _together(streams: Sequence[_Stream], schedule: ScheduleConfig, cluster: ClusterProfile) -> list[Groups]:
    """Per stream its groups, planned for the channel that all of them share.

    The program's order is by the moments at which messages may leave, and so is the order of the plan.
    """
    half = schedule.message_dtype != "full"
    families = [
        Family(
            stream.ready_s, [n / 2 for n in stream.elements] if half and stream.kind != "gradient" else stream.elements
        )
        for stream in streams
    ]
    sent = plan_joint_fusion(families, cluster.all_reduce)
    return [tuple(group for family, group in sent if family == k) for k in range(len(streams))]


def _one_by_one(
    streams: Sequence[_Stream], in_one_pass: bool, schedule: ScheduleConfig, cluster: ClusterProfile
) -> list[Groups]:
    """Per stream its groups, planned for a channel that is busy with the streams before it."""
    planned: list[Groups] = []
    busy_s = 0.0
    for number, stream in enumerate(streams):
        rule = GRADIENT_FUSION[schedule.fusion] if stream.kind == "gradient" else schedule.fusion
        # A busy channel is the same as items that become ready later.
        at = [max(ready, busy_s) for ready in stream.ready_s]
        cost = message_cost(stream.kind, None, schedule, cluster)
        planned.append(plan_fusion(at, stream.elements, cost, rule, **_threshold(stream.kind, schedule)))
        if number == 1 and in_one_pass:
            continue  # G and gradients are under way together: neither is planned behind the other
        busy_s = max(busy_s, fusion_finish_s(planned[-1], at, stream.elements, cost))
    return planned
