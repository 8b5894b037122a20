"""Mistakes on the command line that Hydra would not name, or not notice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources

from experiments.settings import ConfigError

_CHOICE = re.compile(r"\+{0,2}([a-z_]+)=(.*)", re.DOTALL)
_NO_NAME = re.compile(r"null|true|false|~|\[.*|[+-]?[\d.]+(e[+-]?\d+)?|", re.DOTALL | re.IGNORECASE)


def check_arguments(arguments: Iterable[str]) -> None:
    """Raise a :class:`ConfigError` for an override without a key, or a group that is given anything but a name.

    Args:
        arguments: of the command line.
    """
    for argument in arguments:
        if argument.lstrip("+~").startswith("="):
            raise ConfigError(f"{argument!r} has no key: overrides are KEY=VALUE")
        match = _CHOICE.fullmatch(argument)
        choices = group_choices(match[1]) if match else []
        values = match[2].split(",") if match else []  # several in a sweep
        if choices and any(_NO_NAME.fullmatch(value.strip()) for value in values):
            raise ConfigError(f"{argument} is not one of: {', '.join(choices)}")


def group_choices(group: str) -> list[str]:
    """The shipped configurations of a group; none where there is no such group."""
    folder = resources.files("experiments.conf") / group
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def describe_unreadable(override: str, message: str) -> str:
    """One line for an override that Hydra's grammar does not take.

    Args:
        override: the argument.
        message: the parser's.
    """
    if override.startswith("-"):
        return f"unknown option {override} (--help shows the options)"
    reason = message.strip().splitlines()[0] if message.strip() else "it is no override"
    key = override.partition("=")[0]
    return f"cannot read {override} ({reason}): quote a value with special characters, as in '{key}=\"a=b\"'"
