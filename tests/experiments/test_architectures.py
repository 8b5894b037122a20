"""The traced architectures against the published element counts and against torch's own operation counter."""

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from experiments.architectures import describe_architecture, main, trace_architecture
from experiments.models import build_model

# Parameters, packed elements of all A, of all G, number of layers (paper, models table).
PUBLISHED = {
    "resnet50": (25_557_032, 62_348_671, 14_618_356, 54),
    "resnet152": (60_192_808, 161_955_199, 32_927_476, 156),
    "densenet201": (20_013_928, 130_961_295, 1_806_420, 201),
    "inceptionv4": (42_679_816, 116_414_683, 4_695_748, 150),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_are_exact(name):
    described = describe_architecture(name)
    counts = (described["parameters"], described["a_elements"], described["g_elements"], len(described["layers"]))
    assert counts == PUBLISHED[name]
    assert sum(layer["gradient_elements"] for layer in described["layers"]) == described["parameters"]


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "mlp"])
def test_flops_and_rows_agree_with_torchs_counter(name):
    model = build_model(name, num_classes=10, input_shape=(3, 32, 32)).eval()
    layers = trace_architecture(model, (3, 32, 32))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 32, 32))
    assert sum(layer.forward_flops for layer in layers) == counter.get_total_flops()
    weights = dict(model.named_modules())
    assert all(layer.forward_flops == 2 * layer.rows * weights[layer.name].weight.numel() for layer in layers)


def test_execution_order_bias_grouped_and_shared_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 4)  # defined first, runs last, twice
            self.norm = nn.BatchNorm2d(3)
            self.grouped = nn.Conv2d(4, 4, 3, groups=2)
            self.first = nn.Conv2d(3, 4, 3, bias=True)

        def forward(self, x):
            x = self.grouped(self.first(self.norm(x))).mean(dim=(2, 3))
            return self.last(self.last(x))

    model = Model()
    first, last = trace_architecture(model, (3, 8, 8))
    assert (first.name, first.a_dim, first.g_dim, first.rows) == ("first", 3 * 9 + 1, 4, 36)
    assert first.gradient_elements == 6 + (27 * 4 + 4) + (2 * 9 * 4 + 4)  # norm, itself, the grouped convolution
    assert (last.name, last.a_dim, last.rows, last.gradient_elements) == ("last", 5, 2, 20)
    assert model.training


def test_command_writes_json(tmp_path):
    main(["resnet18", "--output", str(tmp_path / "a.json")])
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["architectures"]["resnet18"]["layers"][0]["name"] == "conv1"


def test_cifar_resnets_have_the_published_sizes():
    # He et al. 2015, table 6: 0.27M, 0.46M, 0.85M parameters.
    sizes = [
        sum(p.numel() for p in build_model(n, num_classes=10).parameters())
        for n in ("resnet20", "resnet32", "resnet56")
    ]
    assert [round(size / 1e6, 2) for size in sizes] == [0.27, 0.46, 0.85]


def test_unknown_model_names_the_choices():
    with pytest.raises(ValueError, match=r"model.name='resnet19' is not one of: mlp, autoencoder, resnet20"):
        build_model("resnet19")
