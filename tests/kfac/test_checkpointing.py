"""Activation checkpointing: layers run again in the backward pass, and their statistics are counted once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from kfac import KFAC, KFACConfig
from tests.kfac.communicators import Recording, TwoRanks

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # under torch.no_grad

D = torch.float64
WIDTH, TOKENS, WORDS = 8, 5, 7
KINDS = ("plain", "reentrant", "non-reentrant")


class Block(nn.Module):
    """A transformer block without dropout; attention by hand, so that all of its layers run forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (2, -1)).transpose(1, 2).chunk(3, 3)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm2(x)), inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.feed(x)


class Nested(Block):
    """Segments within a segment."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.again(self.attend, x)
        return x + self.again(self.feed, x)


class Model(nn.Module):
    """A small GPT; ``where`` says what is checkpointed, ``shared`` lets one block run twice, in two segments."""

    def __init__(self, kind: str, where: str, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        make = Nested if where == "nested" else Block
        first = make()
        self.blocks = nn.ModuleList([first, first if shared else make()])
        self.head = nn.Linear(WIDTH, WORDS)
        self.kind, self.where = kind, where
        for block in self.blocks:
            block.again = self.again
        self.to(D)

    def again(self, function, x):
        if self.kind == "plain":
            return function(x)
        return checkpoint(function, x, use_reentrant=self.kind == "reentrant")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.where == "whole":
            return self.again(lambda x: self.head(self.blocks[1](self.blocks[0](x))), x)
        for block in self.blocks:
            x = self.again(block, x)
        if self.where == "head":
            return self.again(self.head, x)
        return self.head(x)


def train(
    kind: str, where: str = "blocks", *, shared=False, schedule="spdkfac", micro_batches=1, fisher="empirical", steps=3
) -> tuple[list[Tensor], Tensor, KFAC, dict[str, int]]:
    """All factors and parameters after some steps, and how often each linear layer ran forward in one pass."""
    model = Model(kind, where, shared)
    runs: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: runs.__setitem__(name, runs.get(name, 0) + 1))
    config = KFACConfig(accumulation_steps=micro_batches, fisher=fisher, kl_clip=1e-2)
    kfac = KFAC(model, config, schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, WORDS, (4, TOKENS + 1), generator=generator)
        with torch.no_grad():
            model(tokens)  # validation, which checkpoints nothing
        runs.clear()
        torch.manual_seed(step)
        optimizer.zero_grad()
        for part in tokens.chunk(micro_batches):
            logits, y = model(part[:, :-1]).movedim(-1, 1), part[:, 1:]
            with kfac.curvature(logits, "classification", 1 / micro_batches, targets=y):
                (F.cross_entropy(logits, y) / micro_batches).backward()
        kfac.step()
        optimizer.step()
    factors = [kfac.factor(layer.name, side) for layer in kfac.layers for side in "AG"]
    return factors, nn.utils.parameters_to_vector(model.parameters()).detach(), kfac, runs


def same(a, b) -> None:
    for ours, expected in zip(a[0], b[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(a[1], b[1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("where", ["blocks", "nested", "whole", "head"])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_statistics_are_those_without_checkpoints(kind, where):
    for micro_batches in (1, 2):
        plain = train("plain", where, micro_batches=micro_batches)
        ours = train(kind, where, micro_batches=micro_batches)
        same(ours, plain)
        first = next(name for name in plain[3] if name.endswith("blocks.0.up"))
        assert ours[3][first] > plain[3][first], "the layers did not run again, and this test says nothing"


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_block_that_is_used_in_two_segments_sums_its_uses(kind, micro_batches):
    """With reentrant checkpoints the second use runs, and is differentiated, after the first one's backward pass."""
    plain = train("plain", shared=True, micro_batches=micro_batches)
    ours = train(kind, shared=True, micro_batches=micro_batches)
    same(ours, plain)
    once = train("plain", shared=False)
    assert len(once[0]) > len(plain[0])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_without_early_stop_layers_run_to_their_end_again(kind):
    with set_checkpoint_early_stop(False):
        same(train(kind, "blocks"), train("plain", "blocks"))


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_fisher_passes_go_through_checkpoints(fisher):
    same(train("non-reentrant", fisher=fisher, steps=2), train("plain", fisher=fisher, steps=2))


def test_fisher_passes_through_reentrant_checkpoints_are_refused_by_torch():
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        train("reentrant", fisher="mc")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_leave_within_the_backward_pass(kind):
    """Also where the forward pass that counts is within it: statistics do not wait for step()."""
    log, model = Recording(TwoRanks()), Model(kind, "blocks", shared=True)
    kfac = KFAC(model, KFACConfig(), "spdkfac", average_gradients=True, communicator=log)
    for step in range(2):
        log.sent.clear()
        tokens = torch.randint(0, WORDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).movedim(-1, 1), tokens[:, 1:])
        loss.backward()
        end = len(log.sent)
        kfac.step()
    before = sum(one.kind == "FactorComm" for one in log.sent[:end])
    assert before == sum(one.kind == "FactorComm" for one in log.sent) > 1
