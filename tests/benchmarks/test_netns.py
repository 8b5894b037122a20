"""The emulated network itself: its rate, its isolation, and that nothing of it stays behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.netns import PREFIX, NetworkError, emulated_network
from benchmarks.ranks import Ranks

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
        with Ranks(network, [sys.executable, "-c", ALL_REDUCE]) as ranks:
            limited = ranks.answers(120)
        network.limit(None)
        with Ranks(network, [sys.executable, "-c", ALL_REDUCE]) as ranks:
            unlimited = ranks.answers(120)
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
    with (
        pytest.raises(NetworkError, match="rank 1 ended with exit status 1:\nno luck"),
        emulated_network(2) as network,
        Ranks(network, [sys.executable, "-c", script]) as ranks,
    ):
        ranks.answers()
    assert time.monotonic() - start < 30  # not the 60 s of the other rank
    assert namespaces() == []


OBEDIENT = """
from benchmarks.ranks import obey, sent_bytes
import os, socket, time
def send(size):
    print("no answer")
    before = sent_bytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(bytes(size), (os.environ["MASTER_ADDR"], 9) if os.environ["RANK"] != "0" else ("10.77.0.2", 9))
    return sent_bytes() - before
obey({"rank": lambda: int(os.environ["RANK"]), "port": lambda: os.environ["MASTER_PORT"], "send": send,
      "sleep": lambda: time.sleep(60)})
"""


def test_ranks_obey_and_wait():
    """Two groups of processes on the same hosts: answers in rank order, ports of their own, bytes as the host sent."""
    program = [sys.executable, "-c", OBEDIENT]
    with emulated_network(2) as network, Ranks(network, program) as one, Ranks(network, program, port=4711) as other:
        assert one.ask("rank") == other.ask("rank") == [0, 1]
        assert [one.ask("port")[0], other.ask("port")[0]] == ["29500", "4711"]
        for sent in one.ask("send", size=60_000):
            assert 60_000 <= sent < 64_000  # headers, and what hosts say when they are new
        with pytest.raises(NetworkError, match=r"no answer of rank\(s\) \[0, 1\] within 0 s"):
            one.ask("sleep", 0.2)


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
