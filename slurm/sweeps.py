"""From Hydra's composed configurations to runs that are handed over, shown, or awaited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from experiments.command import FAILED, INTERRUPTED, plain
from experiments.config import TrainConfig
from experiments.settings import ConfigError
from slurm import launcher, queue
from slurm.plan import Request
from slurm.site import HERE, LOCAL, Site


def launch(
    sweep: Path, configs: Sequence[DictConfig], overrides: Sequence[tuple[str, ...]], asked: Sequence[str]
) -> None:
    """Hand over a sweep's runs, or with ``site.dry_run`` show what that would do.

    Args:
        sweep: its folder.
        configs: of each run, composed.
        overrides: of each run, what sets it apart.
        asked: the overrides of the whole command.

    Raises:
        ConfigError: for impossible values, and if SLURM cannot be reached.
        SystemExit: if this waited for the runs and one did not finish (which is told).
    """
    data = [plain(config) for config in configs]
    requests = [
        Request(TrainConfig.from_dict(one), Site.of(one), line) for one, line in zip(data, overrides, strict=True)
    ]
    try:
        if any(request.site.dry_run for request in requests):
            launcher.say(launcher.dry_run(sweep, requests))
            return
        if any(request.site.scheduler == HERE for request in requests):
            raise ConfigError("site.scheduler=here: choose site=local or site=slurm")
        submissions = launcher.submit(sweep, requests, asked=asked)
        if not submissions:
            return
        on_slurm = any(request.site.scheduler != LOCAL for request in requests)
        if on_slurm:
            launcher.say(f"python -m slurm status {sweep}   shows how they are doing, cancel ends them")
        if not on_slurm or any(request.site.wait for request in requests):
            rows = launcher.wait(sweep, submissions)
            if failed := launcher.failures(sweep, submissions, rows):
                launcher.say(failed)
                raise SystemExit(FAILED)
    except queue.SlurmError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        launcher.say("stopped; the same command continues what has a checkpoint")
        raise SystemExit(INTERRUPTED) from None
