"""What looks like a mistake is warned of once, what is meant is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from tests.kfac.perceptron import X, Y, factors_of, loss_of, mlp, same


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("kfac")]


# ---------------------------------------------------------------------- the order of steps


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("order", ["kfac first", "optimizer first"])
def test_the_optimizer_before_kfac_is_warned_of_once(order, interval, caplog):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kfac = KFAC(model, KFACConfig(factor_interval=interval))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        first, second = (optimizer, kfac) if order == "optimizer first" and step else (kfac, optimizer)
        first.step()
        second.step()
    told = [message for message in warnings_of(caplog) if "before optimizer.step()" in message]
    assert len(told) == (order == "optimizer first")


def test_what_may_be_done_to_gradients_and_between_steps_is_not_warned_of(caplog):
    model = mlp(nn.BatchNorm1d(4))
    ema = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    kfac = KFAC(model, KFACConfig(accumulation_steps=2, factor_interval=2), grad_scaler=scaler)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(loss_of(model) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        kfac.step()
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(model)
        with torch.no_grad():
            loss_of(model)
        model.load_state_dict(ema.module.state_dict())
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("seen", [1, 2])
def test_fewer_micro_batches_than_there_should_be_are_warned_of(seen, caplog):
    model = mlp()
    kfac = KFAC(model, KFACConfig(accumulation_steps=2))
    for _ in range(2):
        model.zero_grad()
        for _ in range(seen):
            (loss_of(model) / seen).backward()
        kfac.step()
    told = [message for message in warnings_of(caplog) if "1 of accumulation_steps=2 micro-batches" in message]
    assert len(told) == len(warnings_of(caplog)) == 2 - seen


# ---------------------------------------------------------------------- contexts


@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_a_backward_pass_outside_its_context_is_told_where_to_go(fisher):
    model = mlp()
    kfac = KFAC(model, KFACConfig(fisher=fisher))
    outputs = model(X)
    with kfac.curvature(outputs, "classification", targets=Y):
        loss = F.cross_entropy(outputs, Y)
    with pytest.raises(RuntimeError, match=r"outside `with kfac\.curvature.*put loss\.backward\(\) inside"):
        loss.backward()


@pytest.mark.parametrize(
    ("layout", "warned"), [("last", True), ("moved", False), ("convolution", False), ("not square", False)]
)
def test_logits_that_fit_both_ways_are_warned_of_where_they_look_wrong(layout, warned, caplog):
    torch.manual_seed(0)
    positions = 5 if layout == "not square" else 4
    model: nn.Module = nn.Conv1d(3, 4, 1) if layout == "convolution" else nn.Linear(3, 4)
    x = torch.randn(2, 3, positions) if layout == "convolution" else torch.randn(2, positions, 3)
    kfac = KFAC(model, KFACConfig(fisher="mc"))
    outputs = model(x)
    if layout in ("moved", "not square"):
        outputs = outputs.movedim(-1, 1)
    targets = torch.zeros(2, positions, dtype=torch.long)
    with kfac.curvature(outputs, "classification", targets=targets):
        F.cross_entropy(outputs, targets).backward()
    kfac.step()
    assert [m for m in warnings_of(caplog) if "movedim(-1, 1)" in m] == warnings_of(caplog)
    assert len(warnings_of(caplog)) == warned


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_a_batch_without_any_loss_term_is_named_and_changes_no_factor(fisher, caplog):
    model = mlp()
    kfac = KFAC(model, KFACConfig(fisher=fisher))
    before = {}
    for ignored in (False, True):
        model.zero_grad()
        outputs = model(X * (1 + ignored))
        targets = torch.full_like(Y, -100) if ignored else Y
        with kfac.curvature(outputs, "classification", targets=targets):
            F.cross_entropy(outputs, targets, reduction="sum").backward()
        kfac.step()
        before = before or factors_of(kfac)
    assert len(warnings_of(caplog)) == 1
    assert "ignore_index" in warnings_of(caplog)[0]
    same(factors_of(kfac), before)
