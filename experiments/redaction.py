"""Secrets of the environment and of the command line, kept out of everything that is recorded or sent."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, TextIO

SECRET = re.compile(
    r"KEYS?(?![A-Z])|TOKENS?(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!I))|COOKIE|(?<![A-Z])JWT(?![A-Z])",
    re.IGNORECASE,
)
"""Names of environment variables, of configuration keys with a text and of command line options whose values are
secret; a tokenizer, an author and a keyboard are none."""
SHORTEST = 8
"""Characters: a shorter value is no key, and would be found in innocent places (``true``, ``0``, ``disk``)."""
MASK = "***"
_ASSIGNMENT = re.compile(
    rf"""[\w.-]*(?:{SECRET.pattern})[\w.-]*["']?\s*[=:]\s*["']?([^\s"',;{{}}\[\]()][^\s"',;}}\]]*)""", re.IGNORECASE
)
"""``NAME=VALUE``, ``{NAME: VALUE}``, ``--name=VALUE``, ``export NAME='VALUE'`` of a secret-looking name."""


def redact(text: str, environ: Mapping[str, str] | None = None, arguments: Sequence[str] | None = None) -> str:
    """A text without the values of secret environment variables and command line options.

    Args:
        text: anything.
        environ: by default the process's environment.
        arguments: by default the command line that the process was started with.
    """
    environ = os.environ if environ is None else environ
    values = {v for k, v in environ.items() if SECRET.search(k) and _is_secret(v)}
    values |= _given(tuple(sys.orig_argv if arguments is None else arguments))
    pattern = _pattern(tuple(sorted(values)))
    return pattern.sub(MASK, text) if pattern else text


def redacted(data: Any) -> Any:
    """Nested plain data without secrets: those of the environment and of the command line, texts under secret-looking
    keys, and what texts assign to secret-looking names."""
    if isinstance(data, Mapping):
        return {
            key: MASK if isinstance(item, str) and SECRET.search(str(key)) else redacted(item)
            for key, item in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [redacted(item) for item in data]
    return _ASSIGNMENT.sub(_masked, redact(data)) if isinstance(data, str) else data


def gives_secret(text: str) -> bool:
    """Whether a text, such as a line of a script, assigns a value to a secret-looking name."""
    return any(map(_is_secret, _ASSIGNMENT.findall(text)))


@contextmanager
def masked_process(prefix: str) -> Iterator[None]:
    """While it lasts, the process has arguments without secrets, and no secret variables of some names.

    Args:
        prefix: what the names begin with.
    """
    arguments = sys.argv
    hidden = {k: v for k, v in os.environ.items() if k.startswith(prefix) and SECRET.search(k)}
    sys.argv = [redact(argument) for argument in arguments]
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        sys.argv = arguments
        os.environ.update(hidden)


class _Redacting:
    """A text stream that masks secrets in each text that is written; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it without secrets."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each without secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_output() -> None:
    """From now on what this process prints (and logs, and the traceback it dies of) is without secrets.

    What libraries of other languages write past Python is not covered.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Redacting):
            setattr(sys, name, _Redacting(stream))


def _masked(match: re.Match[str]) -> str:
    return match[0].removesuffix(match[1]) + MASK if _is_secret(match[1]) else match[0]


def _is_secret(value: str) -> bool:
    # Folders and sockets (SSH_AUTH_SOCK, XAUTHORITY) tell nothing, and stand in many a text; nor does $NAME.
    return len(value) >= SHORTEST and not value.startswith(("/", "~", "$"))


@lru_cache(maxsize=8)
def _given(arguments: tuple[str, ...]) -> frozenset[str]:
    """The values of secret-looking names on a command line; ``--name VALUE`` too."""
    found = {value for argument in arguments for value in _ASSIGNMENT.findall(argument)}
    for option, value in pairwise(arguments):
        if option.startswith("-") and "=" not in option and SECRET.search(option):
            found.add(value)
    return frozenset(filter(_is_secret, found))


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    # The longest first: one may be the beginning of another.
    return re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True)))) if values else None
