"""``python -m experiments.profile``: measure this machine and write what train and simulate plan from."""

from __future__ import annotations

if __name__ == "__main__":
    from experiments.interrupts import end_at_interrupts

    end_at_interrupts()  # loading the libraries takes seconds

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.command import RunFailedError, plain, run_command
from experiments.config import ProfileConfig
from experiments.devices import choose_device
from experiments.launch import LaunchError, launch
from experiments.ranks import Rank, rank_from_environment
from experiments.settings import ConfigError
from experiments.train import set_up_logging
from kfac.planning import ClusterProfile, ModelProfile

logger = logging.getLogger("experiments.profile")  # also where this module runs as __main__

MODEL_FILE, CLUSTER_FILE = "model_profile.json", "cluster_profile.json"


def main() -> None:
    """The command."""
    run_command("profile", run, ProfileConfig.from_dict)


def run(settings: DictConfig) -> None:
    """Measure with all ranks and write the two profiles.

    Raises:
        RunFailedError: if a rank failed (which has been reported).
    """
    data = plain(settings)
    config = ProfileConfig.from_dict(data)
    output = Path(config.output).absolute()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output={config.output}: {error}") from error
    rank = rank_from_environment(os.environ, config.world_size, output)
    if rank is not None:
        run_rank({"config": data, "output": str(output)}, rank)
        return
    set_up_logging(0)
    choose_device(config.device, config.world_size)
    payload = {"config": data, "output": str(output)}
    try:
        launch("experiments.profile:run_rank", payload, config.world_size, threads=config.threads)
    except LaunchError as error:
        if error.failure.mistake:
            raise ConfigError(error.failure.mistake) from None
        print(f"profiling failed: {error.failure}", file=sys.stderr)  # noqa: T201
        raise RunFailedError(str(error)) from None


def run_rank(payload: Mapping[str, Any], rank: Rank) -> None:
    """Measure as one rank; rank 0 writes."""
    from experiments.agreement import require_same_options
    from experiments.assembly import Site
    from experiments.data import load_data
    from experiments.load import doubt, of_hosts, part_of_rank, read_load
    from experiments.measure import measure
    from experiments.objectives import objective_of
    from kfac.communication import shutdown

    set_up_logging(rank.rank)
    config, output = ProfileConfig.from_dict(payload["config"]), Path(payload["output"])
    site = Site.enter(config, rank)
    try:
        require_same_options({k: v for k, v in payload["config"].items() if k != "output"}, site.communicator)
        data = load_data(config.data, raw=objective_of(config.model.name).raw)
        before = read_load()
        model, cluster = measure(config, data, site)
        parts = site.communicator.all_gather_object(part_of_rank(rank.rank, before, read_load()))
    finally:
        shutdown()
    if rank.rank == 0:
        model.save(output / MODEL_FILE)
        cluster.save(output / CLUSTER_FILE)
        logger.info("%s", describe(model, cluster))
        for text in filter(None, map(doubt, of_hosts(parts, config.threads))):
            logger.warning("%s", text)
        logger.info("written: %s and %s", output / MODEL_FILE, output / CLUSTER_FILE)


def describe(model: ModelProfile, cluster: ClusterProfile) -> str:
    """The profiles' main numbers, for people."""

    def total_ms(field: str) -> float:
        return 1e3 * sum(float(getattr(layer, field)) for layer in model.layers)

    fields = ("forward_s", "backward_s", "a_statistics_s", "g_statistics_s", "precondition_s")
    parts = ", ".join(f"{field.removesuffix('_s').replace('_', ' ')} {total_ms(field):.2f}" for field in fields)
    lines = [f"{model.name}: {len(model.layers)} layers; ms per iteration: {parts}"]
    for name in ("all_reduce", "reduce", "broadcast"):
        cost = getattr(cluster, name)
        lines.append(f"{name} on {cluster.world_size} ranks: {1e3 * cost(1):.3f} ms, {1e3 * cost(2**20):.2f} per 4 MiB")
    dims = (64, 256, 1024)
    lines.append("inverse: " + ", ".join(f"{1e3 * cluster.inverse(dim):.2f} ms for {dim}" for dim in dims))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
