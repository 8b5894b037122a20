"""torch.compile: hooks run between compiled graphs, whatever is compiled and whenever."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac import KFAC, KFACConfig

D = torch.float64
X = torch.randn(3, 5, 4, dtype=D, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 1])


class Model(nn.Module):
    """Layers on sequences with work in place after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.body(x))
        x = self.norm(x).mul_(2.0)
        return self.head(x.mean(1))


def compiled(how: str, model: Model, backend: str) -> nn.Module:
    """What is trained: the model, compiled as ``how`` says."""
    if how == "whole":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    if how == "in place":
        model.compile(backend=backend)
    if how == "layers":
        model.body = torch.compile(model.body, backend=backend)
        model.head = torch.compile(model.head, backend=backend)
    if how == "layers in place":
        model.body.compile(backend=backend)
        model.head.compile(backend=backend)
    return model


def train(how: str, backend: str = "aot_eager", *, late: bool = False, replan: bool = False, close: bool = False):
    """Factors, layers' names and parameters after some steps.

    ``late``: the model has been called before KFAC was made; ``replan``, ``close``: in the middle.
    """
    torch.compiler.reset()
    model = Model()
    net = compiled(how, model, backend)
    if late:
        F.cross_entropy(net(X), Y).backward()
        model.zero_grad()
    kfac = KFAC(net, KFACConfig(factor_interval=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if replan and step == 2:
            kfac.replan(None, None, "dkfac")
        if close and step == 2:
            kfac.close()
        optimizer.zero_grad()
        F.cross_entropy(net(X * (1 + step)), Y).backward()
        if not (close and step >= 2):
            kfac.step()
        optimizer.step()
    names = [layer.name for layer in kfac.layers]
    factors = {(name, side): kfac.factor(name, side) for name in names for side in "AG"}
    return factors, nn.utils.parameters_to_vector(model.parameters()).detach()


def same(ours, plain, tolerance: float = 0.0) -> None:
    """Factors by name, and parameters."""
    assert ours[0].keys() == plain[0].keys()
    for key, expected in plain[0].items():
        torch.testing.assert_close(ours[0][key], expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], plain[1], rtol=tolerance, atol=tolerance)


HOWS = ("whole", "in place", "layers", "layers in place")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", HOWS)
def test_compiled_models_have_the_same_factors_and_steps(how, backend):
    same(train(how, backend), train("not"))


@pytest.mark.parametrize("how", HOWS)
def test_a_model_that_has_been_compiled_and_called_before_is_compiled_anew(how, caplog):
    with caplog.at_level(logging.WARNING):
        same(train(how, late=True), train("not"))
    assert not [record for record in caplog.records if record.name.startswith("kfac")]


@pytest.mark.parametrize("how", ["whole", "layers"])
def test_replanning_and_closing_reach_compiled_code(how):
    same(train(how, replan=True), train("not", replan=True))
    same(train(how, close=True), train("not", close=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_compiles_around_the_hooks():
    same(train("layers", "inductor"), train("not"), tolerance=1e-12)


def test_control_a_model_that_was_compiled_behind_kfacs_back_is_told_of():
    """KFAC is given the plain model after compiled code of it has run: nothing is collected, and step() says so."""
    torch.compiler.reset()
    model = Model()
    net = torch.compile(model, backend="eager")
    net(X)
    kfac = KFAC(model)
    F.cross_entropy(net(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"torch\.compile.*give KFAC the compiled model"):
        kfac.step()


def test_one_graph_for_all_is_refused_in_one_line():
    whole = torch.compile(Model(), backend="eager", fullgraph=True)
    in_place, part = Model(), Model()
    in_place.compile(backend="eager", fullgraph=True)
    part.body = torch.compile(part.body, backend="eager", fullgraph=True)
    for net in (whole, in_place, part):
        with pytest.raises(ValueError, match=r"compile the model without fullgraph=True") as error:
            KFAC(net)
        assert "\n" not in str(error.value)


def test_one_graph_that_is_made_later_is_refused_by_torch_with_our_reason():
    torch.compiler.reset()
    model = Model()
    _kfac = KFAC(model)
    net = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="K-FAC's hooks run between compiled graphs: compile without fullgraph=True"):
        net(X)
