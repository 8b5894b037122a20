"""A small training run that plans anew from its own times."""

from __future__ import annotations

from itertools import islice

import torch
import torch.nn.functional as F

from kfac import KFAC, KFACConfig
from kfac.recording import Recorder
from kfac.replanning import Replanner
from tests.kfac.models import make_data, make_model


class Run:
    """A small training run, with its preconditioner, optimizer and batches."""

    def __init__(self, rank, world_size, *, schedule="auto", config=None, after=5, turns=0, **options):
        self.model = make_model()
        self.recorder = Recorder("cpu", rank)
        self.kfac = KFAC(
            self.model, config or KFACConfig(kl_clip=1e-2), schedule, average_gradients=True, recorder=self.recorder
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.replanner = Replanner(self.kfac, self.recorder, after=after, repeats=1, turns=turns, **options)
        self.batches = (
            tuple(t[rank::world_size] for t in make_data(4 * world_size, seed)) for seed in range(1_000_000)
        )

    def train(self, count):
        for x, y in islice(self.batches, count):
            with self.replanner.iteration():
                with self.recorder.span("FF", "forward"):
                    loss = F.cross_entropy(self.model(x), y)
                with self.recorder.span("BP", "backward"):
                    loss.backward()
                self.kfac.step()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def state(self):
        parts = ("model", "kfac", "optimizer", "replanner")
        return {name: getattr(self, name).state_dict() for name in parts}

    def load(self, state):
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)
        return self

    def parameters(self):
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
