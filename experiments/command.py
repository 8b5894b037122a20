"""The commands' common part: Hydra with the shipped configurations, and mistakes reported in one line."""

from __future__ import annotations

import atexit
import difflib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.arguments import check_arguments, describe_unreadable, group_choices
from experiments.choices import choices_with, groups_of, register_help
from experiments.interrupts import restore_interrupts
from experiments.settings import ConfigError

CONFIG_SOURCE = "pkg://experiments.conf"
DRY_RUN = "--dry-run"
OPTIONS_WITH_VALUES = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p")
USAGE_ERROR = 2
FAILED = 1
INTERRUPTED = 130
_FULL_ERROR = "HYDRA_FULL_ERROR"
"""Makes Hydra hand its errors on to us, instead of printing and exiting itself. Users set it to see tracebacks."""
_MISTAKES = (ConfigError, HydraException, OmegaConfBaseException)


class RunFailedError(Exception):
    """A run ended in an error that has been reported already."""


def run_command(name: str, task: Callable[[DictConfig], Any], check: Callable[[dict[str, Any]], Any]) -> None:
    """Run a command with Hydra's overrides from the command line, and end the process.

    Exit codes: 0, 1 (a run failed), 2 (a mistake in the configuration, told in one line), 130 (interrupted).

    Args:
        name: the primary configuration.
        task: runs one configuration; raises :class:`RunFailedError` for a run whose error has been reported.
        check: builds the typed configuration from plain data, raising a :class:`ConfigError`; called for every
            combination of a sweep before the first of them runs.
    """
    _CHECKS[name] = check
    command = _Command(name, task)
    wanted = os.environ.get(_FULL_ERROR)
    command.verbose = wanted == "1"
    os.environ[_FULL_ERROR] = "1"
    register_help()
    try:
        restore_interrupts()
        if DRY_RUN in sys.argv and name == "train":
            sys.argv = as_dry_run(sys.argv)
        sys.argv = options_first(sys.argv)
        check_arguments(sys.argv[1:])
        hydra.main(version_base="1.3", config_path=CONFIG_SOURCE, config_name=name)(command)()
    except _MISTAKES as error:
        if command.verbose:
            raise
        _exit_with(name, error)
    except ValueError as error:
        if command.verbose or not _of_hydra(error):
            raise
        _exit_with(name, error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if wanted is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = wanted
    sys.exit(FAILED if command.failures else 0)


def as_dry_run(argv: Sequence[str]) -> list[str]:
    """The command line with ``--dry-run`` in Hydra's words: a sweep, also of one run, that is only shown."""
    rest = [argument for argument in argv if argument != DRY_RUN]
    multirun = [] if {"-m", "--multirun"} & set(rest) else ["-m"]
    return [*rest[:1], *multirun, *rest[1:], "++site.dry_run=true"]


def options_first(argv: Sequence[str]) -> list[str]:
    """The command line with its options before its overrides: argparse takes no ``-m`` between two overrides."""

    def overrides(place: int) -> bool:
        text = argv[place]
        return text[:1] in "~+" or ("=" in text and text[:1] != "-" and argv[place - 1] not in OPTIONS_WITH_VALUES)

    places = sorted(range(1, len(argv)), key=overrides)
    return [*argv[:1], *(argv[place] for place in places)]


class _Command:
    """The task as Hydra's launcher calls it: a failed run does not keep the rest of a local sweep from running."""

    def __init__(self, name: str, task: Callable[[DictConfig], Any]) -> None:
        self.name, self.task = name, task
        self.verbose = False
        self.failures = 0
        self._pid = os.getpid()

    def __call__(self, config: DictConfig) -> Any:
        try:
            return self.task(config)
        except RunFailedError:
            if os.getpid() != self._pid:  # started by a launcher elsewhere, which must see that it failed
                raise
            self.failures += 1
        except ConfigError as error:
            if os.getpid() != self._pid or self.verbose:
                raise
            _exit_with(self.name, error)


def _of_hydra(error: ValueError) -> bool:
    """Whether Hydra refused the command line by an exception of Python's own."""
    return any(part in str(error) for part in ("Config group override must be", "integer string conversion"))


def _exit_with(name: str, error: Exception) -> NoReturn:
    print(f"error: {describe(name, error)}", file=sys.stderr)  # noqa: T201
    sys.exit(USAGE_ERROR)


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as nested plain data, without Hydra's own part."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    data = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


_CHECKS: dict[str, Callable[[dict[str, Any]], Any]] = {}


class CheckSweep(Callback):
    """Checks all combinations of a sweep before the first of them runs.

    Args:
        command: the primary configuration's name.
    """

    def __init__(self, command: str) -> None:
        self.command = command

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Exit with one line if a place or launcher was chosen that a single run would leave out."""
        choices = config.hydra.runtime.choices
        if (config.get("site") or {}).get("scheduler") == "slurm":
            _exit_with(self.command, ConfigError(f"site={choices.get('site')} takes sweeps, also of one run: add -m"))
        if not str(config.hydra.launcher._target_).endswith((".BasicLauncher", ".SweepLauncher")):
            chosen = choices.get("hydra/launcher")
            _exit_with(self.command, ConfigError(f"hydra/launcher={chosen} starts sweeps: add -m"))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Exit with one line if a combination is impossible (Hydra only warns of exceptions in callbacks)."""
        if (config.get("site") or {}).get("dry_run"):  # Hydra writes what was asked for into the sweep's folder
            nowhere = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, nowhere, ignore_errors=True)
            with open_dict(config):
                config.hydra.sweep.dir = nowhere
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if not str(config.hydra.sweeper._target_).endswith(f".{BasicSweeper.__name__}"):
            return  # which combinations another sweeper will try, only it knows
        loader = GlobalHydra.instance().config_loader()
        _compose_once(loader)
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(config.hydra.overrides.task))
        try:
            for combination in BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]:
                _CHECKS[self.command](plain(loader.load_sweep_config(config, list(combination))))
        except _MISTAKES as error:
            _exit_with(self.command, error)


def _compose_once(loader: Any) -> None:
    """Have a configuration loader keep what it composes: Hydra composes each combination for the check of the sweeper
    and again for the launcher, which for hundreds of runs takes minutes.
    """
    compose: Callable[[DictConfig, list[str]], DictConfig] = loader.load_sweep_config
    known: dict[tuple[str, ...], DictConfig] = {}

    def load(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = tuple(sweep_overrides)
        if key not in known:
            known[key] = compose(master_config, sweep_overrides)
        return known[key]

    loader.load_sweep_config = load


def describe(name: str, error: Exception) -> str:
    """One line for a mistake: which key, and which choices there are."""
    if isinstance(error, (ConfigError, OverrideParseException)):
        return str(error) if isinstance(error, ConfigError) else describe_unreadable(error.override, error.message)
    text = str(error)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text += "\n" + str(error.__cause__)
    if found := re.search(
        r"Could not find '(.+)/([^/']*)'\s+Available options in '.*?':\s+(.*?)(?:Config search path|$)", text, re.DOTALL
    ):
        choices = ", ".join(found[3].split())
        return f"{found[1]}={found[2]} is not one of: {choices}"
    if found := re.search(r"Key '([^']+)' (?:is not in struct|not in '\w+')\s+full_key: (\S+)", text):
        return _unknown_key(name, found[2])
    if found := re.search(r"Could not override '([^'@]+)'.*No match in the defaults list", text, re.DOTALL):
        return _unknown_key(name, found[1])
    if found := re.search(r"Missing mandatory value: (\S+)", text):
        return f"{found[1]} has no value"
    return " ".join(text.split())


def _unknown_key(name: str, key: str) -> str:
    """Which keys there are at the level of the wrong one, and the most similar of all."""
    group, _, leaf = key.rpartition(".")
    known = _known_config(name, key.startswith("hydra."))
    flat = _flat(known)
    level: Any = known
    for part in filter(None, group.split(".")):
        level = level.get(part, {}) if isinstance(level, dict) else {}
    if not isinstance(level, dict) or not level:
        level, group = known, ""
    names = [other for other in level if other != "_target_"]
    groups, first = groups_of(name), key.split(".", maxsplit=1)[0]
    if "site" in groups and (key.startswith("hydra.launcher.") or (first == "site" and "site" not in known)):
        return f"unknown key {key}: choose site=slurm, site=local or one of your own, which have keys (site.KEY)"
    if first not in groups and group_choices(first):
        return f"unknown key {key}: {name} has no group {first}; its groups: {', '.join(groups)}"
    if not group:
        names += [other for other in groups if other not in names]
    elif group in groups and (having := choices_with(group, leaf)):
        return f"unknown key {key}: only {', '.join(having)} has it; keys of the present choice: {', '.join(names)}"
    near = [f"{group}.{other}" if group else other for other in difflib.get_close_matches(leaf, names, 1)]
    same = [other for other in flat if other.split(".")[-1] == leaf]
    similar = near if group.startswith("hydra") else same or near or difflib.get_close_matches(key, flat, 1)
    hint = f" (did you mean {similar[0]}?)" if similar else ""
    where = f"keys of {group}" if group else "keys"
    return f"unknown key {key}{hint}; {where}: {', '.join(names)}"


def _known_config(name: str, hydras: bool = False) -> dict[str, Any]:
    """The configuration with the groups chosen on the command line, where they go together; or Hydra's own part."""
    found = (re.fullmatch(r"([a-z_/]+)=[\w-]+", argument) for argument in sys.argv[1:])
    chosen = [choice[0] for choice in found if choice and group_choices(choice[1])]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("experiments.conf", version_base="1.3"):
        try:
            config = hydra.compose(name, chosen, return_hydra_config=hydras)
        except HydraException:
            config = hydra.compose(name, return_hydra_config=hydras)
        if not hydras:
            return plain(config)
        data = OmegaConf.to_container(config.hydra, resolve=False)
        assert isinstance(data, dict)
        return {"hydra": data}


def _flat(data: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in data.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += _flat(value, f"{prefix}{key}.")
    return keys
