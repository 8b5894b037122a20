"""How many nodes a run asks for, and how its ranks are spread over them. Imports nothing large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from experiments.settings import ConfigError, at_least, read


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What the ranks of a job are spread over: ``nodes`` of them, and how many ranks (one per GPU) fit on one.

    None leaves it open: as many nodes as the ranks need, all ranks on one node.
    """

    nodes: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            at_least(name, value, 1, high=1_000_000)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Nodes:
        """Those of a plain configuration: what its own keys leave open, its ``site`` says.

        Raises:
            ConfigError: for impossible values.
        """
        site = data.get("site") or {}
        return read(cls, {key: site.get(key) if (value := data.get(key)) is None else value for key in KEYS})

    @property
    def most(self) -> int | None:
        """How many ranks fit on a node; None: any number."""
        return min((limit for limit in (self.gpus_per_node, self.tasks_per_node) if limit), default=None)

    @property
    def world_size(self) -> int:
        """The number of ranks that fills them; 1 where it is open how many nodes there are."""
        return self.nodes * (self.most or 1) if self.nodes else 1

    def layout(self, world_size: int) -> tuple[int, int]:
        """Nodes and ranks per node whose product is ``world_size``.

        Raises:
            ConfigError: if the ranks cannot be spread evenly.
        """
        most = min(self.most or world_size, world_size)
        nodes = self.nodes or math.ceil(world_size / most)
        per_node, rest = divmod(world_size, nodes)
        if rest or not 1 <= per_node <= most:
            asked = ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value)
            raise ConfigError(f"world_size={world_size} does not spread evenly over nodes with {asked}")
        return nodes, per_node


KEYS = tuple(Nodes.__dataclass_fields__)
