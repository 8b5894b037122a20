"""Ranks that were given different options say which, everywhere, and hold nobody up."""

import os
import socket
import subprocess
import sys

import pytest

from experiments.agreement import require_same_options
from experiments.settings import ConfigError


class Others:
    """A communicator of ranks that were given these options."""

    def __init__(self, *everyone):
        self.everyone = everyone

    def all_gather_object(self, mine):
        assert mine == self.everyone[0]
        return list(self.everyone)


def test_the_first_key_that_differs_is_named():
    mine = {"kfac": {"damping": 0.1}, "iterations": 5}
    flat = {"kfac/damping": 0.1, "iterations": 5}
    require_same_options(mine, Others(flat, dict(flat)))
    for other, said in (
        ({**flat, "kfac/damping": 0.2}, "rank 2 was given kfac.damping=0.2, rank 0 0.1"),
        ({"kfac/damping": 0.1}, "rank 2 was given iterations=None, rank 0 5"),
        ({**flat, "seed": 1}, "rank 2 was given seed=1, rank 0 None"),
    ):
        with pytest.raises(ConfigError, match=f"{said}: start every rank with the same options"):
            require_same_options(mine, Others(flat, flat, other))


def test_hosts_may_have_the_data_elsewhere():
    require_same_options({"data": {"path": "/a", "name": "digits"}}, Others({"data/name": "digits"}))


@pytest.mark.parametrize("module", ["train", "profile"])
def test_ranks_started_one_by_one_end_with_the_key(tmp_path, module):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = ["world_size=2", "model=mlp", "data=digits", "device=cpu"]
    started = []
    for rank in range(2):
        own = [f"batch_size={16 + rank}", *([f"output={tmp_path}/out{rank}"] if module == "profile" else [])]
        environment = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        }
        command = [sys.executable, "-m", f"experiments.{module}", *both, *own]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    for process in started:
        said = process.communicate(timeout=120)[0].decode()
        assert process.returncode not in (0, None), said
        assert "rank 1 was given batch_size=17, rank 0 16: start every rank with the same options" in said
        assert "Traceback" not in said
