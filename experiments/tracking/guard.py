"""One sink on a thread of its own, so that the run never waits for it longer than it was told to."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

S = TypeVar("S")


class Guard(Generic[S]):
    """A sink that may raise, hang or die: then it is left alone, with one warning, and the run goes on.

    The thread works only between :meth:`post` and the end of :meth:`wait`, so outside of timed iterations.

    Args:
        name: for the warning.
        open_sink: makes the sink, on its thread.
    """

    def __init__(self, name: str, open_sink: Callable[[], S]) -> None:
        self.name = name
        self._actions: deque[Callable[[S], None]] = deque()
        self._changed = threading.Condition()
        self._open = open_sink
        self._busy = True  # until the sink is open
        self._off = self._ended = False
        threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True).start()

    @property
    def works(self) -> bool:
        """Whether the sink still takes part."""
        return not self._off

    def post(self, action: Callable[[S], None]) -> None:
        """Have the thread do something with the sink, after what it was given before."""
        with self._changed:
            if not self._off:
                self._actions.append(action)
                self._changed.notify_all()

    def wait(self, timeout_s: float, what: str = "answer") -> None:
        """Until everything is done; a sink that takes longer is switched off.

        Args:
            timeout_s: how long.
            what: it failed to do, for the warning.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (self._busy or self._actions) and not self._off:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._switch_off(f"did not {what} within {timeout_s:g} s")
                    return
                self._changed.wait(left)

    def end(self) -> None:
        """Let the thread go; nothing can be posted after."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            sink = self._open()
            while (action := self._next()) is not None:
                action(sink)
        except Exception as error:
            with self._changed:
                self._switch_off(f"failed ({_short(error)})")

    def _next(self) -> Callable[[S], None] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._actions:
                if self._off or self._ended:
                    return None
                self._changed.wait()
            self._busy = True
            return self._actions.popleft()

    def _switch_off(self, why: str) -> None:
        if not self._off:
            logger.warning("tracking: %s %s; it is switched off, the run record is complete", self.name, why)
        self._off = True
        self._actions.clear()
        self._changed.notify_all()


def _short(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, ImportError) else f"{type(error).__name__}: {text}"
