"""On a GPU's streams nothing is read before it is there, nor dropped while it is used: every schedule and method."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.kfac.recipes import stream_order
from tests.kfac.recipes.cells import Run
from tests.kfac.recipes.delays import World

SCHEDULES = {
    "all": {"placement": "non_dist"},
    "round robin": {"placement": "seq_dist"},
    "late": {"placement": "seq_dist", "pipelining": "none", "inverse_broadcast": "after_all", "fusion": "threshold"},
    "early": {"placement": "optimized", "inverse_start": "as_ready", "fusion": "none"},
    "fused by owner": {"placement": "seq_dist", "inverse_fusion": "owner", "factor_collective": "reduce_to_owner"},
    "owners precondition": {"placement": "seq_dist", "gradient_worker_fraction": 0.0},
    "bfloat16": {"placement": "optimized", "message_dtype": "bfloat16"},
    "local statistics": {"placement": "optimized", "factor_collective": "none", "gradient_worker_fraction": 0.0},
}
METHODS = {
    "cholesky": {},
    "eigh": {"inverse_method": "eigh"},
    "exact": {"damping_method": "exact", "inverse_method": "eigh"},
    "ekfac": {"damping_method": "exact", "inverse_method": "ekfac", "inverse_interval": 3, "factor_interval": 1},
}
NOT_ADAPTED = ("owners precondition", "local statistics")
"""EKFAC needs every layer's eigenvectors on every rank."""


def problems(schedule, size=2, steps=4, **options):
    def train(rank, communicator):
        def run(channel):
            Run(rank, size, {"name": "spdkfac", **SCHEDULES[schedule]}, channel, **options).steps(steps)

        return stream_order.watched(run, communicator)

    ranks = World(size, 0).run(train)
    assert all(rank.operations > 500 for rank in ranks)
    assert all(len(rank.clocks) >= 4 for rank in ranks), "several streams and the channel took part"
    return sum((rank.problems for rank in ranks), Counter())


POSSIBLE = [(s, m) for s in SCHEDULES for m in METHODS if not (m == "ekfac" and s in NOT_ADAPTED)]


@pytest.mark.parametrize(("schedule", "method"), POSSIBLE)
def test_no_stream_reads_what_another_has_not_finished(monkeypatch, schedule, method):
    stream_order.install(monkeypatch)
    assert problems(schedule, **METHODS[method]) == {}


@pytest.mark.parametrize("schedule", ["all", "round robin", "owners precondition"])
def test_nor_where_the_quick_inverse_fails(monkeypatch, schedule):
    stream_order.install(monkeypatch)
    monkeypatch.setattr("kfac.curvature.inverses._cholesky", failing(torch.float64))
    assert problems(schedule) == {}


def failing(dtype):
    from kfac.curvature.inverses import _cholesky

    def cholesky(factor, damping, weight=1.0):
        upper, good = _cholesky(factor, damping, weight)
        return upper, good & (factor.dtype != dtype)

    return cholesky


def test_a_stream_that_nobody_waits_for_is_found(monkeypatch):
    stream_order.install(monkeypatch)
    monkeypatch.setattr(stream_order.Side, "joins", False)
    assert any("on main of what side" in text for text in problems("all", **METHODS["eigh"]))
    assert problems("all") == {}  # the host has waited for these


def test_memory_that_is_dropped_too_early_is_found(monkeypatch):
    stream_order.install(monkeypatch)
    monkeypatch.setattr("kfac.exchange.used_here", lambda tensor: None)
    assert any("dropped while side 0 uses it" in text for text in problems("round robin"))


def test_a_collective_whose_result_is_not_awaited_is_found(monkeypatch):
    stream_order.install(monkeypatch)
    wait = stream_order._Work.wait

    def forgetful(work):
        work._clock = {}
        wait(work)

    monkeypatch.setattr(stream_order._Work, "wait", forgetful)
    assert any("of what channel writes" in text for text in problems("round robin"))
