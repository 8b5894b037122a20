"""Layers with Kronecker factors: how each module type's inputs, output gradients and parameters become matrices, and
which of a model's modules get them.
"""

from kfac.layers.base import GradientAccess, KFACLayer, PlainGradients
from kfac.layers.registration import FirstOrder, describe_coverage, register_layers, unwrap

__all__ = [
    "FirstOrder",
    "GradientAccess",
    "KFACLayer",
    "PlainGradients",
    "describe_coverage",
    "register_layers",
    "unwrap",
]
