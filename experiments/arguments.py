"""Mistakes on the command line that Hydra would not name, or not notice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from experiments.settings import ConfigError

SEVERAL = ("tracking",)
"""Groups of which a list may be chosen."""
OPTIONAL = ("site",)
"""Groups that may be left out."""
_CHOICE = re.compile(r"\+{0,2}([a-z_]+)=(.*)", re.DOTALL)
_NO_NAME = re.compile(r"null|true|false|~|\[.*|[+-]?[\d.]+(e[+-]?\d+)?|", re.DOTALL | re.IGNORECASE)
OVERRIDES_EXAMPLE = "'kfac.overrides=[{pattern: layer1.*, damping: 0.1}]'"
"""As it is typed in a shell."""


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
        if match and match[1] in SEVERAL and re.fullmatch(r"\[[\w, ]+\]", match[2]):
            values = []
        if match and match[1] in OPTIONAL:
            values = [value for value in values if value != "null"]
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
    if key.lstrip("+").startswith("kfac.overrides"):
        return f"cannot read {override} ({reason}): give a list of options per pattern, as in {OVERRIDES_EXAMPLE}"
    return f"cannot read {override} ({reason}): quote a value with special characters, as in '{key}=\"a=b\"'"


def per_pattern(entries: Any) -> dict[str, dict[str, Any]]:
    """``kfac.overrides`` as options by pattern.

    Args:
        entries: such a mapping already; or a list of mappings with the key ``pattern``, since Hydra's command line
            takes no ``*`` in keys; or None. Later entries win.

    Raises:
        ConfigError: for anything else.
    """
    named: list[tuple[Any, Any]] = []
    if isinstance(entries, Mapping):
        named = list(entries.items())
    elif isinstance(entries, (list, tuple)) and all(isinstance(entry, Mapping) for entry in entries):
        named = [(entry.get("pattern"), {k: v for k, v in entry.items() if k != "pattern"}) for entry in entries]
    elif entries is not None:
        raise ConfigError(f"kfac.overrides={entries!r} is no list of options per pattern, as in {OVERRIDES_EXAMPLE}")
    merged: dict[str, dict[str, Any]] = {}
    for pattern, options in named:
        if not isinstance(pattern, str) or not pattern or not isinstance(options, Mapping) or not options:
            entry = options if pattern is None else {pattern: options}
            raise ConfigError(
                f"kfac.overrides: {entry!r} needs a pattern of module names and options, as in {OVERRIDES_EXAMPLE}"
            )
        merged[pattern] = {**merged.pop(pattern, {}), **options}  # what is last in order wins
    return merged
