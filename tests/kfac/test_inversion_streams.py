"""Several inversions under way at once, as on a GPU's streams: the same numbers, each waited for in its turn."""

from __future__ import annotations

import pytest
import torch

from kfac.curvature.inverses import begin_cholesky, begin_inverse, damped_cholesky, damped_inverse
from kfac.inversion import FactorInversionError
from kfac.solutions import _Inverse
from kfac.streams import SideStreams
from tests.kfac.recipes.cells import Run
from tests.kfac.recipes.delays import World

EXACT = {"damping_method": "exact", "inverse_method": "eigh"}
EVERY_STEP = {"factor_interval": 1, "inverse_interval": 1}
SCHEDULES = {
    "all inverted everywhere": {"placement": "non_dist"},
    "round robin": {"placement": "seq_dist", "inverse_fusion": "owner"},
    "as sums arrive": {"placement": "optimized", "inverse_start": "as_ready", "fusion": "none"},
    "owners precondition": {"placement": "seq_dist", "gradient_worker_fraction": 0.0},
    "some owners": {"placement": "seq_dist", "gradient_worker_fraction": 0.5, "factor_collective": "reduce_to_owner"},
}


class Several(SideStreams):
    """Three, as on a GPU, without a GPU."""

    def __init__(self, device, count):
        super().__init__(device, count)
        self._streams *= 3


def trained(schedule, size=2, seed=0, **options):
    def train(rank, communicator):
        run = Run(rank, size, {"name": "spdkfac", **schedule}, communicator, **EVERY_STEP, **options).steps(4)
        return run.parameters(), run.made()

    return World(size, seed).run(train)


@pytest.mark.parametrize("options", [{}, {"inverse_method": "eigh"}, EXACT], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_bits_as_one_by_one(monkeypatch, name, options):
    expected = trained(SCHEDULES[name], **options)
    monkeypatch.setattr("kfac.execution.SideStreams", Several)
    for seed in range(3):
        for (parameters, made), (of_one, made_of_one) in zip(
            trained(SCHEDULES[name], seed=seed, **options), expected, strict=True
        ):
            assert torch.equal(parameters, of_one)
            assert made.keys() == made_of_one.keys()
            assert all(torch.equal(made[key], made_of_one[key]) for key in made)


@pytest.mark.parametrize("several", [False, True])
def test_as_many_are_under_way_as_there_are_streams(monkeypatch, several):
    under_way, most = set(), []
    begin = _Inverse.begin

    def noted(self, factor, damping):
        result = begin(self, factor, damping)
        under_way.add(result)
        most.append(len(under_way))

        def ended():
            under_way.discard(result)
            return result()

        return ended

    monkeypatch.setattr(_Inverse, "begin", noted)
    if several:
        monkeypatch.setattr("kfac.execution.SideStreams", Several)
    trained({"placement": "non_dist"}, size=1)
    assert max(most) == (3 if several else 1)
    assert not under_way


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_that_fails_among_several_is_named_on_every_rank(monkeypatch, name):
    monkeypatch.setattr("kfac.execution.SideStreams", Several)

    def train(rank, communicator):
        run = Run(rank, 2, {"name": "spdkfac", **SCHEDULES[name]}, communicator, **EVERY_STEP).steps(2)
        before = run.made()
        begin = begin_inverse

        def failing(factor, *rest):
            return (lambda: None) if factor.shape[-1] == 13 else begin(factor, *rest)

        communicator.barrier()
        monkeypatch.setattr("kfac.solutions.begin_inverse", failing)
        communicator.barrier()
        with pytest.raises(FactorInversionError, match="A of left") as raised:
            run.steps(1)
        assert "conv" not in str(raised.value)
        communicator.barrier()
        monkeypatch.setattr("kfac.solutions.begin_inverse", begin)
        after = run.made()
        assert all(torch.equal(before[key], after[key]) for key in before)

    World(2, 0).run(train)


@pytest.mark.parametrize(("begin", "at_once"), [(begin_inverse, damped_inverse), (begin_cholesky, damped_cholesky)])
@pytest.mark.parametrize("dim", [1, 5, 500])
def test_what_the_quick_way_cannot_do_is_mended_when_its_result_is_asked_for(begin, at_once, dim):
    """A device that is not asked has gone on with what failed: it must not matter."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2 * dim, dim, generator=generator)
    fine = rows.mT @ rows / (2 * dim)
    flat = fine.clone()
    flat[1] = 1e8  # of rank one: the damping is lost in its rounding
    broken = fine.clone()
    broken[2, 0, 0] = float("nan")
    results = [begin(factor, 1e-6) for factor in (fine, flat, broken)]
    for result, factor in zip(results, (fine, flat, broken), strict=True):
        expected, got = at_once(factor, 1e-6), result()
        assert (got is None) == (expected is None) == (factor is broken)
        if got is not None:
            assert torch.equal(got.triu(), expected.triu())
            assert got.isfinite().all()


@pytest.mark.gpu
def test_streams_of_a_gpu_give_the_same_inverses():
    streams = SideStreams(torch.device("cuda"), 4)
    generator = torch.Generator().manual_seed(0)
    factors = []
    for dim in (1, 3, 64, 300, 1000) * 4:
        rows = torch.randn(1, 2 * dim, dim, generator=generator)
        factors.append((rows.mT @ rows / (2 * dim)).cuda())
    begun = []
    for number, factor in enumerate(factors):
        with streams[number].work():
            begun.append(begin_inverse(factor, 0.1))
    for number, (result, factor) in enumerate(zip(begun, factors, strict=True)):
        with streams[number].resumed():
            inverse = result()
        torch.testing.assert_close(inverse.cpu(), damped_inverse(factor.cpu(), 0.1), rtol=1e-3, atol=1e-4)
