"""Planning: cost models, profiles, tensor fusion, inverse placement and the :class:`Plan` that results.

Nothing in this package imports torch or communicates; every function is pure arithmetic on values.
"""

from kfac.planning.costs import Cost, ExponentialCost, LinearCost, PolynomialCost, TableCost
from kfac.planning.plan import FactorSpec, Message, Plan
from kfac.planning.profiles import ClusterProfile, LayerProfile, ModelProfile
from kfac.planning.schedule_config import ScheduleConfig

__all__ = [
    "ClusterProfile",
    "Cost",
    "ExponentialCost",
    "FactorSpec",
    "LayerProfile",
    "LinearCost",
    "Message",
    "ModelProfile",
    "Plan",
    "PolynomialCost",
    "ScheduleConfig",
    "TableCost",
]
