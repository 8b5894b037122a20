"""Mixed precision: statistics in full precision, loss scales that change nothing, overflows that leave no trace."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig
from tests.kfac.communicators import TwoRanks
from tests.kfac.models import make_data, make_model, shards
from tests.kfac.ranks import run_ranks

STEPS, SAMPLES, LR = 6, 8, 0.05
OPTIONS = {"damping": 0.01, "factor_decay": 0.9, "kl_clip": 1e-4}
"""With this KL clip the clip is active: a wrong scale in it would be noticed."""


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# ---------------------------------------------------------------------- autocast


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 4, bias=False))


X = torch.randn(400, 12, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (400,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_under_autocast_are_sums_in_full_precision(dtype):
    """A and G are those of the very tensors that the layers saw, summed in float64; sums in ``dtype`` are not."""
    model = mlp()
    kfac = KFAC(model, KFACConfig())
    seen: dict[str, Tensor] = {}
    for name in ("0", "2"):

        def remember(_, args, output, name=name):
            seen[f"x{name}"] = args[0].detach().clone()
            output.register_hook(lambda g: seen.__setitem__(f"g{name}", g.detach().clone()))

        model.get_submodule(name).register_forward_hook(remember)
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(model(X), Y)
    (loss * 64).backward()  # so that fp16 gradients are no denormals
    assert seen["x2"].dtype == seen["g0"].dtype == dtype
    kfac.step()
    for name in ("0", "2"):
        x, g = seen[f"x{name}"].double(), seen[f"g{name}"].double()
        if name == "0":
            x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
        a, b = x.T @ x / 400, g.T @ g * 400
        for side, expected in (("A", a), ("G", b)):
            ours = kfac.factor(name, side)
            assert ours.dtype == torch.float32
            assert ((ours - expected).norm() / expected.norm()) < 1e-6
    low = torch.zeros(16, 16, dtype=dtype)
    for row in seen["x2"]:
        low.add_(row.outer(row))
    expected = seen["x2"].double().T @ seen["x2"].double()
    assert (low.double() - expected).norm() / expected.norm() > 1e-3


def test_a_model_in_bfloat16_has_statistics_and_inverses_in_float32():
    model = mlp().bfloat16()
    kfac = KFAC(model)
    F.cross_entropy(model(X.bfloat16()), Y).backward()
    kfac.step()
    assert all(t.dtype == torch.float32 for f in kfac._factors.values() for t in (f.average, f.inverse))
    assert model[0].weight.grad.dtype == torch.bfloat16


def test_backward_within_autocast_gives_the_same_statistics():
    factors = []
    for within in (False, True):
        model = mlp()
        kfac = KFAC(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(X), Y)
            if within:
                loss.backward()
        if not within:
            loss.backward()
        kfac.step()
        factors.append([kfac.factor(name, side) for name in ("0", "2") for side in "AG"])
    for a, b in zip(*factors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------- loss scales


def scales(kind: str) -> list[float]:
    """One per step."""
    return {
        "one": [1.0] * STEPS,
        "large": [2.0**13] * STEPS,
        "cyclic": [2.0 ** (3 * k % 14) for k in range(STEPS)],
    }[kind]


def train(
    kind: str | None,
    *,
    unscale_first: bool = False,
    fisher: str = "empirical",
    told: bool = True,
    rank: int = 0,
    world_size: int = 1,
    average: bool = False,
    micro_batches: int = 1,
    schedule: str = "spdkfac",
) -> Tensor:
    """Parameters after some steps in float64 with a loss scale of a kind, or without; ``told``: KFAC knows of it."""
    torch.manual_seed(7)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=kind is not None, init_scale=1.0)
    config = KFACConfig(**OPTIONS, fisher=fisher, factor_interval=2, accumulation_steps=micro_batches)
    kfac = KFAC(model, config, schedule, average_gradients=average, grad_scaler=scaler if told else None)
    for step, scale in enumerate(scales(kind) if kind else [1.0] * STEPS):
        if kind:
            scaler.scale(torch.ones(()))  # makes its tensor, so that update() can set it
            scaler.update(scale)
        x, y = make_data(SAMPLES, step)
        mine = shards(SAMPLES, world_size)[rank]
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x[mine].chunk(micro_batches), y[mine].chunk(micro_batches), strict=True):
            weight = len(micro_y) * world_size / SAMPLES
            outputs = model(micro_x)
            loss = F.cross_entropy(outputs, micro_y) * weight
            with kfac.curvature(outputs, "classification", weight, targets=micro_y):
                scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        kfac.step()
        scaler.step(optimizer)
        scaler.update()
    return flat(model)


@pytest.mark.parametrize("fisher", ["empirical", "exact", "mc"])
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("kind", ["one", "large", "cyclic"])
def test_t12_a_loss_scale_changes_nothing(kind, unscale_first, fisher):
    plain = train(None, fisher=fisher)
    ours = train(kind, unscale_first=unscale_first, fisher=fisher)
    assert (plain - ours).abs().max() < 1e-12
    assert (plain - flat(make_model())).abs().max() > 1e-3


@pytest.mark.parametrize("unscale_first", [False, True])
def test_control_a_scale_that_kfac_does_not_know_is_noticed(unscale_first):
    assert (train(None) - train("large", unscale_first=unscale_first, told=False)).abs().max() > 1e-3


def _scaled_ranks(rank, world_size):
    where = {"rank": rank, "world_size": world_size, "average": True, "micro_batches": 2}
    return [train(kind, schedule=s, **where) for s in ("dkfac", "spdkfac") for kind in (None, "cyclic")]


def test_averaged_gradients_and_micro_batches_with_a_scale():
    """Gradients are sent scaled, in the backward pass; the KL clip uses what they are without the scale."""
    results = run_ranks(_scaled_ranks, 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for plain, scaled in zip(results[0][::2], results[0][1::2], strict=True):
        assert (plain - scaled).abs().max() < 1e-12


def test_fp16_autocast_with_a_scaler_trains_like_float32():
    parameters = []
    for half in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=half)
        kfac = KFAC(model, KFACConfig(damping=0.1), grad_scaler=scaler)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = F.cross_entropy(model(X), Y)
            scaler.scale(loss).backward()
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
        assert kfac.steps == 5
        parameters.append(flat(model))
    moved = (parameters[0] - flat(mlp())).norm()
    assert (parameters[0] - parameters[1]).norm() < 0.02 * moved


# ---------------------------------------------------------------------- overflows


def _with_overflow(rank, world_size, cells):
    """Per cell: parameters after a run with a step that overflows on the last rank, and after one without it."""
    return [tuple(_overflow_run(rank, world_size, overflow, *cell) for overflow in (True, False)) for cell in cells]


def _overflow_run(rank, world_size, overflow, schedule, where, unscale_first, wrapped):
    """``where``: at the first step, at one that collects, at one that does not, only in the Fisher's passes."""
    torch.manual_seed(0)
    model = make_model(dtype=torch.float32)
    net = nn.parallel.DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, backoff_factor=0.5)
    config = KFACConfig(
        damping=lambda step: 0.01 / (1 + step),
        factor_interval=2,
        inverse_interval=2,
        fisher="mc" if where == "fisher" else "empirical",
    )
    kfac = KFAC(net, config, schedule, average_gradients=not wrapped, grad_scaler=scaler)
    batches = [0, 1, 2, 3, 4, 5]
    bad = {"first": 0, "collecting": 2, "between": 3, "fisher": 2}[where]
    if overflow:
        batches.insert(bad, -1)
    for number, batch in enumerate(batches):
        overflows = batch == -1
        x, y = make_data(SAMPLES, max(batch, 0), torch.float32)
        mine = shards(SAMPLES, world_size)[rank]
        x, y = x[mine], y[mine]
        optimizer.zero_grad()
        torch.manual_seed(100 + max(batch, 0))
        outputs = net(x)
        factor = len(y) * world_size / SAMPLES
        guilty = overflows and rank == world_size - 1
        loss = F.cross_entropy(outputs, y) * factor * (1e37 if guilty and where != "fisher" else 1.0)
        before = _state(kfac)
        with kfac.curvature(outputs, "classification", 1e38 if guilty else factor):
            scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        parameters = flat(model)
        kfac.step()
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert torch.equal(flat(model), parameters), "the optimizer has stepped"
            assert scaler.get_scale() == 2.0**9
            assert _equal(_state(kfac), before), "the state has changed"
            assert kfac.skipped_steps == 1
            assert kfac.steps == number
    assert kfac.steps == 6
    kfac.close()
    return flat(model)


def _state(kfac):
    return {key: copy.deepcopy(factor.state_dict()) for key, factor in kfac._factors.items()}


def _equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


ALONE = list(itertools.product(["spdkfac"], ["first", "collecting", "between", "fisher"], [False, True], [False]))
"""On one process: schedule, where, unscaled first, in DistributedDataParallel."""
TOGETHER = [
    *itertools.product(["dkfac", "spdkfac"], ["first", "collecting", "between", "fisher"], [False], [False]),
    ("spdkfac", "collecting", True, True),
    ("spdkfac", "between", False, True),
]


def test_an_overflow_leaves_no_trace():
    """Parameters go on as if the step had not been; statistics and inverses are bitwise what they were."""
    runs = {1: (ALONE, [_with_overflow(0, 1, ALONE)]), 2: (TOGETHER, run_ranks(_with_overflow, 2, TOGETHER))}
    for world_size, (cells, results) in runs.items():
        for rank_results in results:
            for cell, (with_one, without), (same, _) in zip(cells, rank_results, results[0], strict=True):
                assert torch.equal(with_one, same), (world_size, cell)
                # The scale is another one afterwards: not bitwise, as gradients are rounded at other places.
                assert (with_one - without).abs().max() < 1e-5, (world_size, cell)
                assert (without - flat(make_model(dtype=torch.float32))).abs().max() > 1e-3


def test_without_telling_kfac_an_overflow_is_an_error():
    """The control: the step is refused because of NaN in the statistics, as without mixed precision."""
    model = make_model(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu")
    kfac = KFAC(model)
    x, y = make_data(4, 0, torch.float32)
    scaler.scale(F.cross_entropy(model(x), y) * 1e37).backward()
    with pytest.raises(RuntimeError, match="not finite"):
        kfac.step()


# ---------------------------------------------------------------------- misuse


def passes(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(F.cross_entropy(model(X), Y)).backward()


def test_scalers_at_a_wrong_time_are_refused_with_a_remedy():
    for what, message in (
        ("stepped", r"before scaler\.step"),
        ("unscaled", r"unscale_\(optimizer\) before kfac.step.*call it afterwards"),
        ("not scaled", r"scaler\.scale\(loss\)\.backward"),
    ):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        kfac = KFAC(model, grad_scaler=scaler, average_gradients=True, communicator=TwoRanks())
        if what == "not scaled":
            F.cross_entropy(model(X), Y).backward()
        else:
            passes(model, scaler)
            scaler.step(optimizer) if what == "stepped" else scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=message):
            kfac.step()


def test_only_scalers_of_torch_are_known():
    with pytest.raises(ValueError, match="GradScaler, not function"):
        KFAC(mlp(), grad_scaler=lambda: 1.0)


def test_a_disabled_scaler_and_the_class_of_old_scripts_do_nothing_harmful():
    results = []
    for kind in ("none", "disabled", "old"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and without a GPU it disables itself
            old = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())
        scaler = {"none": None, "disabled": torch.amp.GradScaler("cpu", enabled=False), "old": old}[kind]
        model = mlp()
        kfac = KFAC(model, grad_scaler=scaler)
        loss = F.cross_entropy(model(X), Y)
        (scaler.scale(loss) if scaler else loss).backward()
        kfac.step()
        results.append(model[0].weight.grad.clone())
    assert torch.equal(results[0], results[1])
    if not torch.cuda.is_available():
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("told", [True, False])
def test_fp16_gradients_without_a_scaler_are_warned_of_once(told, caplog):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    kfac = KFAC(model, grad_scaler=scaler if told else None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(X), Y)
            scaler.scale(loss).backward()
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
    warned = [record.message for record in caplog.records if "grad_scaler" in record.message]
    assert len(warned) == (0 if told else 1)
