"""Which of a model's parameters are preconditioned, by which kind of layer, and why others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from kfac.config import KFACConfig
from kfac.factors import FactorState
from kfac.hooks import ForwardHook
from kfac.layers.base import KFACLayer
from kfac.layers.embedding import EmbeddingLayer
from kfac.layers.patterns import check_patterns
from kfac.layers.vector import NORMS, BiasLayer, NormLayer
from kfac.layers.weight import ConvolutionLayer, LinearLayer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAKERS: dict[type[nn.Module], Callable[..., KFACLayer]] = {
    nn.Linear: LinearLayer,
    **dict.fromkeys(_CONVOLUTIONS, ConvolutionLayer),
    nn.Embedding: EmbeddingLayer,
    **dict.fromkeys(NORMS, NormLayer),
}


@dataclass(frozen=True)
class FirstOrder:
    """Parameters that keep their plain gradient, and why."""

    name: str
    parameters: int
    reason: str


def register_layers(
    model: nn.Module, config: KFACConfig
) -> tuple[list[KFACLayer], list[FirstOrder], list[list[nn.Parameter]]]:
    """Find the layers to precondition, in registration order.

    Returns:
        the layers; the trainable parameters that keep their plain gradient, with the reasons; and per layer all
        trainable parameters whose gradients become ready about when its own do: its own and those of uncovered modules
        registered next to it (one list of all of them if there is no layer).

    Raises:
        ValueError: for a layer without a shape, or one that another KFAC has hooked; for a pattern in ``config`` that
            matches no module.
    """
    layers: list[KFACLayer] = []
    first_order: list[FirstOrder] = []
    groups: list[list[nn.Parameter]] = []
    early: list[nn.Parameter] = []
    covered_names: set[str] = set()
    holders = _holders(model)
    names = _names(model)
    seen: set[int] = set()
    for module in model.modules():
        name = names[module][0]
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        trainable = [p for p in own if p.requires_grad]
        seen.update(id(p) for p in own)
        if not trainable:
            continue
        aliases = [alias for holder in dict.fromkeys(h for p in own for h in holders[id(p)]) for alias in names[holder]]
        layer, reason = _layer_of(name, module, holders, aliases, config)
        if layer is not None:
            layers.append(layer)
            covered_names.update(aliases)
            groups.append(trainable)
        else:
            (groups[-1] if groups else early).extend(trainable)
        covered = {id(p) for p in layer.parameters} if layer else set()
        left = [p for p in trainable if id(p) not in covered]
        if left:
            first_order.append(FirstOrder(name, sum(p.numel() for p in left), reason))
    with_parameters = [name for module in model.modules() if module._parameters for name in names[module]]
    check_patterns(config, with_parameters, {item.name: item.reason for item in first_order}, covered_names)
    if groups:
        groups[0].extend(early)
    elif early:
        groups.append(early)
    return layers, first_order, groups


def _layer_of(
    name: str, module: nn.Module, holders: dict[int, list[nn.Module]], aliases: Sequence[str], config: KFACConfig
) -> tuple[KFACLayer | None, str]:
    """The layer of a module with trainable parameters of its own, or why it has none (or not of all of them).

    ``aliases``: the names of all modules that hold its parameters, of which any may be excluded or overridden.
    """
    make = next((make for cls, make in _MAKERS.items() if isinstance(module, cls)), None)
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
        raise ValueError(f"layer {name!r} has no shape yet: run the model once before making KFAC")
    reason = _reason_against(aliases, module, config)
    if make is None or reason is not None:
        return None, reason or f"{type(module).__name__} has no Kronecker factors here"
    if make in (LinearLayer, ConvolutionLayer) and not module.weight.requires_grad:
        make = BiasLayer
    layer = make(name, module, config.for_layer(*aliases))
    layer.modules, reason = _sharing(layer, module, holders)
    if layer.kind not in config.layers:
        reason = f"layers of kind {layer.kind} are not in KFACConfig.layers"
    if min(layer.a.width, layer.g.width) == 0 or any(p.numel() == 0 for p in layer.parameters):
        reason = "it has no inputs or no outputs"
    if reason is not None:
        return None, reason
    if any(isinstance(hook, ForwardHook) for m in layer.modules for hook in m._forward_hooks.values()):
        raise ValueError(f"layer {name!r} is preconditioned by another KFAC already: close() that one first")
    return layer, "only the module's other parameters have Kronecker factors here"


def _reason_against(names: Sequence[str], module: nn.Module, config: KFACConfig) -> str | None:
    """Why a module of a kind that has factors is not preconditioned; None if it is, or is of another kind."""
    if not isinstance(module, tuple(_MAKERS)):
        return None
    weight: object = module.weight
    bias: object = getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(bias, (nn.Parameter, type(None))):
        return "its weight or bias is computed from other parameters (a parametrization)"
    kind, forwards = type(module).__name__, {cls.forward for cls in _MAKERS}
    reasons = {
        "include/exclude patterns": not config.covers(*names),
        f"{kind} has a forward pass of its own": type(module).forward not in forwards,
        f"{weight.dtype} is no real floating-point type": not weight.is_floating_point(),
        "its weight is reshaped by max_norm or scaled by word frequency": isinstance(module, nn.Embedding)
        and (module.max_norm is not None or module.scale_grad_by_freq),
        "its gradients are sparse": isinstance(module, nn.Embedding) and module.sparse,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _sharing(
    layer: KFACLayer, module: nn.Module, holders: dict[int, list[nn.Module]]
) -> tuple[list[nn.Module], str | None]:
    """All modules that hold the layer's parameters, or why statistics of theirs cannot be summed."""
    modules = holders[id(layer.parameters[0])]
    own = {id(p) for p in module.parameters(recurse=False)}
    for other in modules:
        if type(other) is not type(module):
            return modules, f"its weight is tied to a {type(other).__name__}'s: their factors do not add up"
        if {id(p) for p in other.parameters(recurse=False)} != own:
            return modules, "its weight is tied to another module's with another bias"
    if any(holders[id(p)] != modules for p in layer.parameters):
        return modules, "its bias is tied to another module's"
    return modules, None


def _holders(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Per parameter (its id) the modules that hold it."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in dict.fromkeys(module.parameters(recurse=False)):
            holders.setdefault(id(parameter), []).append(module)
    return holders


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Per module all names that it has in the model."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path.replace("._orig_mod", ""))  # of a part that is compiled by itself
    return names


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel or torch.compile, so that names have no prefix."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def describe_coverage(
    layers: Sequence[KFACLayer],
    first_order: Sequence[FirstOrder],
    factors: Mapping[tuple[str, str], FactorState] | None = None,
) -> str:
    """The layers that are preconditioned, and the parameters that keep their plain gradient with the reasons.

    ``factors``: by layer and side. Once any has statistics, layers without count among what keeps its plain gradient.
    """
    used = {key for key, factor in (factors or {}).items() if factor.known}
    idle = [x for x in layers if used and not {(x.name, "A"), (x.name, "G")} <= used]
    layers = [layer for layer in layers if layer not in idle]
    without = "no statistics so far: its forward is bypassed, or its outputs have had no gradient"
    first_order = [*first_order, *(FirstOrder(x.name, sum(p.numel() for p in x.parameters), without) for x in idle)]
    covered = sum(p.numel() for layer in layers for p in layer.parameters)
    rest = sum(item.parameters for item in first_order)
    share = covered / max(1, covered + rest)
    kinds: dict[str, int] = {}
    for layer in layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    detail = f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if kinds else ""
    lines = [f"{len(layers)} layers preconditioned{detail}, {share:.1%} of {covered + rest:,} trainable parameters"]
    reasons: dict[str, list[str]] = {}
    for item in first_order:
        reasons.setdefault(item.reason, []).append(item.name or "(the model itself)")
    for reason, names in reasons.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"  plain gradient: {shown}: {reason}")
    return "\n".join(lines)
