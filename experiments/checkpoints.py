"""Checkpoints of all ranks at one iteration: whole or not there, verified, the last few kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from experiments.patience import patiently
from experiments.records import write_json
from kfac.communication import Communicator

T = TypeVar("T")
logger = logging.getLogger(__name__)

COMMIT = "commit.json"
SHARED = "shared.pt"
_FOLDER = re.compile(r"iter(\d+)")


class Checkpoints:
    """The checkpoints of a run.

    One is a folder ``iter000100`` with ``shared.pt`` (what is the same on all ranks, by rank 0), ``rankN.pt`` (each
    rank's own), and last of all ``commit.json`` with the files' digests: without it the folder does not count.

    Args:
        folder: on a file system that all ranks see.
        communicator: the ranks.
        keep: how many stay.
        patience_s: for how long a file system that is away or full is waited for.
    """

    def __init__(self, folder: Path, communicator: Communicator, keep: int = 2, patience_s: float = 0.0) -> None:
        self.folder = folder
        self._patience_s = patience_s
        self._communicator = communicator
        self._keep = keep

    def save(self, iteration: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Save the state before ``iteration``; collective.

        Args:
            iteration: the next one to run.
            shared: rank 0's is saved.
            own: every rank's is saved.

        Raises:
            OSError: if it cannot be written; nothing of it is left then.
        """
        target = self.folder / f"iter{iteration:06d}"
        try:
            self._save(target, iteration, shared, own)
        except OSError:
            shutil.rmtree(target, ignore_errors=True)  # on a full disk it is in the way of the record
            raise

    def _save(self, target: Path, iteration: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
        rank = self._communicator.rank
        if rank == 0:
            # Left over from a run that was killed while it saved: its files would not match the new ones.
            shutil.rmtree(target, ignore_errors=True)
            self._patiently(lambda: self._make(target))
        self._communicator.barrier()
        digests = {f"rank{rank}.pt": self._save_and_digest(target / f"rank{rank}.pt", own)}
        if rank == 0:
            digests[SHARED] = self._save_and_digest(target / SHARED, shared)
        everyone = self._communicator.all_gather_object(digests)
        if rank == 0:
            files = {name: digest for part in everyone for name, digest in part.items()}
            world_size = self._communicator.world_size
            commit = {"iteration": iteration, "world_size": world_size, "files": files}
            self._patiently(lambda: write_json(target / COMMIT, commit))
            # A later one was left out when the run was continued from an earlier one, or from its beginning.
            there = self._committed()
            later = [path for path in there if _iteration(path) > iteration]
            for old in [*there[: len(there) - len(later)][: -self._keep], *later]:
                shutil.rmtree(old, ignore_errors=True)
        self._communicator.barrier()

    def load(
        self, map_location: torch.device, recorded: int | None = None
    ) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """The last checkpoint that is whole: its iteration, the shared and this rank's own state; collective.

        A damaged one falls back to the one before, with a warning.

        Args:
            map_location: where tensors go.
            recorded: the first iteration that the record has lost (rank 0's counts): a later checkpoint is left out
                too, with a warning, as a run continued from it would have a hole. None: nothing is lost.
        """
        target: Path | None = None
        if self._communicator.rank == 0:
            usable = (path for path in reversed(self._committed()) if self._recorded(path, recorded))
            target = next(filter(self._whole, usable), None)
        target = self._communicator.broadcast_object(target)
        if target is None:
            return None
        own = torch.load(target / f"rank{self._communicator.rank}.pt", map_location=map_location, weights_only=True)
        shared = torch.load(target / SHARED, map_location=map_location, weights_only=True)
        return json.loads((target / COMMIT).read_text())["iteration"], shared, own

    def remove(self) -> None:
        """Delete all of them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save_and_digest(self, path: Path, state: dict[str, Any]) -> str:
        def save() -> str:
            save_tensors(path, state)
            return _digest(path)

        return self._patiently(save)

    def _make(self, target: Path) -> None:
        """No folder above the checkpoints': where a file system is away, that would be made in its place."""
        self.folder.mkdir(exist_ok=True)
        target.mkdir(exist_ok=True)

    def _patiently(self, action: Callable[[], T]) -> T:
        return patiently(action, "saving a checkpoint", self._patience_s)

    def _committed(self) -> list[Path]:
        found = (path.parent for path in self.folder.glob(f"iter*/{COMMIT}"))
        return sorted((path for path in found if _FOLDER.fullmatch(path.name)), key=_iteration)

    def _recorded(self, target: Path, recorded: int | None) -> bool:
        if recorded is None or _iteration(target) <= recorded:
            return True
        logger.warning("checkpoint %s is left out: the metrics of iteration %d are lost", target, recorded)
        return False

    def _whole(self, target: Path) -> bool:
        try:
            commit = json.loads((target / COMMIT).read_text())
            files = {SHARED, *(f"rank{rank}.pt" for rank in range(commit["world_size"]))}
            damaged = sorted(files ^ commit["files"].keys())
            damaged += [name for name, digest in commit["files"].items() if _digest(target / name) != digest]
            if not damaged and commit["world_size"] != self._communicator.world_size:
                text = "checkpoint %s is left out: it is of %d ranks, and these are %d"
                logger.warning(text, target, commit["world_size"], self._communicator.world_size)
                return False
            if commit["iteration"] != _iteration(target):
                damaged.append(f"it is of iteration {commit['iteration']}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged = [f"{COMMIT}: {error}" if not isinstance(error, OSError) else str(error)]
        if damaged:
            logger.warning("checkpoint %s is left out, damaged: %s", target, ", ".join(damaged))
        return not damaged


def save_tensors(path: Path, state: dict[str, Any]) -> None:
    """Write tensors as torch does, replacing the file as a whole.

    Raises:
        OSError: if that fails, as on a full disk; the temporary file is removed.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns some of the former into the latter, one after the other
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        first: BaseException = error
        while not isinstance(first, OSError) and first.__context__ is not None:
            first = first.__context__
        raise OSError(f"{path} cannot be written: {first}") from None


def _iteration(path: Path) -> int:
    return int(path.name.removeprefix("iter"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
