"""A checkpoint is whole or does not count; the last few stay."""

import json
import logging

import pytest
import torch

from experiments.checkpoints import COMMIT, Checkpoints
from kfac.communication import LocalCommunicator

CPU = torch.device("cpu")


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, LocalCommunicator(), keep=2)


def save(checkpoints, iteration):
    checkpoints.save(iteration, {"weight": torch.full((2,), float(iteration))}, {"random": torch.tensor(iteration)})


def test_the_last_ones_stay_and_the_last_counts(checkpoints, tmp_path):
    assert checkpoints.load(CPU) is None
    for iteration in (5, 999_999, 1_000_000):
        save(checkpoints, iteration)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter1000000", "iter999999"]
    iteration, shared, own = checkpoints.load(CPU)
    assert (iteration, shared["weight"].tolist(), int(own["random"])) == (1_000_000, [1e6, 1e6], 1_000_000)


DAMAGED_COMMITS = ("[]", '{"files": {}}', '{"files": {}, "world_size": 1, "iteration": 2}')


@pytest.mark.parametrize(
    "damage", ["uncommitted", "cut", "flipped", "missing", "other world", "no JSON", *DAMAGED_COMMITS]
)
def test_a_damaged_one_falls_back_to_the_one_before(checkpoints, tmp_path, caplog, damage):
    save(checkpoints, 1)
    save(checkpoints, 2)
    target = tmp_path / "iter000002"
    file = target / "shared.pt"
    data = bytearray(file.read_bytes())
    if damage == "uncommitted":
        (target / COMMIT).unlink()
    elif damage == "cut":
        file.write_bytes(data[:-10])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "missing":
        (target / "rank0.pt").unlink()
    elif damage == "other world":
        commit = json.loads((target / COMMIT).read_text())
        (target / COMMIT).write_text(json.dumps({**commit, "world_size": 2}))
    else:
        (target / COMMIT).write_text("{" if damage == "no JSON" else damage)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.load(CPU)[0] == 1
    assert ("iter000002" in caplog.text) == (damage != "uncommitted")
    save(checkpoints, 2)
    assert checkpoints.load(CPU)[0] == 2


def test_whole_ones_of_other_ranks_are_not_called_damaged(checkpoints, tmp_path, caplog):
    for iteration in (1, 2):
        save(checkpoints, iteration)
    target = tmp_path / "iter000002"
    commit = json.loads((target / COMMIT).read_text())
    (target / "rank1.pt").write_bytes((target / "rank0.pt").read_bytes())
    commit["files"]["rank1.pt"] = commit["files"]["rank0.pt"]
    (target / COMMIT).write_text(json.dumps({**commit, "world_size": 2}))
    assert checkpoints.load(CPU)[0] == 1
    assert "iter000002 is left out: it is of 2 ranks, and these are 1" in caplog.text
    assert "damaged" not in caplog.text


def test_those_beyond_what_the_record_holds_are_left_out(checkpoints, tmp_path, caplog):
    for iteration in (10, 20):
        save(checkpoints, iteration)
    (tmp_path / "iterfoo").mkdir()
    (tmp_path / "iterfoo" / COMMIT).write_text("{}")
    assert checkpoints.load(CPU, 20)[0] == 20
    assert caplog.text == ""
    assert checkpoints.load(CPU, 19)[0] == 10
    assert "iter000020 is left out: the metrics of iteration 19 are lost" in caplog.text
    assert checkpoints.load(CPU, 9) is None
    save(checkpoints, 5)  # from the beginning: the new one stays, the ones that were left out go
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter000005", "iterfoo"]


def test_a_full_disk_leaves_nothing_and_is_told_once(checkpoints, tmp_path, monkeypatch):
    save(checkpoints, 1)

    def full(state, file):
        file.write(b"half of it")
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 (as torch does)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"rank0\.pt cannot be written: .*No space left on device") as caught:
        save(checkpoints, 2)
    assert caught.value.__suppress_context__
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["iter000001"]
    assert checkpoints.load(CPU)[0] == 1
