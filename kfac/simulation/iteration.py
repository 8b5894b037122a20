"""One iteration of a Plan as a task graph, executed on cost models.

The graph is what the engine does: statistics in the forward and backward hooks whatever the pipelining, all-reduces in
the plan's order on one channel, then in ``step`` the inversions and broadcasts, and preconditioning on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kfac.planning.costs import checked_cost, inverse_dim
from kfac.planning.plan import Plan
from kfac.planning.profiles import ClusterProfile, ModelProfile
from kfac.simulation.events import Task, run_tasks
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, Span, Timeline

_CHANNEL = "channel"
_EVERY_RANK = -1
"""In place of a rank: all ranks do this at the same time."""


def simulate(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Timeline:
    """The timeline of one iteration in which all curvature work is due.

    Collectives start when every rank has reached them, the one before has left the channel, and what they carry is
    there. Ranks that own no factor do the same: the lowest of them stands for all. The optimizer's update is no span;
    it is part of :attr:`Timeline.total_s`.

    Args:
        plan: what every rank does.
        model: seconds of the layers' work.
        cluster: seconds of collectives and inversions; its world size gives way to the plan's.

    Raises:
        ValueError: if the plan is for another model, naming the first difference, or a cost is no number of seconds.
    """
    graph, times = _run(plan, model, cluster)
    of_rank: dict[int, list[tuple[_Label, float, float]]] = {rank: [] for rank in (_EVERY_RANK, *graph.lanes)}
    for (start, end), label in zip(times, graph.labels, strict=True):
        if label is not None:
            of_rank[label.rank].append((label, start, end))
    spans = [
        Span(rank, label.lane, label.kind, label.name, start, end)
        for rank in graph.lanes
        for label, start, end in (*of_rank[_EVERY_RANK], *of_rank[rank])
    ]
    return Timeline(tuple(spans), graph.lanes, _iteration_s(times, model), "simulated")


def simulated_iteration_s(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> float:
    """:attr:`Timeline.iteration_s` of :func:`simulate`, without making a timeline: quicker where lanes are many."""
    return _iteration_s(_run(plan, model, cluster)[1], model)


def _run(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> tuple[_Graph, list[tuple[float, float]]]:
    """The task graph, and start and end of every task."""
    plan.check_model(model)
    graph = _Graph(plan, model, cluster.at(plan.world_size))
    graph.build()
    return graph, run_tasks(graph.tasks, graph.resources)


def _iteration_s(times: list[tuple[float, float]], model: ModelProfile) -> float:
    return max((end for _, end in times), default=0.0) + model.update_s


def lane_counts(plan: Plan) -> dict[int, int]:
    """Ranks that need lanes of their own, and how many ranks each stands for."""
    owners = sorted({rank for rank in plan.inverse_owner if rank is not None})
    lanes = dict.fromkeys(owners, 1)
    if len(owners) < plan.world_size:
        lowest = next(rank for rank in range(plan.world_size) if rank not in lanes)
        lanes[lowest] = plan.world_size - len(owners)
    return dict(sorted(lanes.items()))


@dataclass(frozen=True)
class _Label:
    rank: int
    lane: str
    kind: str
    name: str


@dataclass
class _Graph:
    plan: Plan
    model: ModelProfile
    cluster: ClusterProfile
    tasks: list[Task] = field(default_factory=list)
    labels: list[_Label | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lanes = lane_counts(self.plan)
        # Up to the inversions all ranks do the same at the same time: one lane serves for all of them.
        self.resources = {_CHANNEL, *((COMPUTE_LANE, rank) for rank in (_EVERY_RANK, *self.lanes))}
        self.all_reduce = checked_cost("all_reduce", self.cluster.all_reduce)
        self.broadcast = checked_cost("broadcast", self.cluster.broadcast)
        self.inverse = checked_cost("inverse", self.cluster.inverse)
        self.factor_index = {(f.layer, f.side): i for i, f in enumerate(self.plan.factors)}

    def build(self) -> None:
        factor_ready, gradient_ready, backward_end = self._passes()
        arrived = self._messages(factor_ready, gradient_ready, backward_end)
        step = self._add(None, 0.0, after=(backward_end, *arrived))
        if self.plan.schedule.curvature:
            self._precondition(*self._inverses(step))

    def _passes(self) -> tuple[dict[int, int], list[int], int]:
        """Forward and backward; the tasks after which each factor and each layer's gradients are ready, and the end."""
        factors: dict[int, int] = {}
        gradients = [0] * len(self.model.layers)
        for layer in self.model.layers:
            self._compute("FF", layer.name, layer.forward_s)
            if (layer.name, "A") in self.factor_index:
                ready = self._compute("FactorComp", f"A {layer.name}", layer.a_statistics_s)
                factors[self.factor_index[layer.name, "A"]] = ready
        last = self._compute("BP", "loss", self.model.loss_s)
        for position, layer in reversed(list(enumerate(self.model.layers))):
            if (layer.name, "G") in self.factor_index:
                ready = self._compute("FactorComp", f"G {layer.name}", layer.g_statistics_s)
                factors[self.factor_index[layer.name, "G"]] = ready
            last = gradients[position] = self._compute("BP", layer.name, layer.backward_s)
        return factors, gradients, last

    def _messages(self, factors: dict[int, int], gradients: list[int], backward_end: int) -> list[int]:
        if self.plan.world_size == 1:
            return []
        sent = []
        for number, message in enumerate(self.plan.messages):
            source = gradients if message.kind == "gradient" else factors
            after = tuple(source[i] for i in message.items) if message.release == "ready" else (backward_end,)
            kind = "GradComm" if message.kind == "gradient" else "FactorComm"
            cost = self.all_reduce(message.elements)
            name = f"{message.kind} message {number} ({len(message.items)} items)"  # as the engine's recorder names it
            sent.append(self._communicate(kind, name, cost, after))
        return sent

    def _inverses(self, step: int) -> tuple[int, bool]:
        """Inversions and broadcasts; the task after which preconditioning may begin, and whether all ranks begin then.

        Every rank walks the whole sequence, so it reaches a broadcast after everything that it inverts before it.
        """
        reached: dict[int, int] = {}  # per rank its last inversion since the last broadcast
        at_end: list[int] = []
        broadcasts: list[tuple[int, str]] = []
        for i in self.plan.inverse_sequence:
            factor, owner = self.plan.factors[i], self.plan.inverse_owner[i]
            name = f"{factor.side} of {factor.layer}"
            invert_s = self.inverse(inverse_dim(factor.size))
            for rank in self.lanes if owner is None else (owner,):
                reached[rank] = self._compute("InverseComp", f"invert {name}", invert_s, rank, (step,))
            if owner is not None and self.plan.world_size > 1:
                if self.plan.schedule.inverse_broadcast == "as_ready":
                    at_end.append(self._broadcast(factor.elements, name, tuple(reached.values())))
                    reached.clear()
                else:
                    broadcasts.append((factor.elements, name))
        for elements, name in broadcasts:
            at_end.append(self._broadcast(elements, name, tuple(reached.values())))
            reached.clear()
        return self._add(None, 0.0, after=(step, *at_end)), not reached

    def _precondition(self, after: int, together: bool) -> None:
        """On every rank, at its own pace after inversions that no broadcast has waited for."""
        for rank in (_EVERY_RANK,) if together else self.lanes:
            waits: tuple[int, ...] = (after,)
            for layer in self.model.layers:
                if (layer.name, "A") in self.factor_index:
                    self._compute("Precondition", layer.name, layer.precondition_s, rank, waits)
                    waits = ()  # the lane's own order carries the rest

    def _broadcast(self, elements: int, name: str, after: tuple[int, ...]) -> int:
        return self._communicate("InverseComm", f"inverse of {name}", self.broadcast(elements), after)

    def _communicate(self, kind: str, name: str, duration_s: float, after: tuple[int, ...]) -> int:
        label = _Label(_EVERY_RANK, COMMUNICATION_LANE, kind, name)
        return self._add(label, duration_s, (_CHANNEL,), after)

    def _compute(
        self, kind: str, name: str, duration_s: float, rank: int = _EVERY_RANK, after: tuple[int, ...] = ()
    ) -> int:
        return self._add(_Label(rank, COMPUTE_LANE, kind, name), duration_s, ((COMPUTE_LANE, rank),), after)

    def _add(
        self,
        label: _Label | None,
        duration_s: float,
        resources: tuple[object, ...] = (),
        after: tuple[int, ...] = (),
    ) -> int:
        self.tasks.append(Task(label.name if label else "step", duration_s, resources, after))
        self.labels.append(label)
        return len(self.tasks) - 1
