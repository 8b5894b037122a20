"""Planning anew, once, from what a run's own iterations have taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kfac.choice import Choice, choose
from kfac.communication import Communicator, get_communicator
from kfac.finals import ALONE, TURNS, Finals
from kfac.planning import ModelProfile, Plan
from kfac.planning.intervals import Due
from kfac.planning.shipped_profiles import load_shipped_cluster
from kfac.recording import Recorder
from kfac.replanning_decision import Replanning
from kfac.run_profile import RunProfile, measure_run
from kfac.schedules import OTHER_MATHEMATICS, fixed_switches, has_switches, make_plan
from kfac.setup import require_agreement, suitable
from kfac.simulation import simulated_iteration_s
from kfac.slowdown import in_order, simulated_by, slowed
from kfac.timeline import Timeline

if TYPE_CHECKING:
    from kfac.preconditioner import KFAC

AFTER = 10
"""Steps before planning anew."""

ITERATIONS, REPEATS = 6, 5
"""Iterations that are kept to plan from, and repeats of each collective that is timed beside them."""

WARM_UP = 2
"""Iterations after a start that are not measured: the first one is not pipelined, and memory is not allocated yet."""

SLOWEST_FINALIST = 1.5
"""Times the simulated seconds of the choice."""

LONGEST_INTERVAL = 10
"""Steps between inversions up to which plans take turns."""

FEWEST = 3
"""Iterations with statistics that are needed to plan from."""


class Replanner:
    """Plans anew, once, from the run's own measurements; the same on every rank.

    ::

        recorder = Recorder(device, rank)
        kfac = KFAC(model, config, "auto", recorder=recorder)
        replanner = Replanner(kfac, recorder, after=10)
        for x, y in batches:
            with replanner.iteration():
                with recorder.span("FF", "forward"):
                    loss = criterion(model(x), y)
                with recorder.span("BP", "backward"):
                    loss.backward()
                kfac.step()
                optimizer.step()
                optimizer.zero_grad()

    Iterations that compute statistics are recorded. When there have been ``after`` steps, and at least :data:`FEWEST`
    of them were recorded, a few collectives are timed (and inversions, if none was recorded), and the schedule that
    KFAC was made with is planned for what all that took. How much computing and messages slow each other down is found
    by a plan in which they do not overlap, for some iterations. Still no profile tells everything: the new plan, the
    one so far, the best with few messages, the best that sends after the passes, and the named schedules, as far as
    they are simulated to take less than :data:`SLOWEST_FINALIST` times as long, take turns in the next iterations, and
    the quickest stays. It is part of ``kfac.state_dict()``: a run that continues from it continues with the Plan.
    Whether there has been a decision is in :meth:`state_dict`.

    Args:
        kfac: the preconditioner.
        recorder: the one that it was given.
        after: steps before planning anew.
        iterations: how many of the recorded ones, the last, are planned from.
        repeats: of each collective.
        turns: of each plan before one of them stays; 0: the new one is taken if it is simulated to gain more than the
            simulation of the one so far is off by.
        communicator: the ranks, if not the default ones.
        name: of the model, for people.

    Attributes:
        done: whether it has decided, also before the run was continued.
        turns: as above; may be changed until plans take turns.
        result: the decision; None before it, and where the run was continued after it.

    Raises:
        ValueError: where factors do not travel: no rank measures all statistics.
    """

    def __init__(
        self,
        kfac: KFAC,
        recorder: Recorder,
        *,
        after: int = AFTER,
        iterations: int = ITERATIONS,
        repeats: int = REPEATS,
        turns: int = TURNS,
        communicator: Communicator | None = None,
        name: str = "model",
    ) -> None:
        if not kfac.plan.schedule.curvature or kfac.plan.schedule.factor_collective == "none":
            raise ValueError(
                "planning anew needs every rank's statistics of every layer: take a schedule with curvature=true and a "
                "factor_collective other than none"
            )
        self._kfac, self._recorder, self._name = kfac, recorder, name
        self._after, self._iterations, self._repeats, self.turns = after, iterations, repeats, turns
        self._finals: Finals | None = None
        self._turn_ended = False
        self._overlapped: _Overlapped | None = None
        self._communicator = communicator or get_communicator()
        self._timelines: list[Timeline] = []
        self._seen = 0
        self.done = False
        self.result: Replanning | None = None

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Around everything of an iteration: records it, if it is to be measured, and plans anew when that is due."""
        measuring = self.measuring
        if measuring:
            self._communicator.barrier()
            self._recorder.start()
        try:
            yield
        except BaseException:
            if measuring:
                self._recorder.stop()
            raise
        self.note(self._recorder.stop() if measuring else None)
        if self.due:
            self.replan()

    @property
    def measuring(self) -> bool:
        """Whether the next iteration should be recorded; the same on every rank."""
        counts = self._finals is not None or self._due(self._kfac.steps).statistics
        return not self.done and self._seen >= WARM_UP and counts

    def note(self, timeline: Timeline | None) -> None:
        """An iteration has ended, with this timeline if it was to be measured."""
        self._seen += 1
        if timeline is not None and self._finals:
            self._turn_ended = self._finals.note(timeline.iteration_s, self._due(self._kfac.steps - 1))
        elif timeline is not None:
            kept = max(self._iterations, ALONE) if self._overlapped else self._iterations
            self._timelines = [*self._timelines, timeline][-kept:]

    @property
    def due(self) -> bool:
        """Whether it is time for :meth:`replan`; the same on every rank."""
        if self._finals:
            return self._turn_ended
        fewest = ALONE if self._overlapped else min(FEWEST, self._iterations)
        enough = len(self._timelines) >= fewest
        return not self.done and self._kfac.steps >= self._after and enough

    def replan(self) -> Replanning | None:
        """Do what is due: measure what is left to measure and plan anew, or let the next plan have its turn.

        Collective, between two steps.

        Returns:
            the decision; None where others are still to have their turns.

        Raises:
            ValueError: on every rank, if the recorded iterations do not hold what it takes.
        """
        if self._finals is None:
            alone = None if self._overlapped else self._without_overlap()
            if alone is not None:
                self._overlapped, self._timelines = self._so_far(), []
                self._take(alone)
                return None
            self._plan_anew()
        assert self.result is not None
        finals, self._turn_ended = self._finals, False
        if finals and not finals.over:
            self._take(finals.plan)
            return None
        if finals:
            seconds = finals.seconds(self._communicator)
            self.result = replace(self.result, kept=finals.plans[next(iter(seconds))], tried_s=seconds)
        self._take(self.result.kept)
        self.done, self._timelines, self._finals = True, [], None
        return self.result

    def _take(self, plan: Plan) -> None:
        if plan != self._kfac.plan:
            self._kfac.replan(None, None, plan)

    def _without_overlap(self) -> Plan | None:
        """A plan in which nothing is sent while the passes run; None where this is one, or where it cannot be tried."""
        switches = {"pipelining": "none", "gradient_pipelining": False}
        schedule = self._kfac.plan.schedule
        fixed = fixed_switches(self._kfac.schedule) or {}
        allowed = all(fixed.get(key, value) == value for key, value in switches.items())
        if not self.turns or not allowed or has_switches(schedule, switches):
            return None
        if self._inverse_interval > LONGEST_INTERVAL:
            return None
        alone = replace(schedule, pipelining="none", fusion="threshold", gradient_pipelining=False)
        sizes = ModelProfile(name=self._name, layers=self._kfac.layer_sizes)
        late = replace(alone, inverse_start="after_all")
        return make_plan(late, sizes, load_shipped_cluster(), self._communicator.world_size)

    def _so_far(self) -> _Overlapped:
        """The present plan and what it takes; collective."""
        seconds = [t.iteration_s for t in self._timelines]
        of_ranks = self._communicator.all_gather_object(seconds)
        return _Overlapped(self._kfac.plan, statistics.median(max(times) for times in zip(*of_ranks, strict=True)))

    def _plan_anew(self) -> None:
        started_s = time.perf_counter()
        kfac, overlapped = self._kfac, self._overlapped
        device = kfac.layers[0].parameters[0].device
        profile = measure_run(
            # The first iteration under a plan is not pipelined, and allocates memory.
            self._timelines[1:] if overlapped else self._timelines,
            kfac.plan,
            kfac.layer_sizes,
            self._communicator,
            device,
            name=self._name,
            repeats=self._repeats,
            config=kfac.config,
        )
        before = kfac.plan
        if overlapped:
            before = overlapped.plan
            profile = slowed(profile, before, overlapped.seconds)
            kfac.replan(None, None, before)
        choice: Choice | Exception | None = None
        if self._communicator.rank == 0:
            try:
                choice = self._choose(profile)
            except Exception as error:  # every rank raises it, so that none waits for rank 0
                choice = error
        choice = self._communicator.broadcast_object(choice)
        if isinstance(choice, Exception):
            raise choice
        assert choice is not None
        finalists = self._finalists(choice, profile)
        require_agreement(self._communicator, {name: plan.fingerprint for name, plan in finalists.items()})
        if len(finalists) > 1:
            self._finals = Finals(finalists, turns=self.turns, intervals=kfac.config.intervals(kfac.steps))
        found = Replanning(
            step=kfac.steps,
            choice=choice,
            profile=profile,
            before=before,
            before_s=simulated_by(profile, before),
            gain=self._gain(profile, choice.plan, before),
            took_s=time.perf_counter() - started_s,
            kept=choice.plan,
        )
        self.result = found if self._finals or found.outweighs else replace(found, kept=before)

    def _gain(self, profile: RunProfile, new: Plan, before: Plan) -> float | None:
        """The share of the former plan's simulated mean step that the new one saves."""
        if not in_order(before, profile.model):
            return None
        intervals = self._kfac.config.intervals(self._kfac.steps)
        new_s, before_s = (simulated_iteration_s(p, profile.model, profile.cluster, intervals) for p in (new, before))
        return 1 - new_s / before_s

    def _finalists(self, choice: Choice, profile: RunProfile) -> dict[str, Plan]:
        """The plans that take turns, by name; the choice alone where inversions are too rare for turns to be short."""
        found = {"the choice": choice.plan}
        if not self.turns or self._inverse_interval > LONGEST_INTERVAL:
            return found
        named = {
            name: make_plan(name, profile.model, profile.cluster)
            for name, seconds in choice.named_s.items()
            if name not in OTHER_MATHEMATICS and seconds < SLOWEST_FINALIST * choice.iteration_s
        }
        for name, switches in {
            "few messages": {"fusion": "threshold"},
            "late messages": {"pipelining": "none"},
        }.items():
            # What messages cost beside their time on the channel is not in the profile.
            like = (s for s, seconds in choice.considered if seconds < SLOWEST_FINALIST * choice.iteration_s)
            best = next((schedule for schedule in like if has_switches(schedule, switches)), None)
            if best is not None:
                named[name] = make_plan(best, profile.model, profile.cluster)
        fixed = fixed_switches(self._kfac.schedule) or {}
        for name, plan in {"the plan so far": self._kfac.plan, **named}.items():
            if plan not in found.values() and has_switches(plan.schedule, fixed):
                found[name] = plan
        return found

    @property
    def _inverse_interval(self) -> int:
        return self._kfac.config.intervals(self._kfac.steps).inverse

    def _due(self, step: int) -> Due:
        return self._kfac.config.intervals(step).at(step)

    def _choose(self, profile: RunProfile) -> Choice:
        schedule = suitable(self._kfac.schedule, self._kfac.config)
        before = self._kfac.plan
        fixed = fixed_switches(schedule)
        usual = {"message_dtype": "full", **(fixed or {})}  # which auto leaves alone
        fits = has_switches(before.schedule, usual) and in_order(before, profile.model)
        if isinstance(schedule, Plan):
            schedule = schedule.schedule
        intervals = self._kfac.config.intervals(self._kfac.steps)
        others = [before] if fits else []
        return choose(schedule, profile.model, profile.cluster, others=others, intervals=intervals)

    def state_dict(self) -> dict[str, Any]:
        """What a continued run must know: where other plans are on trial, which one it is to start over with."""
        before = None
        if not self.done:
            before = self._overlapped.plan if self._overlapped else self.result and self.result.before
        return {"done": self.done, **({"plan": before.to_dict()} if before else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as a run that had this state, after ``kfac.load_state_dict``; collective. Trials start over."""
        self.done = bool(state["done"])
        before = Plan.from_dict(state["plan"]) if "plan" in state else None
        if before and before.world_size == self._communicator.world_size:
            self._take(before)
        self._timelines, self._seen, self._finals = [], 0, None
        self._overlapped, self._turn_ended = None, False


@dataclass(frozen=True)
class _Overlapped:
    """A plan whose messages overlap with the passes, and the seconds of its iterations."""

    plan: Plan
    seconds: float
