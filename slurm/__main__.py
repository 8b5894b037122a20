"""``python -m slurm``: how sweeps are doing, acting on them, and a SLURM of one's own on one machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields

from experiments.settings import ConfigError
from slurm import commands, queue
from slurm.local_cluster import ClusterShape, LocalCluster, LocalClusterError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m slurm", description=__doc__)
    parsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parsers(parsers)
    text = "a real SLURM of virtual nodes with fake GPUs on this machine"
    local = parsers.add_parser("local-cluster", help=text, description=text)
    local.set_defaults(function=local_cluster)
    actions = local.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser("up", help='start it: eval "$(python -m slurm local-cluster up)" also sets SLURM_CONF')
    down = actions.add_parser("down", help="kill its jobs and end its daemons")
    state = actions.add_parser("status", help="its daemons and nodes")
    for action in (up, down, state):
        action.add_argument("directory", metavar="DIR", nargs="?", help="its folder (default: in the user's cache)")
    for option in fields(ClusterShape):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            up.add_argument(flag, action="store_true", help="with slurmdbd and a database, so that sacct answers")
        else:
            up.add_argument(flag, type=int, default=option.default, metavar="N", help="default: %(default)s")
    return top


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
    try:
        return int(arguments.function(arguments))
    except PermissionError as error:
        print(f"error: no permission to write {error.filename}: its owner alone can do this", file=sys.stderr)
        return 2
    except (ConfigError, ValueError, OSError, LocalClusterError, queue.SlurmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
