"""The transformers and the autoencoder against published sizes, torch's own modules and their definitions."""

import pytest
import torch
import torchvision
from torch import nn

from experiments.architectures import describe_architecture
from experiments.models import autoencoder, build_model
from experiments.transformers import GPT, Block, SelfAttention, VisionTransformer


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def small_gpt(**changes):
    torch.manual_seed(0)
    return GPT(**{"vocabulary": 11, "context": 8, "depth": 2, "width": 12, "heads": 3, **changes}).double()


def test_gpt_has_the_published_number_of_parameters():
    with torch.device("meta"):  # GPT-2's smallest: 124M
        model = GPT(50257, 1024, depth=12, width=768, heads=12, tied=True)
    assert parameters(model) == 124_439_808


@pytest.mark.parametrize(("pooling", "fewer"), [("class", 0), ("mean", 768 + 768)])
def test_vit_has_as_many_parameters_as_torchvisions(pooling, fewer):
    with torch.device("meta"):
        ours = VisionTransformer((3, 224, 224), 1000, patch_size=16, depth=12, width=768, heads=12, pooling=pooling)
        theirs = torchvision.models.vit_b_16()
    assert parameters(ours) == parameters(theirs) - fewer  # the class token and its position


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_torchs(causal):
    torch.manual_seed(1)
    ours, x = SelfAttention(12, 3, causal=causal).double(), torch.randn(4, 5, 12, dtype=torch.float64)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    expected, _ = theirs(x, x, x, attn_mask=mask if causal else None)
    assert torch.allclose(ours(x), expected, atol=1e-12)
    unmasked, _ = theirs(x, x, x, attn_mask=None if causal else mask)
    assert not torch.allclose(ours(x), unmasked, atol=1e-3)


def test_a_block_is_two_shortcuts_around_normalised_parts():
    torch.manual_seed(2)
    block, x = Block(8, 2, causal=True).double(), torch.randn(2, 3, 8, dtype=torch.float64)
    y = x + block.attention(nn.functional.layer_norm(x, (8,)))
    hidden = nn.functional.gelu(block.mlp[0](nn.functional.layer_norm(y, (8,))))
    assert torch.allclose(block(x), y + block.mlp[2](hidden), atol=1e-12)


def test_gpt_sees_the_past_only():
    model = small_gpt()
    tokens = torch.randint(0, 11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 11, 8)
    assert torch.equal(before[..., :5], after[..., :5])
    assert all((before[..., t] - after[..., t]).abs().max() > 1e-6 for t in (5, 6, 7))
    shorter = model(tokens[:, :3])
    assert torch.allclose(shorter, before[..., :3], atol=1e-12)


def test_a_tied_head_shares_its_weight():
    tied, untied = small_gpt(tied=True), small_gpt()
    assert parameters(untied) - parameters(tied) == 11 * 12
    assert tied.head.weight is tied.token_embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())


def test_residual_outputs_start_smaller():
    model = small_gpt(width=240, depth=8)
    assert model.blocks[0].mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[0].mlp[2].weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.blocks[3].attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)


def test_vit_knows_where_a_patch_is():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    moved = images.roll(4, dims=3)  # the same patches at other places
    for pooling in ("class", "mean"):
        model = VisionTransformer((3, 8, 8), 10, patch_size=4, depth=1, width=8, heads=2, pooling=pooling)
        assert model(images).shape == (2, 10)
        assert not torch.allclose(model(images), model(moved), atol=1e-6)
        nn.init.zeros_(model.positions)
        assert torch.allclose(model(images), model(moved), atol=1e-6)
    with pytest.raises(ValueError, match=r"model\.patch_size=3 does not divide images of 8x8 pixels"):
        VisionTransformer((3, 8, 8), 10, patch_size=3, depth=1, width=8, heads=2)


@pytest.mark.parametrize(("activation", "function"), [("tanh", torch.tanh), ("sigmoid", torch.sigmoid)])
def test_the_autoencoder_is_mirrored_around_a_linear_code(activation, function):
    model = autoencoder((1, 8, 8), (128, 64, 32, 8), activation).double()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    assert [m.in_features for m in layers] == [64, 128, 64, 32, 8, 32, 64, 128]
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    y = x.flatten(1)
    for number, layer in enumerate(layers):
        y = layer(y) if number in (3, 7) else function(layer(y))
    assert torch.equal(model(x), y.view(3, 1, 8, 8))


@pytest.mark.parametrize(("name", "shape"), [("gpt", (16,)), ("vit", (3, 16, 16)), ("autoencoder", (1, 8, 8))])
def test_architectures_of_the_small_models(name, shape):
    described = describe_architecture(name, shape)
    covered = [layer["name"] for layer in described["layers"]]
    model = build_model(name, input_shape=shape)
    expected = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert set(covered) == expected
    assert described["parameters"] == parameters(model)


def test_texts_are_described_at_gpt2s_length():
    assert describe_architecture("gpt")["input_shape"] == [1024]
