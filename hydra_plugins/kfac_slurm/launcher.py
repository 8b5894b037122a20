"""``python -m experiments.train -m ... hydra/launcher=slurm``: a sweep's runs become SLURM jobs.

Every run is composed and checked here, at submission. Hydra finds this module by its place in ``hydra_plugins`` and
imports it at every start, so what is heavy is imported when it is used.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from slurm.resources import Resources

TARGET = "hydra_plugins.kfac_slurm.launcher.SlurmLauncher"
ConfigStore.instance().store(
    group="hydra/launcher",
    name="slurm",
    node={"_target_": TARGET, "wait": False, **asdict(Resources())},
    provider="slurm",
)


class SlurmLauncher(Launcher):
    """Submits a sweep's runs and returns at once, or with ``wait=true`` when all are over (failing if one failed).

    The further keys of ``hydra.launcher`` are those of :class:`slurm.resources.Resources`.
    """

    def __init__(self, wait: bool, **resources: Any) -> None:
        self.wait = wait
        self.resources = resources

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra hands over before it launches."""
        self.context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit one run per combination of overrides.

        Raises:
            ConfigError: for impossible values, and if SLURM cannot be reached.
            SystemExit: with ``wait``, if a run did not finish (which is told).
        """
        from experiments.command import FAILED, plain
        from experiments.config import TrainConfig
        from experiments.settings import ConfigError
        from slurm import launcher, queue

        if self.config.hydra.job.name != "train":
            raise ConfigError("hydra/launcher=slurm submits experiments.train only")
        sweep = Path(self.config.hydra.sweep.dir)
        composed = [self.context.config_loader.load_sweep_config(self.config, list(line)) for line in job_overrides]
        requests = [
            launcher.Request(TrainConfig.from_dict(plain(config)), tuple(filter_overrides(line)))
            for config, line in zip(composed, job_overrides, strict=True)
        ]
        try:
            submissions = launcher.submit(sweep, requests, Resources.from_dict(self.resources))
            if submissions:
                launcher.say(f"python -m slurm status {sweep}   shows how they are doing, cancel ends them")
            if self.wait and submissions:
                rows = launcher.wait(sweep, submissions)
                if failed := launcher.failures(sweep, submissions, rows):
                    launcher.say(failed)
                    raise SystemExit(FAILED)
        except queue.SlurmError as error:
            raise ConfigError(str(error)) from error
        return [
            JobReturn(overrides=list(line), cfg=config, status=JobStatus.COMPLETED, _return_value=None)
            for config, line in zip(composed, job_overrides, strict=True)
        ]
