"""K-FAC with a smart-parallel scheduler.

Names load on first use, so that planning, simulation and analysis start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfac.communication import CommunicationError
    from kfac.config import KFACConfig
    from kfac.inversion import FactorInversionError
    from kfac.planning import ScheduleConfig
    from kfac.preconditioner import KFAC, NonFiniteError
    from kfac.schedules import make_plan
    from kfac.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "CommunicationError",
    "FactorInversionError",
    "KFACConfig",
    "NonFiniteError",
    "ScheduleConfig",
    "Timeline",
    "make_plan",
]

_HOME = {
    "KFAC": "kfac.preconditioner",
    "CommunicationError": "kfac.communication",
    "FactorInversionError": "kfac.inversion",
    "KFACConfig": "kfac.config",
    "NonFiniteError": "kfac.preconditioner",
    "ScheduleConfig": "kfac.planning",
    "Timeline": "kfac.timeline",
    "make_plan": "kfac.schedules",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kfac' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
