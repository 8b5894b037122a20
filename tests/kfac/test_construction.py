"""What a constructor refuses, and what is left of a preconditioner that fails or is dropped."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from kfac import KFAC, KFACConfig
from tests.kfac.communicators import TwoRanks
from tests.kfac.perceptron import loss_of, mlp


def test_wrong_arguments_are_named_with_what_to_pass():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    frozen = mlp().requires_grad_(False)
    for arguments, message in (
        ((model, {"damping": 0.1}), r"config is a dict.*KFACConfig"),
        ((model, {}), r"config is a dict.*KFACConfig"),
        ((model, optimizer), r"config is a SGD: KFAC wraps no optimizer.*KFAC\(model, KFACConfig"),
        ((optimizer,), r"model is a SGD: KFAC takes a torch\.nn\.Module first"),
        ((frozen,), r"no trainable parameters: unfreeze some"),
    ):
        with pytest.raises(ValueError, match=message):
            KFAC(*arguments)
    with pytest.raises(ValueError, match=r"kfac\.damping='1e-3' must be a number above 0"):
        KFACConfig(damping="1e-3")  # type: ignore[arg-type]


def hooks_of(model: nn.Module) -> int:
    parameters = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]  # type: ignore[attr-defined]
    return sum(len(hooks) for hooks in (*parameters, *(m._forward_hooks for m in model.modules())))


def test_a_constructor_that_fails_leaves_no_hook():
    model = mlp()
    config = KFACConfig(factor_interval=lambda step: 0)
    with pytest.raises(ValueError, match="factor_interval") as alone:  # what is raised keeps the object alive
        KFAC(model, config)
    with pytest.raises(ValueError, match="factor_interval") as averaging:
        KFAC(model, config, average_gradients=True, communicator=TwoRanks())
    assert hooks_of(model) == 0
    assert alone.tb is not averaging.tb
    KFAC(model)


@pytest.mark.parametrize("attribute", [False, True])
def test_a_preconditioner_that_is_dropped_leaves_no_hook_and_nothing_alive(attribute):
    model = mlp()
    kfac = KFAC(model, average_gradients=True, communicator=TwoRanks())
    kfac.replan(None, None)
    assert hooks_of(model) == 2 + 4
    gone, model_gone = weakref.ref(kfac), weakref.ref(model)
    if attribute:
        model.kfac = kfac
    loss_of(model)
    del kfac
    if attribute:  # kept by the model, and with it dropped
        assert gone() is not None
        del model
        gc.collect()
        assert gone() is None
        assert model_gone() is None
    else:
        gc.collect()
        assert gone() is None
        assert hooks_of(model) == 0
        _second = KFAC(model)
