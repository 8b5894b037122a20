"""The learning rate against torch's own schedulers."""

from itertools import pairwise

import pytest
import torch

from experiments.groups import OptimizerSettings
from experiments.learning_rate import learning_rate


def by_torch(make, count):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = make(optimizer)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(count=60, per_epoch=10, **settings):
    return [learning_rate(OptimizerSettings(lr=0.4, **settings), i, per_epoch, count) for i in range(count)]


def test_step_and_cosine_agree_with_torch():
    step = by_torch(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [20, 45], gamma=0.3), 60)
    assert ours(schedule="step", decay_epochs=(2.0, 4.5), decay_factor=0.3) == pytest.approx(step)
    cosine = by_torch(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60), 60)
    assert ours(schedule="cosine") == pytest.approx(cosine)
    assert ours(schedule="constant") == [0.4] * 60


def test_warm_up_rises_to_the_rate():
    rates = ours(warmup_epochs=2.0, schedule="cosine")
    assert rates[0] == pytest.approx(0.4 / 21)
    steps = [b - a for a, b in pairwise(rates[:21])]
    assert steps == pytest.approx([0.4 / 21] * 20)
    assert rates[20] == 0.4
    assert rates[-1] < 0.01
