"""How ranks find each other, and what they say when some do not come."""

import multiprocessing
import os
import socket
from datetime import timedelta

import pytest

from experiments.rendezvous import (
    Meeting,
    RendezvousError,
    candidates,
    chosen_interface,
    interfaces,
    meeting_address,
    register,
)

KNOWN = {"lo": "127.0.0.1", "eth0": "10.1.0.4", "ib0": "10.2.0.4"}


def test_the_launching_node_s_address_comes_first_and_loopback_last():
    assert candidates({"SLURM_LAUNCH_NODE_IPADDR": "10.2.0.4"}, KNOWN) == ["10.2.0.4", "10.1.0.4", "127.0.0.1"]
    assert candidates({"SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"}, KNOWN) == ["10.1.0.4", "10.2.0.4", "127.0.0.1"]
    assert candidates({}, KNOWN, "ib0") == ["10.2.0.4"]
    with pytest.raises(RendezvousError, match=r"site.interface=ib7: .* it has eth0, ib0, lo"):
        candidates({}, KNOWN, "ib7")


def entry(host, address, own):
    return {"host": host, "address": address, "own": own}


def test_each_node_uses_the_network_on_which_it_met_the_first():
    ranks = [
        entry("a", "10.1.0.4", "10.1.0.4"),  # rank 0 offered eth0 first
        entry("a", "10.1.0.4", "10.1.0.4"),  # its neighbour took that
        entry("b", "10.2.0.4", "10.2.0.5"),  # the other node only came through on ib0
    ]
    other = {"lo": "127.0.0.1", "mgmt": "10.1.9.9", "ibp1s0": "10.2.0.5"}
    assert chosen_interface(0, ranks, KNOWN) == "ib0"
    assert chosen_interface(1, ranks, KNOWN) == "ib0"
    assert chosen_interface(2, ranks, other) == "ibp1s0"
    assert chosen_interface(0, ranks[:2], KNOWN) == "lo"
    assert chosen_interface(2, ranks, {"lo": "127.0.0.1"}) is None


def test_interfaces_are_the_system_s():
    assert interfaces()["lo"] == "127.0.0.1"


def _join(rank, world_size, file, timeout_s, answers, interface=None):
    import torch
    from torch import distributed

    register()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    try:
        address = meeting_address(file, timeout_s, interface)
        limit = timedelta(seconds=30)
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=limit)
        total = torch.ones(1)
        distributed.all_reduce(total)
        answers.put((rank, f"{total.item():g} on {os.environ['GLOO_SOCKET_IFNAME']}"))
        distributed.barrier()
    except RendezvousError as error:
        answers.put((rank, str(error)))


def meet(file, ranks, timeout_s, interface=None):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_join, args=(r, 3, file, timeout_s, answers, interface)) for r in ranks]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=60) for _ in ranks)
    for process in processes:
        process.join()
    return found


def test_three_ranks_meet_although_an_earlier_start_left_its_file(tmp_path):
    file = tmp_path / "a b%c"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    file.write_text(f'{{"host": "{socket.gethostname()}", "addresses": ["127.0.0.1"], "port": {port}}}')
    assert meet(file, (0, 1, 2), 30.0) == dict.fromkeys(range(3), "3 on lo")
    assert not file.exists()


def test_every_rank_names_those_that_did_not_come(tmp_path):
    found = meet(tmp_path / "file", (0, 1), 1.0)
    assert all(text.startswith("of 3 ranks these did not come within 1 s: 2.") for text in found.values()), found
    found = meet(tmp_path / "other", (1, 2), 0.5)
    assert all("waited 0.5 s for rank 0, which left no word in" in text for text in found.values()), found
    found = meet(tmp_path / "third", (0, 1, 2), 5.0, "nonsense0")
    assert all("site.interface=nonsense0" in text for text in found.values()), found


def test_an_address_that_nobody_answers_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.rendezvous.CONNECT_PATIENCE_S", 0.0)
    file = tmp_path / "file"
    file.write_text('{"host": "elsewhere", "addresses": ["127.0.0.1"], "port": 1}')
    with pytest.raises(RendezvousError, match=r"cannot reach rank 0 on elsewhere, port 1 .*site.interface=NAME"):
        Meeting(file, 1, 2, 5.0, None).store()
