"""The forward hook that layers get: copies of a model leave it behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def _ignore(*_: Any, **__: Any) -> None:
    """What the hook becomes in a copy of the model (deepcopy, pickle): copies are not preconditioned."""


def _make_ignore() -> Callable[..., None]:
    return _ignore


class ForwardHook:
    """Calls ``after_forward(index, module, args, kwargs, output)`` when the layer has run."""

    def __init__(self, after_forward: Callable[[int, nn.Module, Any, Any, Any], None], index: int) -> None:
        self._after_forward, self._index = after_forward, index

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See :meth:`torch.nn.Module.register_forward_hook`."""
        self._after_forward(self._index, module, args, kwargs, output)

    def __reduce__(self) -> Any:
        return _make_ignore, ()
