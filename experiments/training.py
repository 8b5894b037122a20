"""The training loop of one rank, with its record, checkpoints, evaluations and timelines."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.agreement import require_same_options
from experiments.assembly import Learner, Site, assemble, sum_over_ranks
from experiments.checkpoints import Checkpoints, save_tensors
from experiments.clock import IterationClock
from experiments.config import TrainConfig
from experiments.data import Batch, load_data
from experiments.learning_rate import learning_rate
from experiments.load import Reading, note_load, part_of_rank, read_load
from experiments.measure import explain_choice, profiles_of_run
from experiments.objectives import objective_of
from experiments.patience import PATIENCE_S, patiently
from experiments.planning_anew import PlansAnew, note_decision, note_undecided
from experiments.progress import Progress
from experiments.ranks import Rank, StopRequest
from experiments.records import FAILED, FINISHED, INTERRUPTED, RunRecord
from experiments.rendezvous import register
from experiments.run_state import first_lost_iteration, restore, state_of
from experiments.sharding import Shards, derive_seed
from experiments.summary import describe_metric, merged_timelines, render_timelines, summarise
from experiments.tracking import open_tracker
from kfac.choice import Choice
from kfac.communication import shutdown
from kfac.replanning import Replanner
from kfac.schedules import AUTO
from kfac.timeline import Timeline

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig, rank: Rank, open_record: Callable[[bool], RunRecord | None], stop: StopRequest | None = None
) -> str:
    """Train as one rank until the end, or until a signal asks to stop; collective.

    Args:
        config: of the run.
        rank: this process.
        open_record: gives the run's record, or None if the run has finished before; called with True on rank 0 and,
            after that, with False on the others. Rank 0 writes the record, every rank adds its timelines.
        stop: listens for signals already; None: from now on.

    Returns:
        ``finished`` or ``interrupted`` (with a checkpoint of all ranks at the same iteration).
    """
    stop = stop or StopRequest().listen()
    register()
    site = Site.enter(config, rank)
    try:
        require_same_options(config.to_dict(), site.communicator)
        record = _open_everywhere(site, open_record)
        return FINISHED if record is None else Training(config, record, site, stop).run()
    finally:
        shutdown()


def _open_everywhere(site: Site, open_record: Callable[[bool], RunRecord | None]) -> RunRecord | None:
    """The record on every rank, once rank 0 has it; what rank 0 raises is raised everywhere."""
    record: RunRecord | None = None
    outcome: bool | Exception = True
    if site.communicator.rank == 0:
        try:
            record = open_record(True)
            outcome = record is not None
        except Exception as error:
            outcome = error
    outcome = site.communicator.broadcast_object(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    if not outcome:
        return None
    return record or open_record(False)


class Training:
    """One rank's run.

    Args:
        config: of the run.
        record: of the run.
        site: device and ranks.
        stop: whether to stop early.
    """

    def __init__(self, config: TrainConfig, record: RunRecord, site: Site, stop: StopRequest) -> None:
        self.config, self.record, self.site, self.stop = config, record, site, stop
        self.rank, self.world_size = site.communicator.rank, site.communicator.world_size
        self.objective = objective_of(config.model.name)
        self.data = load_data(config.data, raw=self.objective.raw)
        self.shards = Shards(
            size=self.data.train_size,
            batch_size=config.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=config.seed,
        )
        self.per_epoch = self.shards.iterations_per_epoch
        self.iterations = config.iterations or self.per_epoch * (config.epochs or 1)
        self.recorded = config.timeline.chosen(self.iterations)
        self.clock = IterationClock(site.device)
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []
        record.patience_s = PATIENCE_S
        folder = record.path / "checkpoint"
        self.checkpoints = Checkpoints(folder, site.communicator, config.checkpoint.keep, PATIENCE_S)

    def run(self) -> str:
        """Everything: profiles, training from the last checkpoint on, evaluation, summary."""
        self.learner = self._prepare()
        start = self._resume()
        if self.rank == 0 and self.recorded and self.recorded[0] < self.config.timeline.start:
            text = "timeline.start=%d is beyond the %d iterations: the last one's timeline is recorded"
            logger.info(text, self.config.timeline.start, self.iterations)
        if self.rank:  # the first rank's sinks are there before the others'
            self.site.communicator.barrier()
        self.tracker = open_tracker(self.config.tracking, self.record, self.rank)
        status = FAILED
        try:
            if not self.rank:
                self.site.communicator.barrier()
            before = read_load()
            ended = self._loop(start)
            self._note_load(before)
            status = ended
            if status == FINISHED and self.rank == 0:
                self._conclude()
        except Exception as error:
            self.tracker.failed(error)
            raise
        finally:
            self.tracker.finish(status)
        self.learner.preconditioner.close()
        return status

    # ------------------------------------------------------------------ before the first iteration

    def _prepare(self) -> Learner:
        profiles = profiles_of_run(self.config, self.record, self.data, self.site)
        config = self.config
        kfac = config.kfac_config()
        if config.kfac.get("lr") is None:
            kfac = config.kfac_config(lr=self._learning_rate)
        schedule = config.schedule.value
        learner = assemble(config, self.data, self.site, kfac=kfac, schedule=schedule, profiles=profiles)
        anew = config.replan_after is not None
        self.plans_anew = PlansAnew(config, learner, self.site.communicator, self.iterations) if anew else None
        self.replanner = self.plans_anew.replanner if self.plans_anew else None
        if self.rank == 0:
            if learner.preconditioner.plan.schedule.curvature:
                logger.info("%s", learner.preconditioner.summary())
                logger.info("%s", learner.preconditioner.plan)
            if config.schedule.name == AUTO and (self.replanner is None or self.record.read("choice.json") is None):
                self._note_choice(explain_choice(learner.preconditioner, *profiles))
            for name, profile in zip(("model_profile.json", "cluster_profile.json"), profiles, strict=True):
                if profile is not None:
                    self.record.write(name, profile.to_dict())
        return learner

    def _note_choice(self, choice: Choice, **more: Any) -> None:
        logger.info("%s", choice)
        self.record.write("choice.json", {**choice.to_dict(), **more})

    def _learning_rate(self, iteration: int) -> float:
        return learning_rate(self.config.optimizer, iteration, self.per_epoch, self.iterations)

    def _resume(self) -> int:
        """The first iteration to run; the state before it is loaded if it is not 0."""
        lost = first_lost_iteration(self.record, self._evaluates) if self.rank == 0 else None
        found = self.checkpoints.load(self.site.device, lost)
        start = 0
        if found is not None:
            start, shared, own = found
            restore(self.learner, self.replanner, shared, own, folder=self.checkpoints.folder, start=start)
            if self.rank == 0:
                logger.info("continuing from the checkpoint before iteration %d", start)
            if self.plans_anew:
                self.plans_anew.continue_at(start)
        if self.rank == 0:
            self.record.note(iterations=self.iterations)
            self.record.write("plan.json", self.learner.preconditioner.plan.to_dict())
        return start

    # ------------------------------------------------------------------ the loop

    def _batches(self, start: int) -> Iterator[Batch]:
        seed = self.config.seed
        numbers = range(start, self.iterations)
        return self.data.training_batches(
            (self.shards.indices(i), derive_seed(seed, "augment", i, self.rank)) for i in numbers
        )

    def _loop(self, start: int) -> str:
        config = self.config
        batches = self._batches(start)
        self.progress = Progress(config.progress, start, self.iterations, self.objective.metric)
        self.site.communicator.barrier()
        for iteration in range(start, self.iterations):
            self._iterate(iteration, batches)
            done = iteration + 1
            if self.replanner and self.replanner.due:
                self._replan(iteration, self.replanner)
            last = done == self.iterations
            saves = config.checkpoint.every is not None and done % config.checkpoint.every == 0
            evaluates = self._evaluates(done)
            if not (last or saves or evaluates or done % self.progress.every == 0):
                continue
            stopping = self._report(done) and not last
            if evaluates:
                self._evaluate(done)
            if (saves or stopping) and not last:
                self._save(done)
            if stopping:
                return INTERRUPTED
            self.tracker.offer()
            # Whatever rank 0 did alone must not count as another rank's waiting in the next iteration.
            self.site.communicator.barrier()
        return FINISHED

    def _iterate(self, iteration: int, batches: Iterator[Batch]) -> None:
        recorder = self.learner.recorder
        measures = self.replanner is not None and self.replanner.measuring
        shows = iteration in self.recorded
        records = measures or shows
        lr = self._learning_rate(iteration)
        if records:
            self.site.communicator.barrier()
        self.clock.begin()
        inputs, labels = next(batches)
        batch = inputs.to(self.site.device), labels.to(self.site.device)
        if records:
            recorder.start()
        loss, metric = self.learner.step(batch, lr)
        self.clock.end()
        self.pending.append((iteration, lr, loss, metric))
        timeline = recorder.stop() if records else None
        if self.replanner:
            self.replanner.note(timeline if measures else None)
        if timeline is not None and shows:
            self._write(timeline, iteration)
        if records:
            self.site.communicator.barrier()

    def _write(self, timeline: Timeline, iteration: int) -> None:
        path = self.record.timeline_path(iteration, self.rank)
        patiently(lambda: path.parent.mkdir(exist_ok=True), "writing a timeline")
        patiently(lambda: timeline.to_chrome_trace(path), "writing a timeline")

    def _replan(self, iteration: int, replanner: Replanner) -> None:
        """Plan anew from the run's own times, between two timed iterations; collective."""
        found = replanner.replan()
        if self.rank == 0 and found is not None:
            self.tracker.log(note_decision(self.record, self.learner.preconditioner, found, iteration))
        self.site.communicator.barrier()

    def _report(self, done: int) -> bool:
        """Average and log the iterations since the last report; whether some rank was asked to stop. Collective."""
        pending, self.pending = self.pending, []
        seconds = self.clock.drain()
        numbers = torch.stack([torch.stack((loss.double(), metric.double())) for _, _, loss, metric in pending]).cpu()
        asked = torch.tensor([[float(self.stop.asked), statistics.fmean(seconds)]], dtype=torch.float64)
        *averages, total = sum_over_ranks(torch.cat((numbers, asked)), self.site).div(self.world_size).tolist()
        stopping = bool(total[0] > 0)
        self.progress.adapt(total[1])
        if self.rank == 0:
            self.record.check_ours()
            for (iteration, lr, _, _), (loss, metric), iteration_s in zip(pending, averages, seconds, strict=True):
                row = {"kind": "train", "iter": iteration, "epoch": self._epoch(iteration + 1), "loss": loss}
                self._log({**row, self.objective.metric: metric, "lr": lr, "iteration_s": iteration_s})
            self.progress.tell(done, self._epoch(done), averages, seconds, stopping)
        elif self.config.tracking.all_ranks:
            for (iteration, *_), iteration_s in zip(pending, seconds, strict=True):
                self.tracker.log({"kind": f"rank{self.rank}", "iter": iteration, "iteration_s": iteration_s})
        return stopping

    def _evaluate(self, done: int) -> None:
        size, indices = (
            self.config.evaluation.batch_size,
            torch.arange(self.rank, self.data.test_size, self.world_size),
        )
        batches = self.data.test_batches(indices.split(size))
        loss, metric = self.learner.evaluate(batches, self.site)
        if self.rank == 0:
            name, epoch = self.objective.metric, self._epoch(done)
            self._log({"kind": "eval", "iter": done - 1, "epoch": epoch, "loss": loss, name: metric})
            logger.info("test after %d iterations: loss %.4f  %s", done, loss, describe_metric(name, metric))

    def _save(self, done: int) -> None:
        self.record.sync()
        shared, own = state_of(self.learner, self.replanner)
        self.checkpoints.save(done, shared, own)

    def _log(self, row: dict[str, Any]) -> None:
        """Into the record first; trackers get a copy."""
        self.record.log(row)
        self.tracker.log(row)

    def _evaluates(self, done: int) -> bool:
        return done == self.iterations or done % (self.config.evaluation.every or self.per_epoch) == 0

    def _epoch(self, done: int) -> float:
        return round(done / self.per_epoch, 4)

    # ------------------------------------------------------------------ afterwards

    def _note_load(self, before: Reading) -> None:
        """What else kept the machines busy since then; collective."""
        parts = self.site.communicator.all_gather_object(part_of_rank(self.rank, before, read_load()))
        if self.rank == 0:
            note_load(self.record, parts, self.config.threads)

    def _conclude(self) -> None:
        """What a finished run leaves, in place of its checkpoints: the model, the summary, the pictures."""
        if self.replanner and not self.replanner.done:
            note_undecided(self.record, self.learner.preconditioner)
        if skipped := self.learner.preconditioner.skipped_steps:
            text = "%d of %d steps were skipped, because statistics or gradients were not finite (kfac.nonfinite=skip)"
            logger.warning(text, skipped, self.iterations)
        state = self.learner.model.state_dict()
        patiently(lambda: save_tensors(self.record.path / "model.pt", state), "saving the model")
        try:
            timelines = merged_timelines(self.record)
            summary = summarise(self.record, self.config.warmup, timelines)
            self.record.write("summary.json", summary)
            self.tracker.summary(summary)
            if render_timelines(self.record, timelines) is not None:
                self.tracker.timelines(self.record)
        except Exception as error:  # a damaged row or timeline, a font that is missing: the training is done
            logger.warning("%s: the summary or the pictures are not complete: %r", self.record.path, error)
        self.checkpoints.remove()
