"""Ranks that were started one by one (torchrun, srun) may have been given different options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.settings import ConfigError
from experiments.tracking.interface import flat
from kfac.communication import Communicator

_OF_HOSTS = ("data/path",)
"""Options that may differ: where a host has what."""


def require_same_options(options: Mapping[str, Any], communicator: Communicator) -> None:
    """Compare this rank's options, nested as in a configuration, with those of the others; collective.

    Raises:
        ConfigError: on every rank, naming the first key that differs.
    """
    mine = {key: value for key, value in flat(options).items() if key not in _OF_HOSTS}
    first, *others = communicator.all_gather_object(mine)
    for rank, other in enumerate(others, start=1):
        for key in dict.fromkeys((*first, *other)):
            if first.get(key) != other.get(key):
                raise ConfigError(
                    f"rank {rank} was given {key.replace('/', '.')}={other.get(key)}, rank 0 {first.get(key)}: "
                    "start every rank with the same options"
                )
