"""One step of training under a recorder: its timeline, and its seconds by kind."""

from __future__ import annotations

import statistics
from itertools import islice
from typing import Any

import torch.nn.functional as F

from benchmarks.gpu.timing import Timer
from benchmarks.workloads import WORKLOADS, Workload
from kfac import KFAC, KFACConfig
from kfac.communication import LocalCommunicator
from kfac.recording import Recorder
from kfac.timeline import Timeline

MODEL = Workload("ResNet-50, 224x224 images, batch 32", "resnet50", (3, 224, 224), 32, 1000)


def recorded_steps(timer: Timer, *, quick: bool, steps: int = 5) -> tuple[dict[str, Any], Timeline]:
    """Steps in which statistics and inverses are due, of one process.

    Returns:
        medians over the steps after the first two, and the timeline of the last one.
    """
    workload = WORKLOADS["tiny"] if quick else MODEL
    model = workload.build().to(timer.device)
    recorder = Recorder(timer.device)
    config = KFACConfig(factor_interval=1, inverse_interval=1)
    kfac = KFAC(model, config, recorder=recorder, communicator=LocalCommunicator())
    timelines = []
    for batch in islice(workload.batches(), steps):
        inputs, targets = (part.to(timer.device) for part in batch)
        recorder.start()
        model.zero_grad()
        with recorder.span("FF", "forward"):
            loss = F.cross_entropy(model(inputs), targets)
        with recorder.span("BP", "backward"):
            loss.backward()
        kfac.step()
        timelines.append(recorder.stop())
    parts = [timeline.breakdown_s() for timeline in timelines[2:]]
    row = {
        "model": workload.title,
        "iteration_s": statistics.median(timeline.iteration_s for timeline in timelines[2:]),
        "seconds": {kind: statistics.median(part.get(kind, 0.0) for part in parts) for kind in parts[-1]},
    }
    return row, timelines[-1]
