"""A stand-in for W&B's server."""

from tests.wandb_server.server import DROP, Request, WandbServer

__all__ = ["DROP", "Request", "WandbServer"]
