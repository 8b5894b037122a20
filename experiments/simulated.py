"""The simulation of a run's own plan on the costs that it recorded, to be laid beside what was measured."""

from __future__ import annotations

import logging

from experiments.records import RunRecord
from kfac.planning import ClusterProfile, ModelProfile, Plan
from kfac.simulation import simulate
from kfac.timeline import Timeline

logger = logging.getLogger(__name__)


PROFILES = ("model_profile.json", "cluster_profile.json")


def simulated_timeline(record: RunRecord, costs: RunRecord | None = None) -> Timeline | None:
    """One iteration of the record's plan by its model and cluster profiles; None if it does not hold all three.

    Files that cannot be read, or do not go together, are named in one warning.

    Args:
        record: of the run.
        costs: of a run of the same model on as many ranks of the same machine, whose profiles are taken instead.
    """
    costs = costs or record
    try:
        plan, (model, cluster) = record.read("plan.json"), (costs.read(name) for name in PROFILES)
        if plan is None or model is None or cluster is None:
            return None
        return simulate(Plan.from_dict(plan), ModelProfile.from_dict(model), ClusterProfile.from_dict(cluster))
    except Exception as error:  # a file may hold anything
        logger.warning("%s: its plan cannot be simulated: %s", record.path, error)
        return None
