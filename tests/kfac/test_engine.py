"""K-FAC on a DeepSpeed engine equals K-FAC on one process with the whole batch, at ZeRO stages 0, 1 and 2."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kfac import KFAC, KFACConfig
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks

STEPS, SAMPLES, LR = 5, 16, 0.05
OPTIONS = {"damping": 0.01, "factor_decay": 0.9}


def flat(model) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().float().clone()


def one_process() -> torch.Tensor:
    model = make_model(dtype=torch.float32)
    kfac = KFAC(model, KFACConfig(**OPTIONS, lr=LR))
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(STEPS):
        x, y = make_data(SAMPLES, step, torch.float32)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return flat(model)


def _engine(rank, world_size, cells):
    import deepspeed

    from kfac.engine import attach

    results = []
    for stage, accumulation, attached in cells:
        model = make_model(dtype=torch.float32)
        micro = SAMPLES // world_size // accumulation
        settings = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        }
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        if attached:
            attach(engine, KFACConfig(**OPTIONS), "spdkfac")
        for step in range(STEPS):
            x, y = make_data(SAMPLES, step, torch.float32)
            mine = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
            for micro_x, micro_y in zip(x[mine].split(micro), y[mine].split(micro), strict=True):
                engine.backward(F.cross_entropy(engine(micro_x), micro_y))
                engine.step()
        results.append(flat(model))
    return results


CELLS = [(0, 1, True), (0, 2, True), (1, 1, True), (2, 2, True), (0, 1, False)]


def test_zero_stages_equal_one_process():
    """float32: the comparison allows rounding; without K-FAC attached (the control) the difference is far larger."""
    reference = one_process()
    for results in run_ranks(_engine, 2, CELLS):
        for cell, parameters in zip(CELLS, results, strict=True):
            error = ((parameters - reference).norm() / reference.norm()).item()
            if cell[2]:
                assert error < 2e-5, f"ZeRO {cell[0]}, {cell[1]} micro-batches: {error:.1e}"
            else:
                assert error > 1e-3


class Engine:
    """What attach() asks of an engine, answered wrongly in one way at a time."""

    def __init__(self, **answers) -> None:
        self._answers = {"fp16_enabled": False, "zero_optimization_stage": 0, "managed_gradient_accumulation": True}
        self._answers.update(answers)

    def __getattr__(self, name):
        return lambda: self._answers[name]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"fp16_enabled": True}, "bf16 or fp32"),
        ({"zero_optimization_stage": 3}, "ZeRO stage 3"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    ],
)
def test_engines_that_cannot_be_preconditioned_are_refused(answer, message):
    from kfac.engine import attach

    with pytest.raises(ValueError, match=message):
        attach(Engine(**answer))


def test_skipping_a_step_is_refused_because_the_engine_would_step_all_the_same():
    from kfac.engine import attach

    with pytest.raises(ValueError, match="nonfinite"):
        attach(Engine(), KFACConfig(nonfinite="skip"))
