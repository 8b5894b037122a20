"""What ``python -m slurm`` does with sweeps: show them, act on their jobs, hand their runs over again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from slurm import launcher, local, manifest, queue
from slurm.status import RunStatus, counts, log_files, sweep_status, table

UNFINISHED = {"failed", "cancelled", "interrupted", "lost"}
CLEAR = "\033[H\033[2J"


def find_sweep(text: str, runs: str = "runs") -> Path:
    """A sweep's folder from its path or name; ValueError if there is none."""
    for path in (Path(text), Path(runs) / text):
        if path.is_dir():
            return path
    raise ValueError(f"no sweep {text}: neither a folder, nor one in {runs}")


def states(sweep: Path) -> tuple[list[RunStatus], str]:
    """The runs of a sweep, and why the queue could not be asked (the states are the records' alone then)."""
    try:
        return sweep_status(sweep), ""
    except queue.SlurmError as error:
        return sweep_status(sweep, ask=False), str(error)


def status(arguments: argparse.Namespace) -> int:
    """Print a sweep's runs; 0 unless one is over without having finished, 2 if the queue could not be asked."""
    sweep = find_sweep(arguments.sweep, arguments.runs)
    while True:
        rows, note = states(sweep)
        if not rows:
            raise ValueError(f"{sweep} holds no runs (a sweep's folder is runs/SWEEP)")
        text = json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else table(rows)
        again = arguments.watch is not None and not all(row.over for row in rows)
        print((CLEAR if arguments.watch is not None and sys.stdout.isatty() else "") + text, flush=True)
        if note:
            print(f"note: the states are the records' alone, since {note}", file=sys.stderr)
        if not again:
            return 2 if note else int(any(row.over and row.state != "finished" for row in rows))
        time.sleep(arguments.watch)


def ls(arguments: argparse.Namespace) -> int:
    """A line per sweep of the folder of runs."""
    root = Path(arguments.runs)
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_dir() and ((path / manifest.FILE).exists() or next(path.glob("*/run.json"), None)):
            rows, note = states(path)
            grids = manifest.read(path).grids
            asked = grids[-1]["overrides"] if grids else []
            grid = " ".join(text for text in asked if not text.startswith(("sweep=", "runs=")))
            states_ = {state: sum(row.state == state for row in rows) for state in sorted({r.state for r in rows})}
            found.append({"sweep": path.name, "runs": len(rows), "states": states_, "grid": grid, "note": note})
            if not arguments.json:
                print(f"{path.name:<24} {counts(rows):<40} {grid}".rstrip())
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif not found:
        print(f"no sweeps in {root}", file=sys.stderr)
    return 0


def logs(arguments: argparse.Namespace) -> int:
    """The last lines that runs have written: all of a sweep's, or those whose name begins (or ends) as given."""
    sweep = find_sweep(arguments.sweep, arguments.runs)
    known = manifest.read(sweep).submissions
    wanted = {name: s for name, s in known.items() if arguments.run is None or arguments.run in (name, s.job_id)}
    wanted = wanted or {name: s for name, s in known.items() if arguments.run in name}
    if not wanted:
        raise ValueError(f"{sweep} has no run or job {arguments.run}: python -m slurm status {sweep} lists them")
    for name, submission in wanted.items():
        files = [path for path in log_files(sweep, submission) if path.stat().st_size]
        if arguments.errors:
            files = [path for path in files if path.suffix != ".out"]
        if not files:
            print(f"==> {name} (job {submission.job_id}) has written nothing yet")
        for path in files:
            lines = path.read_text(errors="replace").splitlines()
            print(f"==> {name} (job {submission.job_id}) {path}", *lines[-arguments.lines :], sep="\n")
    return 0


def cancel(arguments: argparse.Namespace) -> int:
    """Cancel a sweep's jobs that wait or run."""
    sweep = find_sweep(arguments.sweep, arguments.runs)
    alive = [row.job_id for row in sweep_status(sweep) if row.job_id and not row.over]
    if alive:
        manifest.note_cancelled(sweep, alive)
        queue.cancel([job for job in alive if not local.is_local(job)])
        local.cancel([job for job in alive if local.is_local(job)])
    print(f"cancelled {len(alive)} job{'' if len(alive) == 1 else 's'}")
    return 0


def again(arguments: argparse.Namespace, which: set[str]) -> int:
    """Hand over again the runs that are in one of these states; each continues from its last checkpoint."""
    sweep = find_sweep(arguments.sweep, arguments.runs)
    submissions = launcher.resubmit(sweep, which)
    if not submissions:
        print(f"nothing to do: no run is {' or '.join(sorted(which))}")
    return 0


def retry(arguments: argparse.Namespace) -> int:
    """Hand over again what failed."""
    if not arguments.failed:
        raise ValueError("retry --failed hands over again what failed; resume all that did not finish")
    return again(arguments, {"failed"})


def resume(arguments: argparse.Namespace) -> int:
    """Hand over again all that did not finish and is not under way."""
    return again(arguments, UNFINISHED)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands' options."""
    table_ = (
        ("status", status, "the state of a sweep's runs"),
        ("logs", logs, "what its runs have written"),
        ("cancel", cancel, "cancel its jobs that are not over"),
        ("retry", retry, "hand its failed runs over again"),
        ("resume", resume, "hand over again all that did not finish"),
        ("ls", ls, "the sweeps"),
    )
    for name, function, text in table_:
        one = commands.add_parser(name, help=text, description=text)
        if name != "ls":
            one.add_argument("sweep", metavar="SWEEP", help="the sweep's folder, or its name if that is RUNS/NAME")
        one.add_argument("--runs", default="runs", help="the folder of all run records (default: %(default)s)")
        one.set_defaults(function=function)
        if name in ("status", "ls"):
            one.add_argument("--json", action="store_true", help="as a JSON list instead of a table")
        if name == "status":
            one.add_argument(
                "--watch", type=float, nargs="?", const=5.0, metavar="SECONDS", help="show it anew until all are over"
            )
        if name == "logs":
            one.add_argument("run", nargs="?", metavar="RUN", help="a run's name, a part of it, or a job's number")
            one.add_argument("-n", "--lines", type=int, default=20, help="of each file (default: %(default)s)")
            one.add_argument("--errors", action="store_true", help="only the error output")
        if name == "retry":
            one.add_argument("--failed", action="store_true", help="those that failed")
