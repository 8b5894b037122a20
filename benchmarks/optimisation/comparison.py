"""The stages: targets from a pilot, a search per optimizer, and runs of the best with other seeds."""

from __future__ import annotations

import logging
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from benchmarks.optimisation.contenders import BASELINES, CONTENDERS, EARLY
from benchmarks.optimisation.store import Store
from benchmarks.optimisation.timing import seconds_per_step, timing_jobs
from benchmarks.optimisation.trials import Job, Outcome, prepare_worker, run
from benchmarks.optimisation.workloads import Workload, find_workload

logger = logging.getLogger(__name__)

PILOT_SEEDS = (100, 101, 102)
SEARCH_SEED = 0
EVALUATION_SEEDS = (1, 2, 3)
TIMING_ROUNDS = 7
PILOT_SHARE = 0.75
"""Share of the step budget after which the pilot's runs say what a target is (as in Dahl et al. 2023)."""


@dataclass(frozen=True)
class Setting:
    """How much is run.

    Args:
        trials: of each optimizer on each workload.
        processes: that run trials at the same time, each with one thread.
        quick: small forms of the workloads, for tests.
        retime: measure the seconds per step again, also where they are known.
    """

    trials: int = 12
    processes: int = 2
    quick: bool = False
    retime: bool = False


@dataclass(frozen=True)
class Search:
    """The trials of one optimizer on one workload and what its best one did with the evaluation seeds."""

    contender: str
    trials: tuple[tuple[Job, Outcome], ...]
    best: Job
    evaluations: tuple[Outcome, ...]

    @property
    def steps(self) -> tuple[float, ...]:
        """Steps to the target with each evaluation seed."""
        return tuple(outcome.steps for outcome in self.evaluations)

    @property
    def median_steps(self) -> float:
        """Their median, infinite if most of them missed."""
        return statistics.median(self.steps)


@dataclass(frozen=True)
class Comparison:
    """One workload.

    Args:
        workload: which.
        pilot: its runs.
        reached: what each baseline reached in it.
        target: the metric to be met, from ``reached``.
        searches: of the optimizers.
        seconds: per step in each timed block, by optimizer.
    """

    workload: Workload
    pilot: tuple[tuple[Job, Outcome], ...]
    reached: dict[str, float]
    target: float
    searches: tuple[Search, ...]
    seconds: dict[str, list[float]]

    def seconds_to_target(self, search: Search) -> float:
        """Median steps to the target times the median of the seconds per step (of early steps theirs)."""
        steps, contender = search.median_steps, CONTENDERS[search.contender]
        early = min(steps, EARLY) if contender.early else 0
        early_s = early * statistics.median(self.seconds[contender.early]) if contender.early else 0.0
        return early_s + (steps - early) * statistics.median(self.seconds[contender.name])


class Runner:
    """Runs jobs that have no result yet, several at a time; a context, which ends its processes.

    Args:
        setting: of the comparison.
        store: of the results.
    """

    def __init__(self, setting: Setting, store: Store) -> None:
        self.setting, self.store = setting, store
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def compare(self, name: str, contenders: Sequence[str]) -> Comparison:
        """All stages of one workload."""
        workload = find_workload(name, quick=self.setting.quick)
        pilot, reached = self._pilot(workload)
        target = workload.rounded(workload.worst(reached.values()))
        trials = self._outcomes(
            [job for contender in contenders for job in self._trials(workload, contender, "search", target)]
        )
        best = {c: _best(workload, [pair for pair in trials if pair[0].contender == c]) for c in contenders}
        repeated = self._outcomes(
            [_again(best[c], "evaluation", seed) for c in contenders for seed in EVALUATION_SEEDS]
        )
        searches = tuple(
            Search(
                contender=c,
                trials=tuple(pair for pair in trials if pair[0].contender == c),
                best=best[c],
                evaluations=tuple(outcome for job, outcome in repeated if job.contender == c),
            )
            for c in contenders
        )
        return Comparison(workload, tuple(pilot), reached, target, searches, self._seconds(list(best.values())))

    def _pilot(self, workload: Workload) -> tuple[list[tuple[Job, Outcome]], dict[str, float]]:
        """The pilot's runs, and what each baseline's best trial reaches (its median over the pilot's seeds)."""
        trials = self._outcomes([job for name in BASELINES for job in self._trials(workload, name, "pilot", None)])
        best = {name: _best(workload, [pair for pair in trials if pair[0].contender == name]) for name in BASELINES}
        again = self._outcomes([_again(job, "pilot", seed) for job in best.values() for seed in PILOT_SEEDS[1:]])
        reached = {
            name: statistics.median(
                outcome.best(workload)
                for job, outcome in [*trials, *again]
                if job.contender == name and job.hyperparameters == best[name].hyperparameters
            )
            for name in BASELINES
        }
        return [*trials, *again], reached

    def _seconds(self, best: list[Job]) -> dict[str, list[float]]:
        """Seconds per step of the best trials, while nothing else of this runs."""
        jobs, rounds = timing_jobs(best), 2 if self.setting.quick else TIMING_ROUNDS
        key = {"stage": "timing", "rounds": rounds, "jobs": [job.to_dict() for job in jobs]}
        found: dict[str, list[float]] | None = None if self.setting.retime else self.store.get(key)
        if found is None:
            logger.info("%s timing", best[0].workload)
            found = seconds_per_step(jobs, rounds)
            self.store.put(key, found)
        return found

    def _trials(self, workload: Workload, contender: str, stage: str, target: float | None) -> list[Job]:
        pilot = stage == "pilot"
        return [
            Job(
                stage=stage,
                workload=workload.name,
                contender=contender,
                quick=self.setting.quick,
                seed=PILOT_SEEDS[0] if pilot else SEARCH_SEED,
                steps=round(workload.budget * PILOT_SHARE) if pilot else workload.budget,
                target=target,
                hyperparameters=hyperparameters,
            )
            for hyperparameters in CONTENDERS[contender].trials(self.setting.trials)
        ]

    def _outcomes(self, jobs: list[Job]) -> list[tuple[Job, Outcome]]:
        """Each job with its outcome, run now or before."""
        missing = [job for job in jobs if self.store.get(job.to_dict()) is None]
        for number, (job, outcome) in enumerate(self._run(missing), start=1):
            self.store.put(job.to_dict(), outcome.to_dict())
            end = outcome.diverged or (f"{outcome.met} steps" if outcome.met else f"best {_shown(job, outcome)}")
            logger.info("%s %s %d/%d  %s: %s", job.workload, job.stage, number, len(missing), job.contender, end)
        return [(job, Outcome.from_dict(self.store.get(job.to_dict()))) for job in jobs]

    def _run(self, jobs: list[Job]) -> Iterator[tuple[Job, Outcome]]:
        if self.setting.processes == 1 or len(jobs) < 2:
            yield from ((job, run(job)) for job in jobs)
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # forked copies of torch's threads hang
            self._pool = ProcessPoolExecutor(self.setting.processes, context, initializer=prepare_worker)
        started = {self._pool.submit(run, job): job for job in jobs}
        for done in as_completed(started):
            yield started[done], done.result()


def _again(job: Job, stage: str, seed: int) -> Job:
    return Job(**{**job.to_dict(), "stage": stage, "seed": seed})


def _best(workload: Workload, trials: Sequence[tuple[Job, Outcome]]) -> Job:
    """The trial with the fewest steps to its target; of equal ones (or without a target) the one that came closest."""
    sign = -1.0 if workload.higher else 1.0
    return min(trials, key=lambda pair: (pair[1].steps, sign * pair[1].best(workload)))[0]


def _shown(job: Job, outcome: Outcome) -> str:
    return f"{outcome.best(find_workload(job.workload, quick=job.quick)):.4g}"
