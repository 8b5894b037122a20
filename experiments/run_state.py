"""What a checkpoint of a run holds, and what becomes of it in the run that continues."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.assembly import Learner
from experiments.records import RunRecord
from experiments.settings import ConfigError
from kfac.communication import CommunicationError
from kfac.replanning import Replanner

_MISFITS = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What states raise that are not what they should be."""


def state_of(learner: Learner, replanner: Replanner | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is the same on all ranks, and what is this rank's own; collective."""
    model, buffers = learner.model.state_dict(), dict(learner.model.named_buffers())
    shared = {
        "model": {key: value for key, value in model.items() if key not in buffers},
        "optimizer": learner.optimizer.state_dict(),
        "kfac": learner.preconditioner.state_dict(),
        **({"replanner": replanner.state_dict()} if replanner else {}),
    }
    own = {"buffers": {key: value for key, value in model.items() if key in buffers}, "random": _random_state()}
    return shared, own


def restore(
    learner: Learner,
    replanner: Replanner | None,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    folder: Path,
    start: int,
) -> None:
    """Continue from a state; collective.

    Args:
        learner, replanner: take over what they had.
        shared, own: see :func:`state_of`.
        folder: of the checkpoints, for people.
        start: the iteration that the state is before, for people.

    Raises:
        ConfigError: if it does not fit.
    """
    try:
        learner.model.load_state_dict({**shared["model"], **own["buffers"]})
        learner.optimizer.load_state_dict(shared["optimizer"])
        learner.preconditioner.load_state_dict(shared["kfac"])
        if replanner:
            replanner.load_state_dict(shared["replanner"])
        _set_random_state(own["random"])
    except CommunicationError:  # of the ranks, which says nothing of the state
        raise
    except _MISFITS as error:  # saved by other code than this
        missing = "it lacks " if isinstance(error, KeyError) else ""
        raise ConfigError(
            f"{folder}: the checkpoint before iteration {start} does not fit: "
            f"{missing}{textwrap.shorten(str(error), 400)} (rerun=true starts over)"
        ) from error


def first_lost_iteration(record: RunRecord, evaluates: Callable[[int], bool]) -> int:
    """How far the metrics reach without a hole: a checkpoint beyond that is of no use.

    Args:
        record: of the run.
        evaluates: whether there is an evaluation after so many iterations.
    """
    rows = {(row["kind"], row["iter"]) for row in record.whole_rows()}
    iteration = 0
    while ("train", iteration) in rows and (not evaluates(iteration + 1) or ("eval", iteration) in rows):
        iteration += 1
    return iteration


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
