"""Inversions that start as soon as the sums of their layer have arrived: the same numbers, earlier."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F

from kfac import ScheduleConfig
from kfac.inversion import FactorInversionError
from kfac.preconditioner import NonFiniteError
from tests.kfac.recipes.cells import Run, batch
from tests.kfac.recipes.delays import World

EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
EARLY = ScheduleConfig(placement="seq_dist", fusion="none", inverse_start="as_ready")
LATE = dataclasses.replace(EARLY, inverse_start="after_all")


def on_ranks(function, size=2, seed=0):
    return World(size, seed).run(function)


class Logged:
    """A communicator that notes what is issued and what is waited for."""

    def __init__(self, inner):
        self._inner, self.log = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def _noted(self, work, name):
        class Work:
            on_done = staticmethod(work.on_done)

            @staticmethod
            def wait():
                work.wait()
                self.log.append(("arrived", name))

        self.log.append(("issued", name))
        return Work()

    def all_reduce(self, tensor, name):
        return self._noted(self._inner.all_reduce(tensor, name), name)

    def broadcast(self, tensor, src, name):
        return self._noted(self._inner.broadcast(tensor, src, name), name)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "switches", [{}, {"fusion": "optimal", "placement": "lbp", "lbp_rule": 5}, {"fusion": "greedy"}]
)
@pytest.mark.parametrize("options", [{}, {"damping_method": "exact", "inverse_method": "eigh"}])
def test_the_same_bits_as_inversions_that_wait_for_all(world_size, switches, options):
    def train(rank, communicator):
        runs = (
            Run(rank, world_size, dataclasses.replace(schedule, **switches), communicator, **EVERY_STEP, **options)
            for schedule in (EARLY, LATE)
        )
        return [run.steps(4).parameters() for run in runs]

    for early, late in on_ranks(train, world_size, seed=world_size):
        assert torch.equal(early, late)


def test_inverses_are_sent_before_all_messages_have_arrived():
    """From the second step on: in the first, layers have no statistics yet."""

    def train(rank, communicator):
        found = []
        for schedule in (EARLY, LATE):
            logged = Logged(communicator)
            run = Run(rank, 2, schedule, logged, **EVERY_STEP)
            for _ in range(3):
                logged.log.clear()
                run.steps(1)
                sent = logged.log.index(("issued", "kfac_InverseComm"))
                found.append(("arrived", "kfac_FactorComm") in logged.log[sent:])
        return found

    assert on_ranks(train) == [[False, True, True, False, False, False]] * 2


class WithoutGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * float("nan")


def bits(run):
    """Everything of a run's factors."""
    return run.factors() | {f"made of {name}": value for name, value in run.made().items()}


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_statistic_that_is_not_finite_leaves_everything_as_before(nonfinite):
    """The convolution's G is the last factor to leave: other factors have been averaged and inverted by then."""

    def train(rank, communicator):
        run = Run(rank, 2, EARLY, communicator, **EVERY_STEP, nonfinite=nonfinite).steps(2)
        before = bits(run)
        x, y = (part[run.share] for part in batch(2, run.samples))
        norm = run.model.norm.forward
        if rank == 1:
            run.model.norm.forward = lambda x: norm(WithoutGradient.apply(x))
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        if nonfinite == "raise":
            with pytest.raises(NonFiniteError, match=r"G of conv are not finite on rank\(s\) 1"):
                run.kfac.step()
        else:
            run.kfac.step()
            assert run.model.conv.weight.grad is None
        run.model.norm.forward = norm
        after = bits(run)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        run.step += 1
        return run.steps(2).parameters()

    one, other = on_ranks(train)
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())


def test_a_step_without_loss_terms_inverts_what_there_was(caplog):
    def train(rank, communicator):
        runs = [Run(rank, 2, schedule, communicator, **EVERY_STEP) for schedule in (EARLY, LATE)]
        for run in runs:
            run.steps(2)
            x, y = (part[run.share] for part in batch(2, run.samples))
            before = run.factors()
            run.optimizer.zero_grad()
            outputs = run.model(x)
            ignored = torch.full_like(y, -100)
            with run.kfac.curvature(outputs, "classification", targets=ignored):
                (F.cross_entropy(outputs, ignored, reduction="sum") + outputs.square().mean()).backward()
            run.kfac.step()
            assert all(torch.equal(before[name], value) for name, value in run.factors().items())
            run.optimizer.step()
        return [run.steps(1).parameters() for run in runs]

    with caplog.at_level(logging.WARNING):
        for early, late in on_ranks(train):
            assert torch.equal(early, late)
    assert "no target of a step counts as a loss term" in caplog.text


def test_a_factor_that_cannot_be_inverted_is_named_on_every_rank(monkeypatch):
    def train(rank, communicator):
        run = Run(rank, 2, EARLY, communicator, **EVERY_STEP).steps(2)
        made = run.made()
        monkeypatch.setattr("kfac.solutions.begin_inverse", lambda *_: lambda: None)
        communicator.barrier()
        with pytest.raises(FactorInversionError, match="A of conv"):
            run.steps(1)
        assert all(torch.equal(made[name], value) for name, value in run.made().items())

    on_ranks(train)


def test_a_layer_that_is_not_used_keeps_its_average():
    def train(rank, communicator):
        ends = []
        for schedule in (EARLY, LATE):
            run = Run(rank, 2, schedule, communicator, **EVERY_STEP).steps(2)
            right, run.model.right.forward = run.model.right.forward, lambda x: x.new_zeros(len(x), 4)
            run.steps(1)
            run.model.right.forward = right
            ends.append(run.steps(1).parameters())
        return ends

    for early, late in on_ranks(train):
        assert torch.equal(early, late)


@pytest.mark.parametrize("switches", [{"factor_collective": "reduce_to_owner"}, {"message_dtype": "bfloat16"}])
def test_sums_of_which_not_all_is_known_when_they_arrive_are_refused(switches):
    with pytest.raises(ValueError, match="inverse_start=as_ready needs factor_collective=all_reduce and message_dtype"):
        dataclasses.replace(EARLY, **switches)
