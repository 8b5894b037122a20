"""The all-reduces of an iteration: what is fused with what, and in which order messages leave."""

from __future__ import annotations

from collections.abc import Sequence

from kfac.planning.fusion import fusion_finish_s, plan_fusion
from kfac.planning.plan import FactorSpec, Message, MessageKind, Release
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.planning.ready_times import ready_times
from kfac.planning.schedule_config import ScheduleConfig

GRADIENT_FUSION = {"none": "none", "threshold": "threshold", "greedy": "threshold", "optimal": "optimal"}
"""How gradients are fused under each rule for factors: the paper leaves them to Horovod's threshold fusion."""


def plan_messages(
    schedule: ScheduleConfig, model: ModelProfile, factors: Sequence[FactorSpec], cluster: ClusterProfile
) -> tuple[Message, ...]:
    """All messages in the order in which they leave.

    First the A messages that leave in the forward pass; then G and gradient messages that leave in the backward pass,
    in the order in which their last item becomes ready; then what leaves after it: gradients, A, G. Each kind is fused
    by itself, with the channel taken as busy until the messages planned before it have arrived.
    """
    times = ready_times(model, curvature=schedule.curvature)
    position = {layer.name: k for k, layer in enumerate(model.layers)}
    last = len(model.layers) - 1
    sides: dict[str, list[int]] = {"A": [], "G": []}
    for i, factor in enumerate(factors):
        sides[factor.side].append(i)
    sides["G"].reverse()  # as the backward pass produces them
    sizes = [factor.elements for factor in factors]
    gradients = [layer.gradient_elements for layer in model.layers]

    def messages(
        kind: MessageKind, release: Release, items: Sequence[int], ready: Sequence[float], busy_s: float
    ) -> tuple[list[Message], float]:
        """Messages of one kind, and when the channel is free after them."""
        rule = GRADIENT_FUSION[schedule.fusion] if kind == "gradient" else schedule.fusion
        elements = [gradients[i] if kind == "gradient" else sizes[i] for i in items]
        # A busy channel is the same as items that become ready later.
        at = [max(r, busy_s, times.backward_end_s if release == "step" else 0.0) for r in ready]
        groups = plan_fusion(at, elements, cluster.all_reduce, rule, threshold_bytes=schedule.threshold_bytes)
        end = max(busy_s, fusion_finish_s(groups, at, elements, cluster.all_reduce))
        return [_message(kind, release, items, elements, group) for group in groups], end

    factor_release: Release = "ready" if schedule.pipelining == "layerwise" else "step"
    gradient_release: Release = "ready" if schedule.gradient_pipelining else "step"
    gradient_items = list(range(last, -1, -1))
    gradient_ready = [times.gradient_s[i] for i in gradient_items]
    a_ready = [times.a_s[position[factors[i].layer]] for i in sides["A"]]
    g_ready = [times.g_s[position[factors[i].layer]] for i in sides["G"]]

    if factor_release == "step":
        grads, busy = messages("gradient", gradient_release, gradient_items, gradient_ready, 0.0)
        a, busy = messages("A", "step", sides["A"], a_ready, busy)
        g, _ = messages("G", "step", sides["G"], g_ready, busy)
        return (*grads, *a, *g)
    a, busy = messages("A", "ready", sides["A"], a_ready, 0.0)
    g, g_end = messages("G", "ready", sides["G"], g_ready, busy)
    if gradient_release == "step":
        grads, _ = messages("gradient", "step", gradient_items, gradient_ready, g_end)
        return (*a, *g, *grads)
    grads, _ = messages("gradient", "ready", gradient_items, gradient_ready, busy)

    def reached(message: Message) -> int:
        """Place in the backward pass (G of the last layer, its gradient, G of the layer before it, ...)."""
        item = message.items[-1]
        if message.kind == "G":
            return 2 * (last - position[factors[item].layer])
        return 2 * (last - item) + 1

    return (*a, *sorted([*g, *grads], key=reached))


def _message(
    kind: MessageKind, release: Release, items: Sequence[int], elements: Sequence[int], group: Sequence[int]
) -> Message:
    return Message(kind, tuple(items[k] for k in group), sum(elements[k] for k in group), release)
