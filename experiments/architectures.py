"""What planning needs of an architecture, traced without computing or memory: dimensions, rows, gradients, FLOPs.

``python -m experiments.architectures resnet50 --output FILE`` writes it as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.models import MODEL_NAMES, TEXT_MODELS, build_model


@dataclass(frozen=True, kw_only=True)
class LayerArchitecture:
    """One Conv2d or Linear layer.

    Args:
        name: the module's name.
        a_dim: dimension of factor A: inputs of one output position, plus one with a bias.
        g_dim: dimension of factor G: output channels or features.
        rows: output positions of one sample (height times width of a convolution), the rows of its statistics.
        gradient_elements: parameters whose gradients are complete once the backward pass has gone through this layer
            and not before: its own and those of uncovered modules that run between it and the next covered layer.
        forward_flops: floating-point operations of one sample's forward pass (a multiply-add counts two).
    """

    name: str
    a_dim: int
    g_dim: int
    rows: int
    gradient_elements: int
    forward_flops: int

    @property
    def a_elements(self) -> int:
        """Elements of A's triangle with the diagonal, which is what travels."""
        return self.a_dim * (self.a_dim + 1) // 2

    @property
    def g_elements(self) -> int:
        """Elements of G's triangle with the diagonal."""
        return self.g_dim * (self.g_dim + 1) // 2


def trace_architecture(model: nn.Module, input_shape: Sequence[int]) -> list[LayerArchitecture]:
    """The Conv2d and Linear layers of a model in the order in which a forward pass runs them.

    Grouped convolutions have no single pair of factors and count as uncovered, like normalisations: their parameters
    add to ``gradient_elements`` of the covered layer that ran last before them (of the first one, if none did).

    Args:
        model: on the meta device, or any other (a batch of one is run in evaluation mode there).
        input_shape: ``(channels, height, width)`` of one image, or ``(positions,)`` of one text.
    """
    layers: dict[str, LayerArchitecture] = {}
    pending: list[int] = [0]
    seen: set[nn.Parameter] = set()

    def visit(name: str, module: nn.Module) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            own = [p for p in module.parameters(recurse=False) if p not in seen]
            seen.update(own)
            elements = sum(p.numel() for p in own)
            traced = _trace_layer(name, module, output)
            if traced is None:
                if layers:
                    last = next(reversed(layers.values()))
                    layers[last.name] = replace(last, gradient_elements=last.gradient_elements + elements)
                else:
                    pending[0] += elements
                return
            if name in layers:  # runs again: more rows and operations, no more parameters
                first = layers[name]
                flops = first.forward_flops + traced.forward_flops
                layers[name] = replace(first, rows=first.rows + traced.rows, forward_flops=flops)
                return
            layers[name] = replace(traced, gradient_elements=elements + pending[0])
            pending[0] = 0

        return hook

    handles = [
        module.register_forward_hook(visit(name, module))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    device = next(model.parameters()).device
    training = model.training
    try:
        with torch.no_grad():
            kind = torch.int64 if len(input_shape) == 1 else None  # tokens
            model.eval()(torch.zeros(1, *input_shape, dtype=kind, device=device))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return list(layers.values())


def _trace_layer(name: str, module: nn.Module, output: Tensor) -> LayerArchitecture | None:
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        rows = output.shape[-2] * output.shape[-1]
    elif isinstance(module, nn.Linear):
        rows = output.shape[1:-1].numel()
    else:
        return None
    g_dim, inputs = module.weight.shape[0], module.weight[0].numel()
    return LayerArchitecture(
        name=name,
        a_dim=inputs + (module.bias is not None),
        g_dim=g_dim,
        rows=rows,
        gradient_elements=0,
        forward_flops=2 * rows * inputs * g_dim,
    )


def describe_architecture(name: str, input_shape: Sequence[int] | None = None) -> dict[str, Any]:
    """The JSON form of a named model's architecture: its parameters and its layers in execution order.

    Without ``input_shape`` images are ImageNet's and texts as long as GPT-2's.
    """
    if input_shape is None:
        input_shape = (1024,) if name in TEXT_MODELS else (3, 224, 224)
    with torch.device("meta"):
        model = build_model(name, input_shape=input_shape)
    layers = trace_architecture(model, input_shape)
    return {
        "input_shape": list(input_shape),
        "parameters": sum(p.numel() for p in model.parameters()),
        "a_elements": sum(layer.a_elements for layer in layers),
        "g_elements": sum(layer.g_elements for layer in layers),
        "layers": [asdict(layer) for layer in layers],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the architectures of the named models as one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m experiments.architectures", description=main.__doc__)
    parser.add_argument("models", nargs="+", choices=MODEL_NAMES, metavar="MODEL", help=", ".join(MODEL_NAMES))
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args(arguments)
    described = {name: describe_architecture(name) for name in options.models}
    options.output.write_text(json.dumps({"schema": 1, "architectures": described}, indent=1) + "\n")


if __name__ == "__main__":
    main()
