"""Messages are packed and sent beside the passes: in order on a CPU, on a stream of their own on a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from kfac.streams import SideStream, used_here
from tests.kfac.recipes.cells import Run
from tests.kfac.recipes.delays import World


class _Noted(SideStream):
    """Says whether the current work is beside the passes."""

    inside = 0

    def __init__(self, device):
        super().__init__(device)
        self.device = device

    @contextmanager
    def work(self):
        type(self).inside += 1
        with super().work():
            yield
        type(self).inside -= 1


@pytest.mark.parametrize("switches", [{}, {"factor_collective": "reduce_to_owner", "placement": "seq_dist"}])
def test_everything_that_is_summed_is_packed_and_sent_beside_the_passes(monkeypatch, switches):
    """What is made on the side and sent from elsewhere would leave before it is there."""
    monkeypatch.setattr("kfac.execution.SideStream", _Noted)
    sent = []

    class Seen:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def all_reduce(self, tensor, name):
            sent.append((name, _Noted.inside))
            return self._inner.all_reduce(tensor, name)

        def reduce(self, tensor, dst, name):
            sent.append((name, _Noted.inside))
            return self._inner.reduce(tensor, dst, name)

    schedule = {"name": "spdkfac", **switches}
    World(2, 0).run(lambda rank, communicator: Run(rank, 2, schedule, Seen(communicator)).steps(2))
    assert {name for name, _ in sent} == {"kfac_FactorComm", "kfac_GradComm"}
    assert all(inside for _, inside in sent)


def test_on_a_cpu_nothing_is_changed():
    with SideStream(torch.device("cpu")).work():
        used_here(torch.ones(1))


@pytest.mark.gpu
def test_what_is_made_beside_the_current_stream_waits_for_it_and_keeps_its_memory():
    side = SideStream(torch.device("cuda"))
    for _ in range(20):
        source = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(5_000_000)
        source += 1
        with side.work():
            copy = source * 2
            used_here(source)
        del source  # its memory must not be handed out while the copy is under way
        other = torch.full((1 << 20,), 7.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side._stream)
        used_here(copy)
        assert bool((copy == 2).all())
        assert bool((other == 7).all())
