"""The simulation of a run's own plan on the costs that it recorded, to be laid beside what was measured."""

from __future__ import annotations

import logging

from experiments.records import RunRecord
from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.simulation import simulate
from kfac.timeline import Timeline

logger = logging.getLogger(__name__)


def simulated_timeline(record: RunRecord) -> Timeline | None:
    """One iteration of the record's plan by its model and cluster profiles; None if it does not hold all three.

    Files that cannot be read, or do not go together, are named in one warning.
    """
    try:
        plan, model, cluster = (record.read(f"{n}.json") for n in ("plan", "model_profile", "cluster_profile"))
        if plan is None or model is None or cluster is None:
            return None
        return simulate(Plan.from_dict(plan), ModelProfile.from_dict(model), ClusterProfile.from_dict(cluster))
    except Exception as error:  # a file may hold anything
        logger.warning("%s: its plan cannot be simulated: %s", record.path, error)
        return None
