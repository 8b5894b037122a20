"""One iteration of a Plan as a task graph, executed on cost models.

The graph is what the engine does: statistics in the forward and backward hooks whatever the pipelining, messages in
the plan's order on one channel, then in ``step`` (or, after the backward pass, as sums arrive) the inversions and
broadcasts, and preconditioning, on every rank or, with broadcasts of the results, on the one that owns the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kfac.planning.costs import checked_cost, inverse_dim
from kfac.planning.intervals import ALL_DUE, EVERY_STEP, Due, Intervals
from kfac.planning.plan import Plan
from kfac.planning.profiles import ClusterProfile, ModelProfile, interference_of
from kfac.simulation.contention import run_slowed
from kfac.simulation.events import Task, critical_path, run_tasks
from kfac.simulation.flows import Place, flows
from kfac.timeline import COMMUNICATION_LANE, COMPUTE_LANE, Span, Timeline

_CHANNEL = "channel"
_EVERY_RANK = -1
"""In place of a rank: all ranks do this at the same time."""


def simulate(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Timeline:
    """The timeline of one iteration in which all curvature work is due.

    Collectives start when every rank has reached them, the one before has left the channel, and what they carry is
    there. Ranks that own no factor do the same: the lowest of them stands for all. The optimizer's update is no span;
    it is part of :attr:`Timeline.total_s`. Spans on the critical path say so. Flows lead from computing to the messages
    that wait for it, and on to what waits for them.

    Args:
        plan: what every rank does.
        model: seconds of the layers' work.
        cluster: seconds of collectives and inversions; its world size gives way to the plan's.

    Raises:
        ValueError: if the plan is for another model, naming the first difference, or a cost is no number of seconds.
    """
    graph, times = _run(plan, model, cluster)
    critical = set(critical_path(graph.tasks, times, graph.resources))
    spans: list[Span] = []
    number: list[dict[int, int]] = []  # by task and rank
    for i, ((start, end), label) in enumerate(zip(times, graph.labels, strict=True)):
        ranks = graph.ranks_of(label) if label else ()
        number.append({rank: k for k, rank in enumerate(ranks, start=len(spans))})
        if label:
            kind = label.lane, label.kind, label.name
            spans += [Span(rank, *kind, start, end, i in critical) for rank in ranks]
    places = [Place(graph.ranks_of(x), x.lane == COMMUNICATION_LANE) if x else None for x in graph.labels]
    found = tuple((number[i][rank], number[j][rank]) for i, j, rank in flows(graph.tasks, places, times))
    return Timeline(tuple(spans), graph.lanes, _iteration_s(times, model), "simulated", found)


def simulated_iteration_s(
    plan: Plan, model: ModelProfile, cluster: ClusterProfile, intervals: Intervals = EVERY_STEP
) -> float:
    """:attr:`Timeline.iteration_s` of :func:`simulate`, without making a timeline: quicker where lanes are many.

    Where curvature work is not due in every step, the mean over the steps.
    """
    return sum(
        share * _iteration_s(_run(plan, model, cluster, due)[1], model) for due, share in intervals.shares.items()
    )


def simulated_second_order_s(
    plan: Plan, model: ModelProfile, cluster: ClusterProfile, intervals: Intervals = EVERY_STEP
) -> float:
    """Seconds from the arrival of all messages until every rank has every preconditioned gradient; the mean."""
    inverting = 1 / intervals.inverse
    total_s = 0.0
    for due, share in ((ALL_DUE, inverting), (Due(True, False), 1 - inverting)):
        if share:
            graph = _Graph(plan, model, cluster.at(plan.world_size), coarse=True, due=due)
            graph.add_second_order(graph.add_step(()))
            total_s += share * max((end for _, end in graph.run()), default=0.0)
    return total_s


def _run(
    plan: Plan, model: ModelProfile, cluster: ClusterProfile, due: Due = ALL_DUE
) -> tuple[_Graph, list[tuple[float, float]]]:
    """The task graph, and start and end of every task."""
    plan.check_model(model)
    graph = _Graph(plan, model, cluster.at(plan.world_size), due=due)
    graph.build()
    return graph, graph.run()


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
class _Ready:
    """The tasks after which factors and each layer's gradients are ready, and the backward pass has ended."""

    factors: dict[int, tuple[int, ...]]
    gradients: list[tuple[int, ...]]
    backward_end: tuple[int, ...]

    def add(self, factor: int, task: int) -> None:
        """A factor is ready on one more rank."""
        self.factors[factor] = (*self.factors.get(factor, ()), task)


@dataclass
class _Graph:
    plan: Plan
    model: ModelProfile
    cluster: ClusterProfile
    coarse: bool = False
    """Whether what a rank does in a row may be one task."""
    due: Due = ALL_DUE
    tasks: list[Task] = field(default_factory=list)
    labels: list[_Label | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lanes = lane_counts(self.plan)
        self.interference = interference_of(self.cluster)
        self.resources = {_CHANNEL, *((COMPUTE_LANE, rank) for rank in (_EVERY_RANK, *self.lanes))}
        self.all_reduce = checked_cost("all_reduce", self.cluster.all_reduce)
        self.reduce = checked_cost("reduce", self.cluster.reduce)
        self.broadcast = checked_cost("broadcast", self.cluster.broadcast)
        self.inverse = checked_cost("inverse", self.cluster.inverse)
        self.arrived: dict[int, tuple[int, ...]] = {}
        """Per factor after what it can be inverted, where that may be before all messages have arrived."""
        self.factor_index = {(f.layer, f.side): i for i, f in enumerate(self.plan.factors)}

    def ranks_of(self, label: _Label) -> Collection[int]:
        """Whose lane has a span of it."""
        return self.lanes if label.rank == _EVERY_RANK else (label.rank,)

    def run(self) -> list[tuple[float, float]]:
        """Start and end of every task."""
        disturbed = self.interference
        if not disturbed.slowdown and not disturbed.message_s and not disturbed.element_s:
            return run_tasks(self.tasks, self.resources)
        return run_slowed(self.tasks, self.resources, _CHANNEL, disturbed.slowdown)

    def build(self) -> None:
        layers = [layer for layer in self.model.layers if (layer.name, "A") in self.factor_index]
        # Up to the inversions all ranks do the same at the same time, unless each has statistics of its own.
        local = self.plan.schedule.factor_collective == "none" and self.plan.world_size > 1
        ready = _Ready({}, [() for _ in self.model.layers], ())
        for rank in self.lanes if local else (_EVERY_RANK,):
            statistics = self.plan.statistics_of(rank) if self.due.statistics else ()
            self._passes(rank, {layers[k].name for k in statistics}, ready)
        arrived = self._messages(ready)
        step = self.add_step((*ready.backward_end, *arrived), self.interference.wait_s)
        early = self.plan.schedule.inverse_start == "as_ready" and self.due == ALL_DUE
        if early and self.plan.world_size > 1:
            self._note_arrivals(self.add_step(ready.backward_end, self.interference.wait_s), arrived)
        if self.plan.schedule.curvature:
            self.add_second_order(step)

    def _note_arrivals(self, backward_end: int, arrived: Sequence[int]) -> None:
        sent = {i: task for m, task in zip(self.plan.messages, arrived, strict=True) for i in m.factors}
        for i, task in sent.items():
            self.arrived[i] = backward_end, task, sent[i ^ 1]

    def add_step(self, after: tuple[int, ...], wait_s: float = 0.0) -> int:
        return self._add(None, wait_s, after=after)

    def _passes(self, rank: int, statistics: Collection[str], ready: _Ready) -> None:
        """Forward and backward, with the statistics of these layers; is added to ``ready``."""
        for layer in self.model.layers:
            self._compute("FF", layer.name, layer.forward_s, rank)
            if layer.name in statistics:
                ready.add(
                    self.factor_index[layer.name, "A"],
                    self._compute("FactorComp", f"A {layer.name}", layer.a_statistics_s, rank),
                )
        last = self._compute("BP", "loss", self.model.loss_s, rank)
        for position, layer in reversed(list(enumerate(self.model.layers))):
            if layer.name in statistics:
                ready.add(
                    self.factor_index[layer.name, "G"],
                    self._compute("FactorComp", f"G {layer.name}", layer.g_statistics_s, rank),
                )
            last = self._compute("BP", layer.name, layer.backward_s, rank)
            ready.gradients[position] += (last,)
        ready.backward_end += (last,)

    def _messages(self, ready: _Ready) -> list[int]:
        if self.plan.world_size == 1:
            return []
        sent = []
        for number, message in enumerate(self.plan.messages):
            gradient = message.kind == "gradient"
            if not gradient and not self.due.statistics:
                continue
            after = ready.backward_end
            if message.release == "ready":
                after = tuple(j for i in message.items for j in (ready.gradients if gradient else ready.factors)[i])
            half = not gradient and self.plan.schedule.message_dtype != "full"
            elements = message.elements / 2 if half else message.elements
            cost = self.all_reduce(elements) if message.root is None else self.reduce(elements)
            cost += self.interference.item_s * len(message.items)
            name = f"{message.kind} message {number} ({len(message.items)} items)"  # as the engine's recorder names it
            sent.append(self._communicate("GradComm" if gradient else "FactorComm", name, elements, cost, after))
        if self.plan.summarised and self.due.statistics:
            elements = self.plan.summary_elements
            seconds = self.all_reduce(elements)
            sent.append(self._communicate("FactorComm", "summary", elements, seconds, ready.backward_end))
        return sent

    def add_second_order(self, step: int) -> None:
        """Inversions, preconditioning and their broadcasts.

        Every rank walks the whole sequence, so it reaches a broadcast after everything that it does before it: first
        the inversions that every rank needs, then what each rank preconditions alone, then, when the inverses of the
        others have come, the rest, on every rank at its own pace.
        """
        reached: dict[int, int] = {}  # per rank what it has done since the last broadcast
        arriving = [step]
        for group in self._inverses(step, reached) if self.due.inverses else ():
            elements = sum(self.plan.factors[i].elements for i in group)
            message = self.plan.broadcast_name(group), elements, self.broadcast(elements)
            arriving.append(self._communicate("InverseComm", *message, tuple(reached.values())))
            reached.clear()
        layers = [layer for layer in self.model.layers if (layer.name, "A") in self.factor_index]
        for group in self.plan.gradient_messages if self.plan.world_size > 1 else ():
            owner = self.plan.gradient_owner[group[0]]
            assert owner is not None
            for i in (i for k in group for i in (2 * k, 2 * k + 1) if self.due.inverses):
                self._invert(i, (owner,), (step,), reached)
            for k in group:
                reached[owner] = self._compute("Precondition", layers[k].name, layers[k].precondition_s, owner, (step,))
            elements = sum(layers[k].matrix_elements for k in group)
            message = self.plan.gradient_name(group), elements, self.broadcast(elements)
            self._communicate("GradComm", *message, tuple(reached.values()))
            reached.clear()
        common = [layer for k, layer in enumerate(layers) if self.plan.solution_holder(2 * k) is None]
        work = [(layer.name, layer.precondition_s) for layer in common]
        if self.coarse and work:
            work = [("all layers", sum(seconds for _, seconds in work))]
        waits = (self._add(None, 0.0, after=tuple(arriving)),)
        together = not reached and len(common) == len(layers)
        for rank in (_EVERY_RANK,) if together else self.lanes:
            after: tuple[int, ...] = waits
            for name, seconds in work:
                self._compute("Precondition", name, seconds, rank, after)
                after = ()  # the lane's own order carries the rest

    def _inverses(self, step: int, reached: dict[int, int]) -> Iterator[tuple[int, ...]]:
        """Walk the inversions that every rank needs, stopping at each group whose broadcast is to leave."""
        shared = [i for i in self.plan.inverse_sequence if self.plan.solution_holder(i) is None]
        place = {i: k for k, i in enumerate(shared)}
        leaving: dict[int, tuple[int, ...]] = {}
        if self.plan.world_size > 1:
            groups = [tuple(sorted(group, key=place.__getitem__)) for group in self.plan.inverse_messages]
            leaving = {group[-1]: group for group in groups}
        late = self.plan.schedule.inverse_broadcast == "after_all"
        for i in shared:
            owner = self.plan.inverse_owner[i]
            after = self.arrived.get(i, (step,))
            self._invert(i, self.lanes if owner is None else (owner,), after, reached)
            if i in leaving and not late:
                yield leaving[i]
        if late:
            yield from (leaving[i] for i in shared if i in leaving)

    def _invert(self, i: int, ranks: Iterable[int], after: tuple[int, ...], reached: dict[int, int]) -> None:
        factor = self.plan.factors[i]
        name, seconds = f"invert {factor.side} of {factor.layer}", self.inverse(inverse_dim(factor.size))
        for rank in ranks:
            reached[rank] = self._compute("InverseComp", name, seconds, rank, after)

    def _communicate(self, kind: str, name: str, elements: float, duration_s: float, after: tuple[int, ...]) -> int:
        label = _Label(_EVERY_RANK, COMMUNICATION_LANE, kind, name)
        return self._add(label, duration_s, (_CHANNEL,), after, self.interference.burden_s(elements))

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
        burden_s: float = 0.0,
    ) -> int:
        self.tasks.append(Task(label.name if label else "step", duration_s, resources, after, burden_s=burden_s))
        self.labels.append(label)
        return len(self.tasks) - 1
