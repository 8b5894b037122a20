"""Measuring this machine: a few recorded iterations, then collectives and inverses alone; what a run plans from."""

from __future__ import annotations

import logging
from typing import Any

from experiments.assembly import Site, assemble
from experiments.config import CommonConfig, TrainConfig
from experiments.data import Data
from experiments.records import RunRecord
from experiments.sharding import Shards, derive_seed
from kfac import KFAC
from kfac.choice import Choice, choose
from kfac.planning import ClusterProfile, ModelProfile
from kfac.planning.costs import inverse_dim
from kfac.planning.plan import factors_of
from kfac.planning.shipped_profiles import estimate_model_profile, load_shipped_cluster
from kfac.profiling import model_profile_from, profile_cluster
from kfac.schedules import NAMED_SCHEDULES
from kfac.setup import suitable
from kfac.timeline import Timeline

logger = logging.getLogger(__name__)

WARM_UP = 2
"""Iterations before the recorded ones."""


def measure(config: CommonConfig, data: Data, site: Site) -> tuple[ModelProfile, ClusterProfile]:
    """Profiles of the configured model and of the ranks; collective, the same result on every rank.

    The iterations train a model of their own, with statistics and inverses in each and without pipelining, so that
    messages in flight do not slow down what is being timed. Nothing of it is left when this returns.
    """
    kfac = config.kfac_config(factor_interval=1, inverse_interval=1)
    learner = assemble(config, data, site, kfac=kfac, schedule=NAMED_SCHEDULES["dkfac"])
    communicator, recorder = site.communicator, learner.recorder
    shards = Shards(
        size=data.train_size,
        batch_size=config.batch_size,
        rank=communicator.rank,
        world_size=communicator.world_size,
        seed=config.seed,
    )
    count = WARM_UP + config.profiling.iterations
    requests = ((shards.indices(i), derive_seed(config.seed, "profile", i, communicator.rank)) for i in range(count))
    timelines: list[Timeline] = []
    for number, (inputs, labels) in enumerate(data.training_batches(requests)):
        batch = inputs.to(site.device), labels.to(site.device)
        communicator.barrier()
        if number >= WARM_UP:
            recorder.start()
        learner.step(batch, lr=0.0)
        if number >= WARM_UP:
            timelines.append(recorder.stop())
    sizes = learner.preconditioner.layer_sizes
    learner.preconditioner.close()
    model = communicator.broadcast_object(model_profile_from(timelines, sizes, config.model.name))
    dims = [inverse_dim(factor.size) for factor in factors_of(sizes)]
    own = config.kfac_config()  # with its own interval: it decides what is made of factors
    cluster = profile_cluster(communicator, site.device, dims, repeats=config.profiling.repeats, config=own)
    return model, cluster


def profiles_of_run(
    config: TrainConfig, record: RunRecord, data: Data, site: Site
) -> tuple[ModelProfile | None, ClusterProfile | None]:
    """What a run plans from: given, recorded by it before it was interrupted, or measured now; collective.

    None: the schedule needs none, or what is known without measuring is enough.
    """
    model, cluster = config.profiles()
    if not config.measures:
        return model, cluster
    rank = site.communicator.rank
    saved = site.communicator.broadcast_object(_recorded(record) if rank == 0 else None)
    if saved is not None:
        return ModelProfile.from_dict(saved[0]), ClusterProfile.from_dict(saved[1])
    if rank == 0:
        logger.info("measuring this machine")
    measured_model, cluster = measure(config, data, site)
    return model or measured_model, cluster


def _recorded(record: RunRecord) -> tuple[Any, Any] | None:
    try:
        model, cluster = (record.read(name) for name in ("model_profile.json", "cluster_profile.json"))
        if model is None or cluster is None:
            return None
        ModelProfile.from_dict(model), ClusterProfile.from_dict(cluster)
    except Exception as error:  # a file may hold anything
        logger.warning("%s: the profiles are damaged and measured anew: %r", record.path, error)
        return None
    return model, cluster


def explain_choice(kfac: KFAC, model: ModelProfile | None, cluster: ClusterProfile | None) -> Choice:
    """Why ``auto`` has chosen the plan of ``kfac``, which was made with these profiles."""
    schedule: Any = suitable(kfac.schedule, kfac.config)
    model = model or estimate_model_profile("model", kfac.layer_sizes)
    cluster = cluster or load_shipped_cluster()
    return choose(schedule, model, cluster, kfac.plan.world_size, intervals=kfac.config.intervals(0))
