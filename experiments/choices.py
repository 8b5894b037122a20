"""Which groups a command takes, what may be chosen of each, and which keys that brings; read from the shipped files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from experiments.arguments import group_choices

CONFIG_PACKAGE = "experiments.conf"
WIDTH = 120
"""Characters of a line of help."""


def groups_of(command: str) -> list[str]:
    """The groups of a command, those of its own part of the file last; also those that are left out by default."""
    found: list[str] = []
    for entry in _read(command).get("defaults", []):
        if isinstance(entry, str):
            found += groups_of(entry) if entry != "_self_" else []
        else:
            found += [name for name in entry if not name.startswith("override ")]
    return found


def keys_of_choices(group: str) -> dict[str, list[str]]:
    """By choice of a group its keys; of one that builds on another, only those that it adds."""
    return {choice: [key for key in _read(f"{group}/{choice}") if key != "defaults"] for choice in group_choices(group)}


def choices_with(group: str, key: str) -> list[str]:
    """The choices of a group that have a key, as ``group=choice``."""
    return [f"{group}={choice}" for choice, keys in keys_of_choices(group).items() if key in keys]


def further_keys(command: str, config: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """What other choices than the present ones bring: ``group=choice`` and its keys, each key once where it can be.

    Args:
        command: train, profile or simulate.
        config: the present configuration.
    """
    for group in groups_of(command):
        present = set(config.get(group) or {})
        bases = {choice for choice in group_choices(group) if "defaults" not in _read(f"{group}/{choice}")}
        known = set().union(*(keys for choice, keys in keys_of_choices(group).items() if choice in bases))
        for choice, keys in keys_of_choices(group).items():
            added = [key for key in keys if key not in present and (choice in bases or key not in known)]
            if added:
                yield f"{group}={choice}", added


def register_help() -> None:
    """Let help texts say ``${spdkfac.groups:COMMAND}`` and ``${spdkfac.further_keys:COMMAND}``."""
    OmegaConf.register_new_resolver("spdkfac.groups", _groups_text, replace=True)
    OmegaConf.register_new_resolver("spdkfac.further_keys", _keys_text, replace=True)


def _groups_text(command: str) -> str:
    loader = GlobalHydra.instance().config_loader()  # which knows those of --config-dir, too
    return "\n".join(f"{group}: {', '.join(loader.get_group_options(group))}" for group in groups_of(command))


def _keys_text(command: str, _root_: DictConfig) -> str:
    config = OmegaConf.to_container(OmegaConf.masked_copy(_root_, groups_of(command)), resolve=False)
    assert isinstance(config, dict)
    own = {str(key): value for key, value in config.items()}
    lines = (f"{choice}: {', '.join(keys)}" for choice, keys in further_keys(command, own))
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def _read(name: str) -> dict[str, Any]:
    text = (resources.files(CONFIG_PACKAGE) / f"{name}.yaml").read_text(encoding="utf-8")
    data = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return {str(key): value for key, value in data.items()} if isinstance(data, dict) else {}
