"""Ctrl-C while a command still loads its libraries: it ends quietly, as it does later on. Imports nothing large."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def end_at_interrupts() -> None:
    """End the process at once at SIGINT (unless it is ignored, as under nohup)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def restore_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_: int, __: FrameType | None) -> None:
    os._exit(INTERRUPTED)
