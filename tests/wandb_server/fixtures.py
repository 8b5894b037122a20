"""The server as a fixture: the real client talks to it, and a call that it does not know fails the test by name."""

from contextlib import suppress

import pytest

from tests.wandb_server import WandbServer

KEY = "0123456789abcdef" * 2 + "01234567"
FOLDERS = ("DATA", "CACHE", "ARTIFACT", "CONFIG")


@pytest.fixture
def wandb_client(tmp_path, monkeypatch):
    """W&B's client with a home of its own and without settings of the machine; restored after the test."""
    wandb = pytest.importorskip("wandb")
    for name in FOLDERS:
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home" / name.lower()))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "home").mkdir()
    end_service(wandb)  # so that it reads the variables
    yield wandb
    end_service(wandb)


def end_service(wandb):
    """Ends W&B's process, unless a test has killed it."""
    with suppress(ConnectionError):
        wandb.teardown(exit_code=0)


@pytest.fixture
def server(monkeypatch, wandb_client):
    """A :class:`WandbServer` to which the client of this process, and of those it starts, is logged in."""
    server = WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    end_service(wandb_client)
    yield server
    server.fault = lambda request: None
    server.delay_s = 0.0
    end_service(wandb_client)
    server.close()
    assert not server.unknown, f"not known to the stand-in server: {server.unknown}"
