"""``python -m experiments.train``: train a model with one of the schedules and record the run."""

from __future__ import annotations

if __name__ == "__main__":
    from experiments.interrupts import end_at_interrupts

    end_at_interrupts()  # loading the libraries takes seconds

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.command import RunFailedError, plain, run_command
from experiments.config import TrainConfig
from experiments.devices import choose_device
from experiments.launch import LaunchError, launch
from experiments.load import doubt
from experiments.locks import RecordInUseError, job_facts
from experiments.ranks import Rank, StopRequest, rank_from_environment
from experiments.records import FAILED, FINISHED, INTERRUPTED, RUNNING, RunRecord
from experiments.redaction import mask_output
from experiments.settings import ConfigError
from experiments.tracking import tell_failure

logger = logging.getLogger("experiments.train")  # also where this module runs as __main__


def main() -> None:
    """The command."""
    run_command("train", run, TrainConfig.from_dict)


def run(settings: DictConfig) -> str:
    """One run of a (composed) configuration: its ranks are started here, unless torchrun or SLURM started this one.

    Returns:
        the run's status.

    Raises:
        RunFailedError: if a rank failed (which has been reported).
        KeyboardInterrupt: if the run was asked to stop.
    """
    config = TrainConfig.from_dict(plain(settings))
    rank = rank_from_environment(os.environ, config.world_size, config.record_path)
    if rank is None:
        status = run_here(config)
    else:
        config.record_path.mkdir(parents=True, exist_ok=True)  # the ranks may meet there
        status = run_rank(config.to_dict(), rank)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return status


def run_here(config: TrainConfig) -> str:
    """Run all ranks of a configuration on this machine, unless the run has finished before.

    Raises:
        RunFailedError: if a rank failed (which has been reported).
        KeyboardInterrupt: if the run was asked to stop.
    """
    set_up_logging(0)
    choose_device(config.device, config.world_size)
    record = begin(config)
    if record is None:
        return FINISHED
    payload = {"config": config.to_dict(), "record": str(record.path)}
    logs = record.path / "logs"
    try:
        status = launch(
            "experiments.train:run_launched",
            payload,
            config.world_size,
            threads=config.threads,
            log_folder=logs,
            stopping=f"stopping with a checkpoint after at most {config.progress} more iterations",
        )
    except LaunchError as error:
        if error.failure.mistake:
            _end_segment(record, FAILED, error.failure.to_dict())
            raise ConfigError(error.failure.mistake) from None
        print(f"{config.run_id} failed: {error.failure}\nlogs: {logs}", file=sys.stderr)  # noqa: T201
        _end_segment(record, FAILED, error.failure.to_dict())
        tell_failure(config.tracking, record)
        raise RunFailedError(str(error)) from None
    except OSError as error:  # the ranks could not be started
        print(f"{config.run_id} failed: {error}", file=sys.stderr)  # noqa: T201
        _end_segment(record, FAILED, {"rank": None, "message": f"failed: {error}", "traceback": ""})
        raise RunFailedError(str(error)) from None
    except BaseException:
        _end_segment(record, INTERRUPTED)
        logger.warning("%s is interrupted; the same command continues it", config.run_id)
        raise
    finally:
        record.close()
    end(record, status)
    return str(status)


def run_launched(payload: Mapping[str, Any], rank: Rank) -> str:
    """One rank that :func:`run_here` started."""
    from experiments.training import train

    set_up_logging(rank.rank)
    path = Path(payload["record"])
    return train(TrainConfig.from_dict(payload["config"]), rank, lambda _: RunRecord.load(path))


def run_rank(config: Mapping[str, Any], me: Rank, stop: StopRequest | None = None) -> str:
    """One rank that something else started (torchrun, SLURM): rank 0 keeps the record.

    Args:
        config: the resolved configuration, as plain data.
        me: this process.
        stop: listens for signals already; None: from now on.

    Returns:
        ``finished``, or ``interrupted`` where SIGTERM or SIGUSR2 asked for it, with a checkpoint of all ranks.
    """
    from experiments.training import train

    settings = TrainConfig.from_dict(config)
    set_up_logging(me.rank)
    record: RunRecord | None = None

    def open_record(is_first: bool) -> RunRecord | None:
        nonlocal record
        if is_first:
            record = begin(settings)
            return record
        record = RunRecord.load(settings.record_path)
        return None if record.status == FINISHED else record

    try:
        status = train(settings, me, open_record, stop)
    except Exception as error:
        failed = _note_failure(settings.record_path, me.rank, error)
        if failed is not None:
            tell_failure(settings.tracking, failed)
        raise
    if me.rank == 0 and record is not None:
        end(record, status)
        record.close()
    return status


def begin(config: TrainConfig) -> RunRecord | None:
    """Open the run's record for a new start or a continuation; None if it has finished already (which is said)."""
    facts = {
        "schedule": config.schedule.label,
        "model": config.model.name,
        "data": config.data.name,
        "world_size": config.world_size,
        "seed": config.seed,
    }
    name, path = config.name or config.run_id, config.record_path
    try:
        record = RunRecord.open(
            path, run_id=config.run_id, name=name, facts=facts, config=config.to_dict(), rerun=config.rerun
        )
    except RecordInUseError as error:
        raise ConfigError(f"{error}: wait for it, or end it") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"runs={config.runs}: no record can be kept in {path}: {error}") from error
    if record.status == FINISHED:
        logger.info("%s has finished before: skipped (rerun=true starts over)", path)
        record.close()
        return None
    going_on = bool(record.head["segments"])
    try:
        same = record.begin_segment()
    except OSError as error:
        record.close()
        raise ConfigError(f"runs={config.runs}: the record in {path} cannot be written: {error}") from error
    if not same:
        logger.warning("%s: the code has changed since the run was interrupted", path)
    logger.info("%s %s", "continuing" if going_on else "recording", path)
    return record


def end(record: RunRecord, status: str) -> None:
    """Close the run's books and say how it went."""
    _end_segment(record, status)
    if status != FINISHED:
        logger.info("%s is %s; the same command continues it", record.path, status)
        return
    if summary := record.read("summary.json"):
        logger.info("%s", describe(summary))
        if text := doubt(summary.get("load")):
            logger.warning("%s", text)
    logger.info("finished: %s", record.path)


def describe(summary: Mapping[str, Any]) -> str:
    """A summary in a few lines: loss and metric, seconds per iteration, and where they go."""
    from experiments.summary import METRICS, describe_metric

    lines = []
    found = {name: summary.get(f"eval_{name}") for name in METRICS}
    metrics = [describe_metric(name, value) for name, value in found.items() if value is not None]
    if metrics:
        lines.append(", ".join([f"test loss {summary['eval_loss']:.4f}", *metrics]))
    times = summary["iteration_s"]
    if times:
        spread = f"(quartiles {1e3 * times['q25']:.1f} to {1e3 * times['q75']:.1f})"
        lines.append(f"{1e3 * times['median']:.1f} ms per iteration {spread}, median of {times['n']}")
    parts = [f"{kind} {1e3 * seconds:.1f}" for kind, seconds in summary["breakdown_s"].items() if seconds > 0]
    if parts:
        count = len(summary["recorded_iterations"])
        lines.append(f"exposed ms (mean of {count} recorded iteration{'s' * (count != 1)}): {', '.join(parts)}")
    hidden = [f"{kind} {1e3 * seconds:.1f}" for kind, seconds in summary["hidden_s"].items() if seconds > 0]
    if hidden:
        lines.append(f"hidden ms (of the same): {', '.join(hidden)}")
    return "\n".join(lines)


def set_up_logging(rank: int) -> None:
    """Rank 0 tells how the run goes; the others only what is wrong, with their number; both without secrets."""
    mask_output()
    form = "%(message)s" if rank == 0 else f"rank {rank}: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, stream=sys.stdout if rank == 0 else sys.stderr)
    logging.getLogger("experiments").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def _note_failure(path: Path, rank: int, error: Exception) -> RunRecord | None:
    """Whichever rank fails first says so in the record: rank 0 may be stuck in a collective by now.

    Returns:
        the record, from the rank that was the first.
    """
    try:
        record = RunRecord.load(path)
    except ValueError:
        return None
    facts = job_facts()
    mine = facts == {name: record.head["segments"][-1].get(name) for name in facts}  # not of a later start of the job
    if record.status == RUNNING and mine:
        text = "".join(traceback.format_exception(error))
        message = f"failed: {type(error).__name__}: {error}"
        facts = {"rank": rank, "type": type(error).__name__, "message": message, "traceback": text}
        _end_segment(record, FAILED, facts)
        return record
    return None


def _end_segment(record: RunRecord, status: str, error: Mapping[str, Any] | None = None) -> None:
    """A record that cannot be written, as on a full disk, must not hide why the run ended."""
    try:
        record.end_segment(status, error)
    except OSError as trouble:
        logger.warning("%s: that the run is %s could not be noted: %s", record.path, status, trouble)


if __name__ == "__main__":
    main()
