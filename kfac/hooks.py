"""The hooks that layers and their outputs get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _ignore(*_: Any, **__: Any) -> None:
    """What the hook becomes in a copy of the model (deepcopy, pickle): copies are not preconditioned."""


def _make_ignore() -> Callable[..., None]:
    return _ignore


class ForwardHook:
    """Calls ``after_forward(index, module, args, kwargs, output)`` when the layer has run.

    Copies of a model leave it behind. In compiled models it runs between graphs, not within them.
    """

    def __init__(self, after_forward: Callable[[int, nn.Module, Any, Any, Any], None], index: int) -> None:
        reason = "K-FAC's hooks run between compiled graphs: compile without fullgraph=True"
        self._after_forward = torch.compiler.disable(after_forward, reason=reason)
        self._index = index

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """See :meth:`torch.nn.Module.register_forward_hook`."""
        self._after_forward(self._index, module, args, kwargs, output)

    def __reduce__(self) -> Any:
        return _make_ignore, ()


def hook_gradient(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call ``hook`` with the gradient of ``output`` as it is now, also where what follows works on it in place.

    A linear layer's output ``[N, S, d]`` is a view of a matrix, and work in place on a view bypasses the view's own
    hooks: the matrix gets the hook.
    """
    base, shape = output._base, output.shape
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        output.register_hook(hook)
    else:
        base.register_hook(lambda gradient: hook(gradient.reshape(shape)))


def renew_compiled(model: nn.Module) -> None:
    """Have torch compile anew if parts of ``model`` are compiled: what has run before would not know of new hooks.

    Raises:
        ValueError: if something is compiled as one graph, between whose parts no hook could run.
    """
    contexts = [context for module in model.modules() for context in _compilations(module)]
    if any(getattr(context, "fullgraph", False) for context in contexts):
        raise ValueError("K-FAC's hooks run between compiled graphs: compile the model without fullgraph=True")
    if contexts:
        torch.compiler.reset()


def _compilations(module: nn.Module) -> list[object]:
    """How a module is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    if hasattr(module, "_orig_mod"):
        return [getattr(module, "dynamo_ctx", None)]
    compiled = getattr(module, "_compiled_call_impl", None)
    return [] if compiled is None else [cell.cell_contents for cell in compiled.__closure__ or ()]
