"""What looks like a mistake is warned of once, what is meant is not; steps that are given up leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig, NonFiniteError
from kfac.communication import LocalCommunicator
from kfac.messages import MessageQueue
from kfac.planning.plan import Message
from kfac.recording import Recorder
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks

D = torch.float64
X = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def mlp(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 2)).to(D)


def loss_of(model: nn.Module, scale: float = 1.0) -> Tensor:
    return F.cross_entropy(model(X * scale), Y)


def factors_of(kfac: KFAC) -> dict[tuple[str, str], Tensor]:
    return {(layer.name, side): kfac.factor(layer.name, side) for layer in kfac.layers for side in "AG"}


def same(ours: dict[tuple[str, str], Tensor], expected: dict[tuple[str, str], Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key


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


# ---------------------------------------------------------------------- construction


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


class TwoRanks(LocalCommunicator):
    world_size = 2

    def all_gather_object(self, obj):
        return [obj, obj]


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


# ---------------------------------------------------------------------- forward and backward pass


def test_a_batch_norm_is_what_it_was_in_the_forward_pass():
    factors = []
    for switched in (False, True):
        model = mlp(nn.BatchNorm1d(4))
        kfac = KFAC(model)
        loss = loss_of(model)
        if switched:
            model.eval()
        loss.backward()
        assert model[1].training == (not switched)
        kfac.step()
        factors.append(factors_of(kfac))
    same(*factors)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("mid-backward")


class Fragile(nn.Module):
    """Calls one layer twice, and fails between layers when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.last = (nn.Linear(3, n).to(D) for n in (3, 3, 2))
        self.fails = ""

    def forward(self, x):
        x = self.again(torch.tanh(self.first(x)))
        if self.fails == "forward":
            raise ArithmeticError("mid-forward")
        if self.fails == "backward":
            x = _Fails.apply(x)
        return self.last(self.again(torch.tanh(x)))


@pytest.mark.parametrize("schedule", ["dkfac", "spdkfac"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_after_an_exception_in_a_pass_a_step_can_be_given_up(how, at, schedule):
    runs = []
    for fails in ("", how):
        model = Fragile()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kfac = KFAC(model, schedule=schedule)
        for step in range(4):
            if step == at and fails:
                model.fails = fails
                with pytest.raises(ArithmeticError):
                    loss_of(model, 10.0).backward()
                model.fails = ""
                kfac.abandon_step()
            optimizer.zero_grad()
            loss_of(model).backward()
            kfac.step()
            optimizer.step()
        runs.append(factors_of(kfac) | {("", "parameters"): nn.utils.parameters_to_vector(model.parameters()).detach()})
    same(*runs)


def test_control_a_step_that_is_not_given_up_is_told_how_to():
    model = Fragile()
    kfac = KFAC(model)
    model.fails = "backward"
    with pytest.raises(ArithmeticError):
        loss_of(model).backward()
    model.fails = ""
    with pytest.raises(RuntimeError, match=r"kfac\.abandon_step\(\)"):
        loss_of(model)
    kfac.abandon_step()
    loss_of(model)
    model.again(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"kfac\.abandon_step\(\)"):
        kfac.step()


def _abandon(rank, world_size):
    """Rank 1 fails in its backward pass, after messages have left on rank 0 and not on rank 1."""
    parameters = []
    for fails in (False, True):
        model = Fragile()
        kfac = KFAC(model, average_gradients=True)
        for step in range(3):
            if step == 2 and fails:
                model.fails = "backward" if rank else ""
                with contextlib.suppress(ArithmeticError):
                    loss_of(model, 2.0 + rank).backward()
                model.fails = ""
                kfac.abandon_step()
            model.zero_grad()
            loss_of(model, 1.0 + rank).backward()
            kfac.step()
        parameters.append(factors_of(kfac) | {("", "gradient"): model.first.weight.grad})
    return parameters


def test_a_step_is_given_up_on_all_ranks_together():
    for plain, abandoned in run_ranks(_abandon, 2):
        same(abandoned, plain)


# ---------------------------------------------------------------------- gradients that are not finite


def _bad_gradient(rank, world_size, nonfinite, average):
    model = make_model()
    net = model if average or world_size == 1 else nn.parallel.DistributedDataParallel(model)
    kfac = KFAC(net, KFACConfig(factor_interval=3, nonfinite=nonfinite), average_gradients=average)
    seen: list[object] = []
    for step in range(3):
        net.zero_grad()
        x, y = make_data(4, rank)
        if step == 1 and rank == world_size - 1:
            x = x * float("nan")
        F.cross_entropy(net(x), y).backward()
        try:
            kfac.step()
            seen.append(all(p.grad is None for p in model.parameters()))
        except NonFiniteError as error:
            seen.append(str(error))
    return seen, kfac.skipped_steps, kfac.steps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite_between_two_updates_of_the_factors(nonfinite, world_size, average):
    for seen, skipped, steps in run_ranks(_bad_gradient, world_size, nonfinite, average):
        assert seen[0] is seen[2] is False
        if nonfinite == "skip":
            assert (seen[1], skipped, steps) == (True, 1, 3)
            continue
        assert skipped == 0
        assert steps == 2
        where = f"rank(s) {world_size - 1}" if average or world_size == 1 else "every rank (they came averaged)"
        assert "step 1: the gradients of 0.weight, 1.weight, 1.bias" in seen[1]
        assert seen[1].endswith(f"not finite on {where}")


def test_large_finite_gradients_in_float64_are_finite():
    model = mlp()
    kfac = KFAC(model, KFACConfig(factor_interval=2))
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        model[0].weight.grad[0, 0] = 1e200
        kfac.step()


# ---------------------------------------------------------------------- memory


def test_buffers_of_messages_are_freed_as_soon_as_they_have_been_used():
    buffers: list[weakref.ref[Tensor]] = []

    def pack(message: Message) -> Tensor:
        buffer = torch.zeros(3)
        buffers.append(weakref.ref(buffer))
        return buffer

    queue = MessageQueue(LocalCommunicator(), Recorder(), pack)
    queue.begin([Message(kind="gradient", items=(k,), elements=3, release="ready") for k in range(3)])
    queue.flush()
    for number, (_, buffer) in enumerate(queue.receive()):
        assert [there() is not None for there in buffers] == [k >= number for k in range(3)]
        del buffer
    assert not any(there() for there in buffers)
    assert queue.started
    assert queue.has_left("gradient", 2)
