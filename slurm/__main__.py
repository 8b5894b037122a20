"""``python -m slurm``: how a sweep is doing, ending it, and a SLURM of one's own on one machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from slurm import manifest, queue
from slurm.local_cluster import ClusterShape, LocalCluster, LocalClusterError
from slurm.status import sweep_status, table


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m slurm", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sweep_help = "the sweep's folder, or its name if that is runs/NAME"
    status = commands.add_parser("status", help="the state of a sweep's runs")
    status.add_argument("sweep", metavar="SWEEP", help=sweep_help)
    status.add_argument("--json", action="store_true", help="as a JSON list instead of a table")
    cancel = commands.add_parser("cancel", help="cancel a sweep's jobs that are not over")
    cancel.add_argument("sweep", metavar="SWEEP", help=sweep_help)

    text = "a real SLURM of virtual nodes with fake GPUs on this machine"
    local = commands.add_parser("local-cluster", help=text, description=text)
    actions = local.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser("up", help='start it: eval "$(python -m slurm local-cluster up)" also sets SLURM_CONF')
    down = actions.add_parser("down", help="kill its jobs and end its daemons")
    state = actions.add_parser("status", help="its daemons and nodes")
    for action in (up, down, state):
        action.add_argument("directory", metavar="DIR", nargs="?", help="its folder (default: in the user's cache)")
    for option in fields(ClusterShape):
        flag = "--" + option.name.replace("_", "-")
        up.add_argument(flag, type=int, default=option.default, metavar="N", help="default: %(default)s")
    return top


def find_sweep(text: str) -> Path:
    """A sweep's folder from its path or name; ValueError if there is none."""
    for path in (Path(text), Path("runs") / text):
        if path.is_dir():
            return path
    raise ValueError(f"no sweep {text}: neither a folder, nor one in runs")


def show_status(arguments: argparse.Namespace) -> int:
    """Print a sweep's runs; 0 unless one is over without having finished, 2 if the queue could not be asked."""
    sweep = find_sweep(arguments.sweep)
    note = ""
    try:
        rows = sweep_status(sweep)
    except queue.SlurmError as error:
        rows, note = sweep_status(sweep, ask=False), str(error)
    if not rows:
        raise ValueError(f"{sweep} holds no runs (a sweep's folder is runs/SWEEP)")
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else table(rows))
    if note:
        print(f"note: the states are the records' alone, since {note}", file=sys.stderr)
        return 2
    return int(any(row.over and row.state != "finished" for row in rows))


def cancel_sweep(arguments: argparse.Namespace) -> int:
    """Cancel a sweep's jobs that wait or run."""
    sweep = find_sweep(arguments.sweep)
    known = queue.jobs(submission.job_id for submission in manifest.read(sweep).values())
    alive = [job_id for job_id, job in known.items() if not job.ended]
    if alive:
        manifest.note_cancelled(sweep, alive)
        queue.cancel(alive)
    print(f"cancelled {len(alive)} job{'' if len(alive) == 1 else 's'}")
    return 0


def local_cluster(arguments: argparse.Namespace) -> int:
    """Start, end or show the local cluster; ``up`` prints only the line to evaluate on standard output."""
    cluster = LocalCluster(arguments.directory)
    if arguments.action == "up":
        shape = ClusterShape(**{option.name: getattr(arguments, option.name) for option in fields(ClusterShape)})
        started = cluster.up(shape)
        print(f"{'started' if started else 'already up'}: {', '.join(cluster.nodes())}", file=sys.stderr)
        if sys.stdout.isatty():
            print('# for this shell to use it: eval "$(python -m slurm local-cluster up)"', file=sys.stderr)
        print(f"export SLURM_CONF={shlex.quote(str(cluster.slurm_conf))}")
        return 0
    if arguments.action == "down":
        print("down" if cluster.down() else f"no cluster in {cluster.directory}")
        return 0
    for name, process in cluster.processes().items():
        print(f"{name:<16} {'process ' + str(process) if process else 'dead'}")
    for node, state in cluster.nodes().items():
        print(f"{node:<16} {state}")
    if not cluster.is_up():
        print(f"no cluster is up in {cluster.directory}", file=sys.stderr)
    return int(not cluster.is_up())


def main(command_line: Sequence[str] | None = None) -> int:
    """Run a command; a mistake or an unreachable SLURM is one line and exit status 2."""
    arguments = parser().parse_args(command_line)
    commands = {"status": show_status, "cancel": cancel_sweep, "local-cluster": local_cluster}
    try:
        return commands[arguments.command](arguments)
    except (ValueError, LocalClusterError, queue.SlurmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
