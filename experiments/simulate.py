"""``python -m experiments.simulate``: one iteration of a schedule on a cluster that need not be there."""

from __future__ import annotations

if __name__ == "__main__":
    from experiments.interrupts import end_at_interrupts

    end_at_interrupts()  # loading the libraries takes seconds

import logging
from pathlib import Path

from omegaconf import DictConfig

from experiments.command import plain, run_command
from experiments.config import SimulateConfig
from experiments.records import write_json
from experiments.settings import ConfigError
from experiments.timeline_view import write_html, write_png
from experiments.train import set_up_logging
from kfac.choice import choose
from kfac.planning import Plan
from kfac.planning.profiles import NO_INTERFERENCE, interference_of
from kfac.schedules import AUTO, make_plan
from kfac.simulation import simulate
from kfac.timeline import KINDS, OTHER, Timeline

PAPERS = "paper64"
"""The cluster that is simulated by default."""

logger = logging.getLogger("experiments.simulate")  # also where this module runs as __main__


DISTURBED = (
    "This cluster's messages slow computing down: that is in what computing takes here. The paper's parts are "
    "differences between runs (docs/reproduction.md), in which it is with the messages."
)


def main() -> None:
    """The command."""
    run_command("simulate", run, SimulateConfig.from_dict)


def run(settings: DictConfig) -> None:
    """Simulate, print the breakdown, write the timeline as trace, picture and page."""
    config = SimulateConfig.from_dict(plain(settings))
    set_up_logging(0)
    model, cluster = config.profiles()
    choice = None
    try:
        if config.schedule.name == AUTO:
            choice = choose(config.schedule.value, model, cluster)
        plan = choice.plan if choice else make_plan(config.schedule.value, model, cluster)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    timeline = simulate(plan, model, cluster)
    name = f"{model.name.replace('/', '_')}-{config.schedule.label}-w{cluster.world_size}{_of_cluster(config)}"
    logger.info("%s", describe(name, plan, timeline))
    if config.borrowed:
        text = "Collectives cost what they do on the profile's %d ranks; scaling=tree or scaling=ring extrapolates."
        logger.info(text, config.borrowed)
    if interference_of(cluster) != NO_INTERFERENCE:
        logger.info("%s", DISTURBED)
    if choice:
        logger.info("%s", choice)
    output = Path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if choice:
            write_json(output / f"{name}.choice.json", choice.to_dict())
        timeline.to_chrome_trace(output / f"{name}.trace.json")
        write_png(timeline, output / f"{name}.png", f"{name}, simulated")
        write_html(timeline, output / f"{name}.html", f"{name}, simulated")
    except OSError as error:
        raise ConfigError(f"output={config.output}: {error}") from error
    logger.info("written: %s", output / f"{name}.{{trace.json,png,html}}")


def _of_cluster(config: SimulateConfig) -> str:
    """What tells the files of one cluster from those of another; nothing for the paper's as it is."""
    parts = [] if config.cluster == PAPERS else [Path(config.cluster).stem]
    return "".join(f"-{part}" for part in (*parts, *([config.scaling] if config.scaling else [])))


def describe(name: str, plan: Plan, timeline: Timeline) -> str:
    """The breakdown as a table: exposed and hidden milliseconds per kind."""
    exposed, hidden = timeline.breakdown_s(), timeline.hidden_s()
    lines = [name, str(plan), f"{'':<14}{'exposed ms':>12}{'hidden ms':>12}"]
    for kind in (*KINDS, OTHER):
        if exposed[kind] or hidden.get(kind):
            concealed = f"{1e3 * hidden[kind]:12.2f}" if hidden.get(kind) else ""
            lines.append(f"{kind:<14}{1e3 * exposed[kind]:12.2f}{concealed}")
    lines.append(f"{'iteration':<14}{1e3 * timeline.iteration_s:12.2f}")
    lines.append("Exposed: what a rank computes, else the message it waits for; averaged over the ranks.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
