"""What only a GPU can show: the same numbers as on the CPU, and timelines from CUDA events. Skips without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kfac import KFAC, KFACConfig
from kfac.communication import LocalCommunicator
from kfac.profiling import profile_cluster
from kfac.recording import Recorder
from tests.kfac.models import make_data, make_model, recorded_step

pytestmark = pytest.mark.gpu


def trained(device: str, steps: int = 5, **options: Any) -> torch.Tensor:
    model = make_model().to(device)
    kfac = KFAC(model, KFACConfig(factor_interval=1, inverse_interval=2, **options))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(steps):
        x, y = (t.to(device) for t in make_data(8, step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def test_a_gpu_gives_the_cpus_parameters():
    assert (trained("cuda") - trained("cpu")).abs().max() < 1e-9
    assert (trained("cuda", 4) - trained("cpu")).abs().max() > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"inverse_method": "eigh"},
        {"inverse_method": "eigh", "damping_method": "exact"},
        {"inverse_method": "ekfac", "damping_method": "exact"},
    ],
    ids=str,
)
def test_so_do_eigendecompositions_on_several_streams(options):
    assert (trained("cuda", **options) - trained("cpu", **options)).abs().max() < 1e-8


def test_so_do_inverses_that_the_quick_way_has_failed_to_make(monkeypatch):
    """In float64 there is no second try: all come from eigendecompositions, issued after the host has waited."""
    expected = trained("cpu")
    monkeypatch.setattr("kfac.curvature.inverses._cholesky", failing_cholesky)
    assert (trained("cuda") - expected).abs().max() < 1e-7


def failing_cholesky(factor: torch.Tensor, damping: float, weight: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return factor, torch.zeros((), dtype=torch.bool, device=factor.device)


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_loss_scale_and_checkpoints_change_nothing_there_either(use_reentrant):
    """Layers run again on autograd's own threads; the scale stays on the device."""
    parameters = []
    for special in (False, True):
        model = make_model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=special)
        kfac = KFAC(model, grad_scaler=scaler)
        for step in range(3):
            x, y = (t.cuda() for t in make_data(8, step))
            optimizer.zero_grad()
            if special and use_reentrant is not None:
                outputs = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
            else:
                outputs = model(x)
            scaler.scale(F.cross_entropy(outputs, y)).backward()
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
        assert kfac.steps == 3
        parameters.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert (parameters[0] - parameters[1]).abs().max() < 1e-9


def test_float16_with_a_loss_scale_has_statistics_in_float32():
    model = make_model(dtype=torch.float32).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    kfac = KFAC(model, KFACConfig(fisher="mc"), grad_scaler=scaler)
    x, y = (t.cuda() for t in make_data(8, 0, torch.float32))
    with torch.autocast("cuda", torch.float16):
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
    with kfac.curvature(outputs, "classification", targets=y):
        scaler.scale(loss).backward()
    kfac.step()
    scaler.step(optimizer)
    assert kfac.steps == 1
    for layer in kfac.layers:
        for side in "AG":
            factor = kfac.factor(layer.name, side)
            assert factor.dtype == torch.float32
            assert factor.is_cuda
            assert factor.isfinite().all()


def test_the_timeline_comes_from_events_and_covers_the_iteration():
    recorder = Recorder("cuda")
    model = make_model().cuda()
    timeline = recorded_step(KFAC(model, recorder=recorder), model, recorder, "cuda")
    assert {"FF", "BP", "FactorComp", "InverseComp", "Precondition"} <= {span.kind for span in timeline.spans}
    assert sum(timeline.breakdown_s().values()) == pytest.approx(timeline.iteration_s, rel=1e-6)


def test_the_profile_of_a_gpu_says_so():
    profile = profile_cluster(LocalCommunicator(), "cuda", [64, 256], repeats=2)
    assert profile.provenance["hardware"] == torch.cuda.get_device_name()
    assert profile.inverse(256) > 0
