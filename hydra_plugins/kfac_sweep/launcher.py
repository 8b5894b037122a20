"""``python -m experiments.train -m ...``: a sweep's runs go where ``site=`` says; without one they run here, in turn.

Every run is composed and checked here, before anything is handed over. Hydra finds this module by its place in
``hydra_plugins`` and imports it at every start, so what is heavy is imported when it is used.
"""

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

TARGET = "hydra_plugins.kfac_sweep.launcher.SweepLauncher"
ConfigStore.instance().store(group="hydra/launcher", name="sweep", node={"_target_": TARGET}, provider="kfac_sweep")


class SweepLauncher(BasicLauncher):
    """Hands a sweep's runs to SLURM and returns, or runs them on this machine; see ``experiments/conf/site``."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra hands over before it launches."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.context, self.sweep_config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Hand over one run per combination of overrides.

        Raises:
            ConfigError: for impossible values, and if SLURM cannot be reached.
            SystemExit: if this waited for the runs and one did not finish (which is told).
        """
        load = self.context.config_loader.load_sweep_config
        composed = [load(self.sweep_config, list(line)) for line in job_overrides]
        if all(config.get("site") is None for config in composed):
            return super().launch(job_overrides, initial_job_idx)
        from slurm.sweeps import launch

        asked = list(OmegaConf.to_container(self.sweep_config.hydra.overrides.task) or [])
        lines = [tuple(filter_overrides(line)) for line in job_overrides]
        launch(composed, lines, [str(line) for line in asked])
        return [
            JobReturn(overrides=list(line), cfg=config, status=JobStatus.COMPLETED, _return_value=None)
            for config, line in zip(composed, job_overrides, strict=True)
        ]
