"""Secrets of the environment, kept out of everything that is recorded or sent."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of environment variables, and of configuration keys with a text, whose values are secret."""
SHORTEST = 8
"""Characters: a shorter value is no key, and would be found in innocent places (``true``, ``0``, ``disk``)."""
MASK = "***"


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """A text without the values of secret environment variables.

    Args:
        text: anything.
        environ: by default the process's environment.
    """
    environ = os.environ if environ is None else environ
    pattern = _pattern(tuple(sorted({v for k, v in environ.items() if SECRET.search(k) and _is_secret(v)})))
    return pattern.sub(MASK, text) if pattern else text


def redacted(data: Any) -> Any:
    """Nested plain data without secrets: those of the environment, and texts under secret-looking keys."""
    if isinstance(data, Mapping):
        return {
            key: MASK if isinstance(item, str) and SECRET.search(str(key)) else redacted(item)
            for key, item in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [redacted(item) for item in data]
    return redact(data) if isinstance(data, str) else data


def _is_secret(value: str) -> bool:
    # Folders and sockets (SSH_AUTH_SOCK, XAUTHORITY) tell nothing, and stand in many a text.
    return len(value) >= SHORTEST and not value.startswith("/")


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    # The longest first: one may be the beginning of another.
    return re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True)))) if values else None
