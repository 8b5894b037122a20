"""What ``tracking=`` and ``tracking.*`` say."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.settings import at_least, one_of

OFF, OFFLINE, ONLINE = "off", "offline", "online"


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """Which sinks get a copy of the record.

    ``tracking=NAME`` or ``tracking=[NAME,NAME]`` chooses them; each name's YAML file switches one of the first three.

    Args:
        wandb: ``off``, ``offline`` (files inside the record) or ``online``.
        tensorboard: event files inside the record.
        trackio: a local data base beside the sweep's records.
        project, entity, tags: how W&B and trackio file the run.
        all_ranks: whether ranks other than 0 send their own iteration times (and system metrics) too.
        system_metrics: whether W&B samples the machine, which takes some of its time.
        init_timeout_s: how long a sink may take to start.
        call_timeout_s: how long it may take for the rows that are handed over together, or any other one thing, before
            the run goes on without it.
        finish_timeout_s: how long the end of a run may wait for it.
    """

    wandb: str = OFF
    tensorboard: bool = False
    trackio: bool = False
    project: str = "spdkfac"
    entity: str | None = None
    tags: tuple[str, ...] = ()
    all_ranks: bool = False
    system_metrics: bool = False
    init_timeout_s: float = 60.0
    call_timeout_s: float = 20.0
    finish_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        one_of("tracking.wandb", self.wandb, (OFF, OFFLINE, ONLINE))
        for name in ("init_timeout_s", "call_timeout_s", "finish_timeout_s"):
            at_least(f"tracking.{name}", getattr(self, name), 0, open_=True, high=86_400)
