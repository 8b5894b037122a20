"""Seconds per step of all optimizers, measured side by side in one process.

Blocks of steps alternate between the optimizers, so that whatever else the machine does hits all of them alike. A block
has as many steps as the longest update interval: each holds every kind of step in its right share. The first one is
not counted. Reading the batch is not part of a step. Learning rates are next to zero, so that none diverges; a step
takes as long with any.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.optimisation.contenders import CONTENDERS, WARM_UP
from benchmarks.optimisation.trials import Job, start, take_step

STILL = 1e-8
"""The learning rate while timing."""


def timing_jobs(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with a learning rate next to zero, and those whose steps are as expensive as their early ones."""
    still = [replace(job, hyperparameters={**job.hyperparameters, "lr": STILL}) for job in jobs]
    there = {job.contender for job in jobs}
    early = [replace(job, contender=name) for job in still if (name := CONTENDERS[job.contender].early)]
    return [*still, *(job for job in early if job.contender not in there)]


def seconds_per_step(jobs: Sequence[Job], rounds: int) -> dict[str, list[float]]:
    """Mean seconds per step of each block.

    Args:
        jobs: one for each optimizer, on the same workload.
        rounds: blocks of each optimizer, after one that is not counted.

    Returns:
        the seconds per step of ``rounds`` blocks by the optimizer's name.
    """
    torch.set_num_threads(1)
    block = max(WARM_UP, math.lcm(*(CONTENDERS[job.contender].interval for job in jobs)))
    started = {job.contender: start(job) for job in jobs}
    workload = next(iter(started.values()))[0]
    batches = [workload.batch(jobs[0].seed, step) for step in range(block)]
    seconds: dict[str, list[float]] = {name: [] for name in started}
    for number in range(rounds + 1):
        for name, (_, training) in started.items():
            begin = time.perf_counter()
            for batch in batches:
                take_step(workload, training, batch)
            if number > 0:
                seconds[name].append((time.perf_counter() - begin) / block)
    for _, training in started.values():
        training.close()
    return seconds
