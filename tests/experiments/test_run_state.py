"""What a checkpoint that cannot be taken over is told as: its own fault, or the ranks'."""

from types import SimpleNamespace

import pytest
import torch

from experiments.run_state import restore
from experiments.settings import ConfigError
from kfac.communication import CommunicationError


def continue_with(error, tmp_path):
    def load_state_dict(_):
        if error is not None:
            raise error

    accepts = SimpleNamespace(load_state_dict=lambda _: None)
    learner = SimpleNamespace(
        model=accepts, optimizer=accepts, preconditioner=SimpleNamespace(load_state_dict=load_state_dict)
    )
    own = {"buffers": {}, "random": {"cpu": torch.get_rng_state()}}
    restore(learner, None, {"model": {}, "optimizer": {}, "kfac": {}}, own, folder=tmp_path, start=7)


def test_a_rank_that_is_lost_meanwhile_does_not_make_the_checkpoint_unfit(tmp_path):
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        continue_with(CommunicationError("rank 1 has ended"), tmp_path)


def test_the_control_what_does_not_fit_is_named_with_the_remedy(tmp_path):
    continue_with(None, tmp_path)
    for error, words in ((RuntimeError("another size"), "another size"), (KeyError("steps"), "it lacks 'steps'")):
        with pytest.raises(ConfigError) as caught:
            continue_with(error, tmp_path)
        assert str(caught.value) == (
            f"{tmp_path}: the checkpoint before iteration 7 does not fit: {words} (rerun=true starts over)"
        )
