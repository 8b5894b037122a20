"""Small transformers: a GPT-2-style decoder for text and a vision transformer for images, of the same blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.02
"""Of weights and embeddings, as in GPT-2 (Radford et al. 2019) and ViT's published code."""


class SelfAttention(nn.Module):
    """Multi-head self-attention whose queries, keys and values come from one Linear.

    Args:
        width: features, a multiple of ``heads``.
        heads: attention heads.
        causal: whether a position sees itself and those before it only.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, positions, width]`` to the same shape."""
        batch, positions, width = x.shape
        q, k, v = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron four times as wide, each behind a LayerNorm and around a shortcut."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=causal)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, positions, width]`` to the same shape."""
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder in the form of GPT-2 (Radford et al. 2019): LayerNorm first, learned positions, causal attention.

    Args:
        vocabulary: different tokens.
        context: positions of the longest sequence.
        depth: blocks.
        width: features, a multiple of ``heads``.
        heads: attention heads of each block.
        tied: whether the head shares its weight with the token embedding (GPT-2 does).
    """

    def __init__(
        self, vocabulary: int, context: int, *, depth: int, width: int, heads: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        _initialise(self, depth)
        if tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[batch, positions]`` to the logits of their successors ``[batch, vocabulary, positions]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """An encoder of image patches (Dosovitskiy et al. 2021).

    Args:
        input_shape: ``(channels, height, width)`` of an image.
        num_classes: outputs of the classifier.
        patch_size: pixels of a square patch's side; height and width are multiples of it.
        depth, width, heads: as of :class:`GPT`.
        pooling: ``class``: classify what becomes of an added token; ``mean``: the mean over the patches.

    Raises:
        ValueError: if patches do not tile the image.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        *,
        patch_size: int,
        depth: int,
        width: int,
        heads: int,
        pooling: str = "class",
    ) -> None:
        super().__init__()
        channels, *sides = input_shape
        if any(side % patch_size for side in sides):
            raise ValueError(f"model.patch_size={patch_size} does not divide images of {sides[0]}x{sides[1]} pixels")
        self.patch_embedding = nn.Conv2d(channels, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if pooling == "class" else None
        patches = math.prod(side // patch_size for side in sides)
        self.positions = nn.Parameter(torch.empty(1, patches + (pooling == "class"), width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        _initialise(self, depth)
        nn.init.normal_(self.positions, std=INITIAL_STD)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` to logits ``[batch, num_classes]``."""
        x = self.patch_embedding(x).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1)
        x = self.norm(self.blocks(x + self.positions))
        return self.head(x.mean(1) if self.class_token is None else x[:, 0])  # type: ignore[no-any-return]


def _initialise(model: nn.Module, depth: int) -> None:
    """Normal weights and zero biases; what ends in a shortcut is scaled down by the root of their number (GPT-2)."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            residual = name.endswith(("attention.out", "mlp.2"))
            nn.init.normal_(module.weight, std=INITIAL_STD / math.sqrt(2 * depth) if residual else INITIAL_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
