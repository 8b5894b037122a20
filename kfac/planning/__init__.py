"""Planning: cost models, profiles, tensor fusion, inverse placement and the :class:`Plan` that results.

Nothing in this package imports torch or communicates; every function is pure arithmetic on values.
"""

from kfac.planning.costs import Cost, ExponentialCost, LinearCost, PolynomialCost, TableCost
from kfac.planning.fusion import fusion_finish_s, plan_fusion
from kfac.planning.placement import Placement, placement_finish_s, placement_lower_bound_s, plan_placement
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
    "Placement",
    "Plan",
    "PolynomialCost",
    "ScheduleConfig",
    "TableCost",
    "fusion_finish_s",
    "placement_finish_s",
    "placement_lower_bound_s",
    "plan_fusion",
    "plan_placement",
]
