"""What would give wrong numbers is refused with a remedy; what looks odd but is right, is right."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac import KFAC, KFACConfig
from kfac.communication import get_communicator
from tests.kfac.models import make_data, make_model
from tests.kfac.ranks import run_ranks

D = torch.float64


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(D)


X = torch.randn(6, 3, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def loss_of(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(X), Y)


# ---------------------------------------------------------------------- gradients that change after they were sent


def _changed(rank, world_size, how, schedule):
    model = make_model()
    kfac = KFAC(model, KFACConfig(factor_interval=2), schedule, average_gradients=True)
    x, y = make_data(4, rank)
    messages = []
    for step in range(4):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step == 3:  # not a collecting step: only gradients travel
            if how == "two backward passes":
                F.cross_entropy(model(x), y).backward()
            elif how == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            elif how == "zero_grad":
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
        try:
            kfac.step()
            messages.append("ok")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("how", ["two backward passes", "clipping", "zero_grad", "nothing"])
def test_a_gradient_changed_after_its_message_left_is_refused(how):
    for messages in run_ranks(_changed, 2, how, "spdkfac"):
        assert messages[:3] == ["ok"] * 3
        assert (messages[3] == "ok") == (how == "nothing")
        assert how == "nothing" or "changed after its all-reduce" in messages[3]


def test_without_gradient_pipelining_gradients_may_be_changed_before_the_step():
    for messages in run_ranks(_changed, 2, "clipping", {"name": "spdkfac", "gradient_pipelining": False}):
        assert messages == ["ok"] * 4


# ---------------------------------------------------------------------- passes that do not match


def test_a_forward_pass_without_a_backward_pass_is_refused():
    model = mlp()
    kfac = KFAC(model)
    model(X * 10)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"without a backward pass.*no_grad"):
        kfac.step()
    model.zero_grad()
    loss_of(model).backward()
    kfac.step()  # and the next step is clean
    fresh = mlp()
    reference = KFAC(fresh)
    loss_of(fresh).backward()
    reference.step()
    torch.testing.assert_close(kfac.factor("0", "A"), reference.factor("0", "A"))


def test_a_validation_pass_with_gradients_is_told_to_use_no_grad():
    model = mlp()
    kfac = KFAC(model, schedule="spdkfac")
    loss_of(model).backward()
    kfac.step()
    model(X)  # validation, forgotten to be under no_grad
    with pytest.raises(RuntimeError, match="no_grad"):
        model(X)


def test_outputs_that_are_not_used_in_the_loss_count_as_unused():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    model = Heads().to(D)
    kfac = KFAC(model)
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        kfac.step()
    with pytest.raises(KeyError, match="no statistics"):
        kfac.factor("unused", "A")


@pytest.mark.parametrize("how", ["retain_graph", "input gradient"])
def test_a_second_gradient_for_one_output_is_refused(how):
    model = mlp()
    _kfac = KFAC(model)
    x = X.clone().requires_grad_()
    loss = F.cross_entropy(model(x), Y)
    if how == "retain_graph":
        (loss / 2).backward(retain_graph=True)
    else:
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second gradient"):
        (loss / 2).backward()


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x, times=1):
        for _ in range(times):
            x = torch.tanh(self.body(x))
        return self.head(x)


def test_a_layer_called_more_often_after_its_statistic_was_sent_is_refused():
    model = Repeated().to(D)
    kfac = KFAC(model, schedule="spdkfac")
    F.cross_entropy(model(X), Y).backward()
    kfac.step()
    with pytest.raises(RuntimeError, match="pipelining='none'"):
        model(X, 3)


def test_a_layer_called_more_often_is_summed_without_pipelining():
    model = Repeated().to(D)
    kfac = KFAC(model, KFACConfig(factor_decay=0.0), schedule="dkfac")
    for times in (1, 3):
        model.zero_grad()
        F.cross_entropy(model(X, times), Y).backward()
        kfac.step()
    expected, x = 0.0, X
    with torch.no_grad():
        for _ in range(3):
            rows = torch.cat([x, torch.ones(6, 1, dtype=D)], 1)
            expected = expected + rows.T @ rows / 6
            x = torch.tanh(model.body(x))
    torch.testing.assert_close(kfac.factor("body", "A"), expected)


def test_calls_with_different_batch_sizes_do_not_depend_on_their_order():
    factors = []
    for order in (0, 1):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2).to(D)
        kfac = KFAC(layer)
        parts = [X[:2], X]
        (layer(parts[order]).pow(2).sum() + layer(parts[1 - order]).pow(2).sum()).backward()
        kfac.step()
        factors.append((kfac.factor("", "A"), kfac.factor("", "G")))
    for a, b in zip(*factors, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scaling", ["spdkfac", "kaisa"])
def test_scalings_that_do_not_define_repeated_calls_refuse_them(scaling):
    model = Repeated().to(D)
    _kfac = KFAC(model, KFACConfig(scaling=scaling))
    with pytest.raises(RuntimeError, match=scaling):
        model(X, 2)


def test_a_step_without_any_pass_is_refused():
    model = mlp()
    kfac = KFAC(model)
    with pytest.raises(RuntimeError, match="without any statistics"):
        kfac.step()


# ---------------------------------------------------------------------- life of the object


def test_copies_of_a_hooked_model_are_plain_models():
    model = mlp()
    kfac = KFAC(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.optim.swa_utils.AveragedModel(model)):
        F.cross_entropy(twin(X * 100), Y).backward()
        for a, b in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
    loss_of(model).backward()
    kfac.step()
    rows = torch.cat([X, torch.ones(6, 1, dtype=D)], 1)
    torch.testing.assert_close(kfac.factor("0", "A"), rows.T @ rows / 6)


def test_stepping_after_close_is_refused_and_a_second_preconditioner_too():
    model = mlp()
    kfac = KFAC(model)
    with pytest.raises(ValueError, match="another KFAC"):
        KFAC(model)
    kfac.close()
    with pytest.raises(RuntimeError, match=r"after close"):
        kfac.step()
    KFAC(model)


@pytest.mark.parametrize("what", ["replan", "state_dict", "load_state_dict"])
@pytest.mark.parametrize("schedule", ["dkfac", "spdkfac"])
def test_boundaries_are_kept(what, schedule):
    model = mlp()
    kfac = KFAC(model, schedule=schedule)
    state = kfac.state_dict()
    calls = {"replan": lambda: kfac.replan(None, None), "load_state_dict": lambda: kfac.load_state_dict(state)}
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="within a step"):
        calls.get(what, kfac.state_dict)()
    kfac.step()
    calls.get(what, kfac.state_dict)()


def test_a_refused_replan_leaves_everything_as_it_was():
    model = mlp()
    kfac = KFAC(model)
    before = kfac.plan
    with pytest.raises(ValueError, match="nonsense"):
        kfac.replan(None, None, "nonsense")
    assert kfac.replan(None, None) == before


def test_freezing_later_is_noticed():
    model = mlp()
    kfac = KFAC(model)
    model[0].weight.requires_grad_(False)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="frozen"):
        kfac.step()


def test_a_state_does_not_change_the_schedule():
    model = mlp()
    first = KFAC(model, schedule="spdkfac")
    loss_of(model).backward()
    first.step()
    state = first.state_dict()
    first.close()
    second = KFAC(model, schedule="dkfac")
    plan = second.plan
    second.load_state_dict(state)
    assert second.plan == plan
    torch.testing.assert_close(second.factor("0", "A"), rows_moment())


def rows_moment() -> torch.Tensor:
    rows = torch.cat([X, torch.ones(6, 1, dtype=D)], 1)
    return rows.T @ rows / 6


@pytest.mark.parametrize(
    ("name", "value"),
    [("damping", -1.0), ("damping", float("inf")), ("kl_clip", 0.0), ("lr", float("nan")), ("factor_decay", 1.0),
     ("factor_interval", 0), ("inverse_interval", 2.5)],
)  # fmt: skip
def test_values_of_callables_are_checked_by_name_and_step(name, value):
    config = KFACConfig(**{name: lambda step: value})

    def first_step():
        model = mlp()
        kfac = KFAC(model, config)
        loss_of(model).backward()
        kfac.step()

    with pytest.raises(ValueError, match=rf"kfac\.{name}=.* at step 0"):
        first_step()


# ---------------------------------------------------------------------- kinds of layers and wrappers


def test_layers_that_only_look_covered_are_listed():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Scaled(nn.Module):
        def forward(self, x):
            return 2 * x

    doubled_bias, doubled_shift = nn.Linear(3, 3), nn.LayerNorm(3)
    for module in (doubled_bias, doubled_shift):
        nn.utils.parametrize.register_parametrization(module, "bias", Scaled())
    weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    model = nn.Sequential(weight_norm, Doubled(3, 3), nn.Linear(3, 2), doubled_bias, doubled_shift).to(D)
    kfac = KFAC(model)
    assert [layer.name for layer in kfac.layers] == ["2"]
    assert "0, 3, 4: its weight or bias is computed from other parameters (a parametrization)" in kfac.summary()
    assert "forward pass of its own" in kfac.summary()


def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = mlp()
    kfac = KFAC(torch.compile(model, backend="eager"))
    assert [layer.name for layer in kfac.layers] == ["0", "2"]


def test_a_step_within_autocast_computes_in_full_precision():
    gradients = []
    for autocast in (False, True):
        model = mlp().float()
        kfac = KFAC(model)
        F.cross_entropy(model(X.float()), Y).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            kfac.step()
        gradients.append(model[0].weight.grad.clone())
    assert torch.equal(*gradients)


def test_a_lazy_layer_asks_for_a_first_run():
    with pytest.raises(ValueError, match="run the model once"):
        KFAC(nn.Sequential(nn.LazyLinear(3)))


# ---------------------------------------------------------------------- ranks that disagree


def _timeouts(rank, world_size):
    get_communicator()
    device = torch.device("cpu")
    group = get_communicator()._group
    world = torch.distributed.group.WORLD
    return [g._get_backend(device).options._timeout for g in (world, group)]


def test_our_own_group_keeps_the_users_timeout():
    assert run_ranks(_timeouts, 2)[0] == [timedelta(seconds=60)] * 2


def _disagree(rank, world_size, what):
    model = mlp().to(torch.float32 if what == "dtype" and rank else D)
    if what == "parameters" and rank:
        model.requires_grad_(False)
    try:
        KFAC(model, average_gradients=what == "average" and rank == 0)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["dtype", "average", "parameters"])
def test_every_disagreement_is_an_error_on_every_rank(what):
    assert all("rank 1" in message for message in run_ranks(_disagree, 2, what))


def _half(rank, world_size):
    model = nn.Linear(1, 1, bias=False).half()
    kfac = KFAC(model, schedule="sgd", average_gradients=True)
    (model.weight.sum() * 40000).backward()
    kfac.step()
    return model.weight.grad.item()


def test_half_precision_gradients_do_not_overflow_in_the_average():
    assert run_ranks(_half, 2) == [40000.0, 40000.0]
