"""Files on a file system that is away for a while, or full: try again for some minutes instead of losing a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

PATIENCE_S = 180.0
"""For how long a run waits for its files; the other ranks, which wait in a collective, stay for ten minutes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0


def patiently(action: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """What ``action`` returns, tried again (with a first warning) while it raises OSError.

    Args:
        action: does nothing twice that must be done once.
        what: it does, for the warning.
        patience_s: the last error is raised when this time is over.
    """
    end_s = time.monotonic() + patience_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            result = action()
        except OSError as error:
            if time.monotonic() + pause_s > end_s:
                raise
            if pause_s == FIRST_PAUSE_S:
                logger.warning("%s failed: %s; trying again for %.0f s", what, error, patience_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            if pause_s > FIRST_PAUSE_S:
                logger.warning("%s is possible again", what)
            return result
