"""The emulated network itself: its rate, its isolation, and that nothing of it stays behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.netns import PREFIX, NetworkError, emulated_network

pytestmark = pytest.mark.netns

ALL_REDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.ones(1_000_000)
dist.all_reduce(data)
dist.barrier()
start = time.perf_counter()
dist.all_reduce(data)
seconds = time.perf_counter() - start
assert (data == 4).all()
print(data.numel() * data.element_size() * 8 / seconds / 1e6)
dist.destroy_process_group()
"""


def namespaces() -> list[str]:
    folder = Path("/run/netns")
    return [path.name for path in folder.glob(f"{PREFIX}{os.getpid()}-*")] if folder.is_dir() else []


def test_an_all_reduce_runs_at_the_rate_of_the_link():
    # Two ranks each send as many bytes as they reduce. Wide margins: this tests the emulation, not the machine's speed.
    with emulated_network(2, rate_mbit_s=100) as network:
        limited = [float(output) for output in network.run([sys.executable, "-c", ALL_REDUCE], timeout_s=120)]
        network.limit(None)
        unlimited = [float(output) for output in network.run([sys.executable, "-c", ALL_REDUCE], timeout_s=120)]
    assert all(50 < rate < 200 for rate in limited)
    assert all(rate > 200 for rate in unlimited)  # so it was the limit that held the others
    assert namespaces() == []


def test_hosts_reach_each_other_and_nothing_else():
    with emulated_network(2) as network:
        first, second = network.hosts
        links = subprocess.run(
            ["ip", "-n", first.namespace, "-o", "link"], capture_output=True, text=True, check=True
        ).stdout
        routes = subprocess.run(
            ["ip", "-n", second.namespace, "route"], capture_output=True, text=True, check=True
        ).stdout
    assert [line.split()[1].split("@")[0].rstrip(":") for line in links.splitlines()] == ["lo", "eth0"]
    assert "default" not in routes


def test_a_failing_rank_ends_the_others_and_the_network_goes():
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no luck')\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(NetworkError, match="rank 1 ended with exit status 1:\nno luck"), emulated_network(2) as network:
        network.run([sys.executable, "-c", script])
    assert time.monotonic() - start < 30  # not the 60 s of the other rank
    assert namespaces() == []


def test_leftovers_of_a_killed_process_are_removed():
    script = (
        "import os, signal\nfrom benchmarks.netns import emulated_network\n"
        "with emulated_network(1) as n: print(n.hosts[0].namespace, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout.strip()
    assert Path("/run/netns", left).exists()
    with emulated_network(1):
        assert not Path("/run/netns", left).exists()


@pytest.mark.parametrize("world_size", [0, 251])
def test_impossible_sizes(world_size):
    with pytest.raises(ValueError, match="world_size"), emulated_network(world_size):
        pass
