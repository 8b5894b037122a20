"""What a run decides that plans anew, and how it says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kfac.choice import Choice
from kfac.planning import Plan
from kfac.run_profile import RunProfile


@dataclass(frozen=True, kw_only=True)
class Replanning:
    """A decision that a run has taken for itself.

    Args:
        step: the steps before it.
        choice: the new Plan, and why.
        profile: what was measured.
        before: the former Plan.
        before_s: its simulated seconds by the same measurements; None: its layers are in another order.
        gain: the share of the former plan's time that the choice is simulated to save, in the mean over the steps; None
            where ``before_s`` is.
        took_s: seconds of the decision itself.
        kept: the Plan that stays: the choice's, unless another one was quicker when they took turns, or, where they
            took none, unless :attr:`outweighs` is false.
        tried_s: by name the measured seconds of the plans that took turns, quickest first.
    """

    step: int
    choice: Choice
    profile: RunProfile
    before: Plan
    before_s: float | None
    gain: float | None
    took_s: float
    kept: Plan
    tried_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def off(self) -> float | None:
        """How far the simulation of the former plan is off what it took, as a share of that; None: unknown."""
        measured_s = self.profile.iteration_s
        return None if self.before_s is None or measured_s is None else abs(self.before_s / measured_s - 1)

    @property
    def outweighs(self) -> bool:
        """Whether the choice is simulated to gain more than the simulation is off by, as far as either is known."""
        return self.gain is None or self.off is None or self.gain > self.off

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the profiles."""
        return {
            **self.choice.to_dict(),
            "replanned": {
                "step": self.step,
                "before": self.before.fingerprint,
                "before_schedule": self.before.schedule.to_dict(),
                "before_s": self.before_s,
                "measured_s": self.profile.iteration_s,
                "took_s": self.took_s,
                "kept": self.kept.fingerprint,
                "kept_schedule": self.kept.schedule.to_dict(),
                "tried_s": dict(self.tried_s),
            },
        }

    def __str__(self) -> str:
        kept = " (kept)" if self.before == self.choice.plan else ""
        simulated = "" if self.before_s is None else f", simulated {1e3 * self.before_s:.1f} ms"
        measured = self.profile.iteration_s
        before = "not measured with all curvature work" if measured is None else f"measured {1e3 * measured:.1f} ms"
        tried = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.tried_s.items())
        stays = ""
        if self.kept == self.before != self.choice.plan and not self.tried_s:
            stays = (
                f"\nplan {self.before.fingerprint} stays: the new one is simulated to gain {self.gain or 0:.1%}, and "
                f"the simulation is {self.off or 0:.1%} off where it can be compared; no turns were taken"
            )
        if self.tried_s:
            what = f"{self.choice.baseline} with {self.choice.switches_of(self.kept)}"
            stays = f"\nby turns in the run: {tried}; {next(iter(self.tried_s))} stays: {what}"
        return (
            f"planned anew after {self.step} steps from their own times, in {self.took_s:.1f} s. "
            f"Plan {self.before.fingerprint}{kept} until now: {before}{simulated}\n{self.choice}{stays}"
        )
