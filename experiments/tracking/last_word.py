"""The end of a run that its first rank could not tell W&B: it was killed, or another rank failed."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from experiments.records import FAILED, RunRecord
from experiments.tracking.settings import OFFLINE, ONLINE, TrackingSettings
from experiments.tracking.tracker import open_tracker
from experiments.tracking.wandb_sink import LAST_START

logger = logging.getLogger(__name__)

LIMIT_S = 20.0
"""How long a failed run may wait for each thing that is still to be told."""


def tell_failure(settings: TrackingSettings, record: RunRecord) -> bool:
    """Send the alert and the end of a failed run if W&B is online and the first rank has not done it.

    Args:
        settings: of the run.
        record: which says that it has failed, and why.

    Returns:
        Whether W&B was told now.
    """
    if settings.wandb != ONLINE or record.status != FAILED:
        return False
    try:
        return _tell(settings, record)
    except Exception as error:  # whoever asks has more to do
        logger.warning("%s: W&B could not be told that the run failed: %r", record.path, error)
        return False


def _tell(settings: TrackingSettings, record: RunRecord) -> bool:
    try:
        last = json.loads((record.path / LAST_START).read_text())
    except (OSError, ValueError):
        last = {}
    if last.get("start") == record.head["segments"][-1]["start"] and (last.get("end") or last.get("mode") == OFFLINE):
        return False  # it has been told, or sync will: W&B could not be reached
    alone = replace(
        settings,
        tensorboard=False,
        trackio=False,
        all_ranks=False,
        init_timeout_s=LIMIT_S,
        call_timeout_s=LIMIT_S,
        finish_timeout_s=LIMIT_S,
    )
    tracker = open_tracker(alone, record)
    error = record.head.get("error") or {}
    rank = error.get("rank")
    who = "" if rank is None else f"rank {rank} "
    tracker.alert(f"{FAILED}: {error.get('type') or 'killed'}", f"{who}{error.get('message', '')}")
    tracker.finish(FAILED)
    return bool(tracker.working)
