"""Which samples a rank sees in which iteration: a pure function of seed and iteration, so that resuming is exact."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A seed for a generator that depends on all parts and on nothing else, below 2**63."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch)))


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Every epoch is a new permutation, cut into global batches, each cut into one batch for each rank.

    The samples of a global batch depend on ``batch_size * world_size`` only, not on how it is split: two ranks with 16
    samples see what one rank with 32 sees. Images that do not fill a last global batch are left out of the epoch.

    Args:
        size: number of training samples.
        batch_size: samples per rank and iteration.
        rank, world_size: of this process.
        seed: of the permutations.
    """

    size: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0

    @property
    def iterations_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return self.size // (self.batch_size * self.world_size)

    def indices(self, iteration: int) -> Tensor:
        """The samples of this rank in an iteration (counted from 0 over all epochs), ``[batch_size]``."""
        epoch, step = divmod(iteration, self.iterations_per_epoch)
        start = (step * self.world_size + self.rank) * self.batch_size
        return _permutation(self.size, self.seed, epoch)[start : start + self.batch_size]
