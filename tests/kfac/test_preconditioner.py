"""The preconditioner's behaviour on one process and on several: faults, hooks, the recorder."""

from __future__ import annotations

import copy
import logging
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig, NonFiniteError
from kfac.inversion import FactorInversionError
from kfac.recording import Recorder
from tests.kfac.models import make_data, make_model, shards
from tests.kfac.ranks import run_ranks


def vector(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def one_step(model, kfac, optimizer, step, samples=8) -> None:
    x, y = make_data(samples, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    optimizer.step()


def trained(config: KFACConfig, steps: int, schedule="spdkfac"):
    model = make_model()
    kfac = KFAC(model, config, schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        one_step(model, kfac, optimizer, step)
    return model, kfac, optimizer


def test_a_callable_sees_the_step():
    seen = []
    trained(KFACConfig(lr=lambda step: seen.append(step) or 0.1), 3)
    assert seen == [0, 1, 2]


# ---------------------------------------------------------------------- faults


def _poisoned(rank, world_size, schedule, nonfinite):
    """Steps: clean, NaN input on the last rank, clean; what each rank saw."""
    model = make_model()
    kfac = KFAC(model, KFACConfig(nonfinite=nonfinite), schedule, average_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = []
    for step in range(4):
        x, y = make_data(8, step)
        mine = shards(8, world_size)[rank]
        x, y = x[mine].clone(), y[mine]
        if step == 2 and rank == world_size - 1:
            x[0, 0, 0, 0] = float("nan")
        before = vector(model), copy.deepcopy(kfac.state_dict()["factors"])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        try:
            kfac.step()
            optimizer.step()
            seen.append("ok")
        except NonFiniteError as error:
            seen.append(str(error))
        if step == 2:
            after = kfac.state_dict()["factors"]
            for key, factor in after.items():
                assert torch.equal(factor["average"], before[1][key]["average"]), key
            seen.append(torch.equal(before[0], vector(model)))
    assert bool(torch.isfinite(vector(model)).all())
    return seen, vector(model), kfac.skipped_steps


@pytest.mark.parametrize("schedule", ["dkfac", "spdkfac"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_nan_on_one_rank_is_named_on_every_rank_and_leaves_no_trace(schedule, nonfinite):
    for seen, parameters, skipped in (results := run_ranks(_poisoned, 2, schedule, nonfinite)):
        assert torch.equal(parameters, results[0][1])
        assert seen[:2] == ["ok", "ok"]
        assert seen[3] is True, "the parameters moved"
        assert seen[4] == "ok"
        if nonfinite == "raise":
            assert "A of 0" in seen[2]
            assert "rank(s) 1" in seen[2]
            assert "step 2" in seen[2]
        else:
            assert seen[2] == "ok"
            assert skipped == 1


def _uninvertible(rank, world_size, schedule):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    config = KFACConfig(damping=1e-9, damping_method="plain", factor_interval=10)
    kfac = KFAC(model, config, schedule, average_gradients=True)
    F.cross_entropy(model(torch.ones(2, 3).double()), torch.tensor([0, 1])).backward()
    kfac.step()
    kfac._factors["0", "G"].average.neg_()  # a damaged average: no statistics give a negative factor
    F.cross_entropy(model(torch.ones(2, 3).double()), torch.tensor([0, 1])).backward()
    try:
        kfac.step()
    except FactorInversionError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("schedule", ["dkfac", "mpdkfac", "spdkfac"])
def test_a_factor_without_inverse_is_named_on_every_rank(schedule):
    results = run_ranks(_uninvertible, 2, schedule)
    assert results[0] == results[1]
    assert "G of 0" in results[0]
    assert "damping" in results[0]


def _disagreeing(rank, world_size, what):
    model = nn.Sequential(nn.Linear(3, 4 + (what == "layers") * rank))
    try:
        KFAC(model, KFACConfig(damping=0.1 + (what == "config") * rank))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["layers", "config", "nothing"])
def test_ranks_that_disagree_are_told_so(what):
    for message in run_ranks(_disagreeing, 2, what):
        assert (what in message and "rank 1" in message) or (what == "nothing" and message == "no error")


def test_more_passes_than_declared_are_refused():
    model = make_model()
    _kfac = KFAC(model, KFACConfig())
    x, y = make_data(4, 0)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="accumulation_steps=1"):
        model(x)


def test_kfac_schedule_refuses_two_ranks_and_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match="dkfac"):
        KFAC(make_model(), schedule="nonsense")
    assert all("one process" in message for message in run_ranks(_kfac_on_two, 2))


def _kfac_on_two(rank, world_size):
    try:
        KFAC(make_model(), schedule="kfac")
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_model_without_layers_or_parameters_is_refused():
    with pytest.raises(ValueError, match="no layer to precondition"):
        KFAC(nn.Sequential(nn.PReLU(3)))
    with pytest.raises(ValueError, match="no trainable parameters"):
        KFAC(nn.ReLU())


# ---------------------------------------------------------------------- what is hooked


def test_passes_without_gradients_and_frozen_layers_do_not_count():
    model = make_model()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    kfac = KFAC(model, KFACConfig(exclude=("10",)))
    assert "its weight is frozen" in kfac.summary() or "0" not in [layer.name for layer in kfac.layers]
    assert "include/exclude" in kfac.summary()
    x, y = make_data(4, 0)
    with torch.no_grad():
        model(x)
    model.eval()
    F.cross_entropy(model(x), y).backward()
    plain = model[10].weight.grad.clone()
    other = model[8].weight.grad.clone()
    kfac.step()
    assert torch.equal(model[10].weight.grad, plain)
    assert not torch.equal(model[8].weight.grad, other)
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight.grad is None


def test_close_removes_every_hook():
    model = make_model()
    kfac = KFAC(model, average_gradients=True)
    kfac.close()
    x, y = make_data(4, 0)
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
    assert all(not module._forward_hooks for module in model.modules())


def test_hooks_do_not_touch_gradients():
    plain, hooked = make_model(), make_model()
    KFAC(hooked)
    x, y = make_data(4, 0)
    for model in (plain, hooked):
        F.cross_entropy(model(x), y).backward()
    for a, b in zip(plain.parameters(), hooked.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x[:, 0])) + torch.tanh(self.body(x[:, 1])))


def test_a_module_called_twice_sums_its_uses():
    """Two calls per pass are two shared positions of one sample: the same factors as one call on [N, 2, d]."""

    class Joint(Siamese):
        def forward(self, x):
            return self.head(torch.tanh(self.body(x)).sum(1))

    results = []
    for cls in (Siamese, Joint):
        torch.manual_seed(0)
        model = cls().double()
        kfac = KFAC(model, KFACConfig())
        for step in range(3):
            x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(step)).double()
            model.zero_grad()
            F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1, 1])).backward()
            kfac.step()
        results.append((kfac.factor("body", "A"), kfac.factor("body", "G"), model.body.weight.grad.clone()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_a_layer_that_is_not_used_keeps_its_gradient_and_is_named_once(caplog):
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.bypassed = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x) + F.linear(x, self.bypassed.weight, self.bypassed.bias)

    model = Unused()
    kfac = KFAC(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
            plain = model.bypassed.weight.grad.clone()
            kfac.step()
    assert torch.equal(model.bypassed.weight.grad, plain)
    assert [r.message.count("bypassed") > 0 for r in caplog.records].count(True) == 1


# ---------------------------------------------------------------------- the recorder


def test_the_recorded_timeline_covers_the_iteration_and_changes_nothing():
    results = []
    for recording in (False, True):
        recorder = Recorder()
        model = make_model()
        kfac = KFAC(model, KFACConfig(), recorder=recorder)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(3):
            x, y = make_data(8, step)
            if recording:
                recorder.start()
            optimizer.zero_grad()
            with recorder.span("FF", "forward"):
                loss = F.cross_entropy(model(x), y)
            with recorder.span("BP", "backward"):
                loss.backward()
            kfac.step()
            optimizer.step()
            if recording:
                timeline = recorder.stop()
        results.append(vector(model))
    assert torch.equal(*results)
    names = [s.name for s in timeline.spans if s.kind == "FactorComp"]
    for layer in kfac.layers:
        assert f"A {layer.name}" in names
        assert f"G {layer.name}" in names
    spans = sorted((s for s in timeline.spans if s.lane == "compute"), key=lambda s: s.start_s)
    for before, after in pairwise(spans):
        assert before.end_s <= after.start_s
    assert sum(timeline.breakdown_s().values()) == pytest.approx(timeline.iteration_s)


# ---------------------------------------------------------------------- DistributedDataParallel


def _ddp(rank, world_size):
    results = []
    for wrapped in (False, True):
        model = make_model()
        net = nn.parallel.DistributedDataParallel(model) if wrapped else model
        kfac = KFAC(net, KFACConfig(), "spdkfac", average_gradients=not wrapped)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(4):
            x, y = make_data(8, step)
            mine = slice(rank, None, world_size)
            optimizer.zero_grad()
            F.cross_entropy(net(x[mine]), y[mine]).backward()
            kfac.step()
            optimizer.step()
        assert kfac.layers[0].name == "0"
        kfac.close()
        results.append(vector(model))
    return results


def test_a_ddp_model_gives_the_same_parameters_as_own_averaging():
    for own, ddp in run_ranks(_ddp, 2):
        assert (own - ddp).abs().max() < 1e-12
        assert (own - vector(make_model())).abs().max() > 1e-3
