"""What looks like a mistake in the training loop, but may be meant: it is warned of, once."""

from __future__ import annotations

import logging

from torch import Tensor

from kfac.layers import KFACLayer

logger = logging.getLogger(__name__)


class Guards:
    """Notices steps that come too late or too early, and outputs that can be read in two ways.

    Args:
        warned: what has been warned of; is added to.
    """

    def __init__(self, warned: set[str]) -> None:
        self._warned = warned
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._versions: dict[int, tuple[KFACLayer, tuple[int, ...]]] = {}

    def _warn(self, what: str, message: str, *arguments: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(message, *arguments)

    def ran(self, index: int, layer: KFACLayer) -> None:
        """A layer has run forward, to be trained on."""
        self._versions[index] = (layer, _versions(layer))

    def check_order(self) -> None:
        """Warn if parameters have been changed since the layers ran: the optimizer has stepped already."""
        for layer, versions in self._versions.values():
            if _versions(layer) != versions:
                self._warn(
                    "order",
                    "parameters of layer %r were changed between the forward pass and kfac.step(): if optimizer.step() "
                    "did it, it took the plain gradients. Call kfac.step() before optimizer.step()",
                    layer.name,
                )
                return

    def check_micro_batches(self, seen: int, expected: int) -> None:
        """Warn of a step after fewer micro-batches than there should be."""
        if 0 < seen < expected:
            self._warn(
                "micro-batches",
                "kfac.step() after %d of accumulation_steps=%d micro-batches: call it after all of them have gone "
                "backward. If there are no more (the end of an epoch), weight their losses by 1/%d",
                seen,
                expected,
                seen,
            )

    def check_classes(self, outputs: Tensor) -> None:
        """Warn of logits that would fit as well with the classes in their last dimension, and look like that.

        What a linear layer gives has the classes last and is contiguous; moved to the second dimension it is not.
        """
        fits_both = outputs.dim() > 2 and outputs.movedim(1, -1).shape == outputs.shape
        if not fits_both or outputs.stride(-1) != 1 or outputs.stride(1) == 1:
            return
        if "Convolution" not in type(outputs.grad_fn).__name__:
            self._warn(
                "classes",
                "kfac.curvature: outputs of shape %s have as many positions as classes, and look as if classes were "
                "last: the second dimension is taken for the classes. Pass outputs.movedim(-1, 1) if they are last",
                tuple(outputs.shape),
            )


def _versions(layer: KFACLayer) -> tuple[int, ...]:
    """Counts of the changes in place of its parameters."""
    return tuple(parameter._version for parameter in layer.parameters)
