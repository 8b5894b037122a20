"""Patterns of layer names in the options: that each of them names something."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence

from kfac.config import KFACConfig

logger = logging.getLogger(__name__)


def check_patterns(config: KFACConfig, modules: Iterable[str], left: Mapping[str, str], covered: Iterable[str]) -> None:
    """Whether every pattern of ``include``, ``exclude`` and ``overrides`` matches a module with parameters.

    One may match only modules that keep their plain gradient, because the same options may serve several models and a
    model that is partly frozen: of ``include`` and ``overrides``, which do nothing then, it is warned.

    Args:
        config: the options.
        modules: the names of all modules with parameters, trainable or not.
        left: the names of those that keep their plain gradient, and why.
        covered: the names of layers that are preconditioned, with all the names that such a layer goes by.

    Raises:
        ValueError: for a pattern that matches none, naming it and names there are.
    """
    modules, covered = list(modules), list(covered)
    patterns = {"include": config.include, "exclude": config.exclude, "overrides": tuple(config.overrides)}
    for option, several in patterns.items():
        for pattern in several:
            if pattern == "*":
                continue
            matches = fnmatch.filter(modules, pattern)
            if not matches:
                raise ValueError(_unknown(option, pattern, modules))
            if option != "exclude" and not set(matches) & set(covered):
                logger.warning(
                    "kfac.%s: %r matches only layers that are not preconditioned: %s (%s)",
                    option,
                    pattern,
                    matches[0],
                    left.get(matches[0], "its parameters are frozen, or held by another layer too"),
                )


def _unknown(option: str, pattern: str, modules: Sequence[str]) -> str:
    message = f"kfac.{option}: the pattern {pattern!r} matches no layer of the model"
    inside = fnmatch.filter(modules, f"{pattern}.*")
    if inside:
        return f"{message}: {pattern + '.*'!r} matches {_listed(inside)}"
    near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.6)
    return f"{message}: did you mean {_listed(near)}?" if near else f"{message}; there are {_listed(modules)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name or "'' (the model itself)" for name in names[:4]) + more
