"""Simulation: the timeline of a Plan on cost models, for any number of ranks."""

from kfac.simulation.conservation import ConservationError
from kfac.simulation.events import Task, critical_path, run_tasks
from kfac.simulation.iteration import simulate, simulated_iteration_s, simulated_second_order_s

__all__ = [
    "ConservationError",
    "Task",
    "critical_path",
    "run_tasks",
    "simulate",
    "simulated_iteration_s",
    "simulated_second_order_s",
]
