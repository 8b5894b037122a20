"""The models one can train, profile or simulate: small ones of our own, the paper's four from torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.transformers import GPT, VisionTransformer

TORCHVISION_MODELS = ("resnet18", "resnet50", "resnet152", "densenet201")
CIFAR_RESNETS = {"resnet20": 3, "resnet32": 5, "resnet56": 9}
"""Blocks per stage of the ResNets for 32x32 images: depth ``6 n + 2``."""
AUTOENCODER = "autoencoder"
TEXT_MODELS = ("gpt",)
"""Those whose inputs are tokens."""
MODEL_NAMES = ("mlp", AUTOENCODER, *CIFAR_RESNETS, *TEXT_MODELS, "vit", *TORCHVISION_MODELS, "inceptionv4")
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
"""Of the autoencoder."""
POOLINGS = ("class", "mean")
"""Of the vision transformer."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut that has no parameters (He et al. 2015, section 4.2, option A).

    Args:
        inputs: channels of the input.
        outputs: channels of the output; where they grow, the shortcut pads with zeros and takes every second pixel.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.grown = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, inputs, height, width]`` to ``[batch, outputs, height / stride, width / stride]``."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.grown:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.grown // 2, self.grown - self.grown // 2))
        return F.relu(residual + x)


class CifarResNet(nn.Module):
    """The ResNet of depth ``6 blocks + 2`` for 32x32 images (He et al. 2015, section 4.2).

    Args:
        blocks: residual blocks in each of the three stages of 16, 32 and 64 channels.
        num_classes: outputs of the classifier.
        channels: channels of the images.
    """

    def __init__(self, blocks: int, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks)
        self.layer2 = _stage(16, 32, blocks)
        self.layer3 = _stage(32, 64, blocks)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` to logits ``[batch, num_classes]``."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs), *(BasicBlock(outputs, outputs) for _ in range(blocks - 1)))


def mlp(inputs: int, hidden: Sequence[int], num_classes: int) -> nn.Sequential:
    """A multi-layer perceptron with ReLU over flattened images of ``inputs`` numbers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Linear(inputs, num_classes))


def autoencoder(input_shape: Sequence[int], hidden: Sequence[int], activation: str) -> nn.Sequential:
    """The deep autoencoder of Hinton and Salakhutdinov 2006: fully connected, the decoder mirrors the encoder.

    Outputs are logits of the images' shape. The code is linear, as theirs. Weights are Glorot's (2010), because layers
    of sigmoids or tanh this deep do not start to learn from torch's smaller ones.

    Args:
        input_shape: ``(channels, height, width)`` of an image.
        hidden: widths of the encoder's layers; the last is the code.
        activation: one of :data:`ACTIVATIONS`.
    """
    widths = [torch.Size(input_shape).numel(), *hidden]
    widths += reversed(widths[:-1])
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        layer = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers.append(layer)
        if number not in (len(hidden), len(widths) - 1):
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers, nn.Unflatten(1, tuple(input_shape)))


def build_model(
    name: str,
    *,
    num_classes: int = 1000,
    input_shape: Sequence[int] = (3, 224, 224),
    hidden: Sequence[int] = (128, 128),
    activation: str = "tanh",
    depth: int = 4,
    width: int = 128,
    heads: int = 4,
    tied: bool = False,
    patch_size: int = 4,
    pooling: str = "class",
) -> nn.Module:
    """A freshly initialised model, from torch's global random state.

    Args:
        name: one of :data:`MODEL_NAMES`.
        num_classes: outputs; of ``gpt`` the vocabulary.
        input_shape: ``(channels, height, width)`` of one image, or ``(positions,)`` of one text.
        hidden: widths of the hidden layers of ``mlp``, or of the encoder of ``autoencoder``.
        activation: of ``autoencoder``.
        depth, width, heads: of ``gpt`` and ``vit``.
        tied: of ``gpt``.
        patch_size, pooling: of ``vit``.

    Raises:
        ValueError: for an unknown name, or a package that is not installed, naming it.
    """
    if name == "mlp":
        return mlp(torch.Size(input_shape).numel(), hidden, num_classes)
    if name == AUTOENCODER:
        return autoencoder(input_shape, hidden, activation)
    if name == "gpt":
        return GPT(num_classes, input_shape[0], depth=depth, width=width, heads=heads, tied=tied)
    if name == "vit":
        return VisionTransformer(
            input_shape,
            num_classes,
            patch_size=patch_size,
            depth=depth,
            width=width,
            heads=heads,
            pooling=pooling,
        )
    if name in CIFAR_RESNETS:
        return CifarResNet(CIFAR_RESNETS[name], num_classes, input_shape[0])
    if name in TORCHVISION_MODELS or name == "inceptionv4":
        return _from_a_package(name, num_classes)
    raise ValueError(f"model.name={name!r} is not one of: {', '.join(MODEL_NAMES)}")


def _from_a_package(name: str, num_classes: int) -> nn.Module:
    if name == "inceptionv4":
        try:
            import timm
        except ImportError as error:
            raise ValueError("model.name=inceptionv4 needs timm: pip install 'spdkfac[paper]'") from error
        inception: nn.Module = timm.create_model("inception_v4", num_classes=num_classes)
        return inception
    import torchvision

    build: Callable[..., nn.Module] = getattr(torchvision.models, name)
    return build(weights=None, num_classes=num_classes)
