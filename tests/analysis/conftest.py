"""What the tests of analysis share."""

from tests.analysis.questions import runs
from tests.wandb_server.fixtures import server, wandb_client

__all__ = ["runs", "server", "wandb_client"]
