"""Measuring this machine: a few recorded iterations, then collectives and inverses alone."""

from __future__ import annotations

from experiments.assembly import Site, assemble
from experiments.config import CommonConfig
from experiments.data import Data
from experiments.sharding import Shards, derive_seed
from kfac.planning import ClusterProfile, ModelProfile
from kfac.planning.costs import inverse_dim
from kfac.planning.plan import factors_of
from kfac.profiling import model_profile_from, profile_cluster
from kfac.schedules import NAMED_SCHEDULES
from kfac.timeline import Timeline

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
    cluster = profile_cluster(communicator, site.device, dims, repeats=config.profiling.repeats)
    return model, cluster
