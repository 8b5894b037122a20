"""From Hydra's composed configurations to runs that are handed over, shown, or awaited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from experiments.command import FAILED, INTERRUPTED, plain
from experiments.config import TrainConfig
from experiments.settings import ConfigError
from slurm import launcher, queue
from slurm.manifest import Submission
from slurm.plan import Request
from slurm.site import HERE, LOCAL, Site


def launch(configs: Sequence[DictConfig], overrides: Sequence[tuple[str, ...]], asked: Sequence[str]) -> None:
    """Hand over the runs of a sweep (or several, by name), or with ``site.dry_run`` show what that would do.

    Args:
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
    if any(request.site.scheduler == HERE for request in requests) and not requests[0].site.dry_run:
        raise ConfigError("site.scheduler=here: choose site=local or site=slurm")
    sweeps: defaultdict[Path, list[Request]] = defaultdict(list)
    for request in requests:
        sweeps[request.config.record_path.parent].append(request)
    try:
        handed_over = [(sweep, members, _hand_over(sweep, members, asked)) for sweep, members in sweeps.items()]
        failed = [text for sweep, members, new in handed_over if (text := _wait(sweep, members, new))]
    except queue.SlurmError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        launcher.say("stopped; the same command continues what has a checkpoint")
        raise SystemExit(INTERRUPTED) from None
    if failed:
        launcher.say("\n".join(failed))
        raise SystemExit(FAILED)


def _hand_over(sweep: Path, requests: Sequence[Request], asked: Sequence[str]) -> list[Submission]:
    if any(request.site.dry_run for request in requests):
        launcher.say(launcher.dry_run(sweep, requests))
        return []
    submissions = launcher.submit(sweep, requests, asked=asked)
    if submissions and _on_slurm(requests):
        launcher.say(f"python -m slurm status {sweep}   shows how they are doing, cancel ends them")
    return submissions


def _wait(sweep: Path, requests: Sequence[Request], submissions: Sequence[Submission]) -> str:
    """What to say of the runs that did not finish, where this waits for them; those on this machine are over."""
    if not submissions or (_on_slurm(requests) and not any(request.site.wait for request in requests)):
        return ""
    return launcher.failures(sweep, submissions, launcher.wait(sweep, submissions))


def _on_slurm(requests: Sequence[Request]) -> bool:
    return any(request.site.scheduler != LOCAL for request in requests)
