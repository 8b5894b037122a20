"""What the tests of analysis share."""

from tests.wandb_server.fixtures import server, wandb_client

__all__ = ["server", "wandb_client"]
