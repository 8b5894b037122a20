"""One rank, started by :mod:`experiments.launch`: ``python -m experiments.worker FOLDER RANK PARENT``."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from experiments.ranks import Rank, die_with_parent
from experiments.redaction import mask_output

JOB_FILE = "job.json"


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its error for the launcher."""
    return folder / f"error.rank{rank}.json"


def result_file(folder: Path) -> Path:
    """Where rank 0 leaves what the job's function returned."""
    return folder / "result.json"


def main() -> None:
    """Run the job's function as one rank; an exception is left in a file for the launcher."""
    folder, rank, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    faulthandler.enable()
    mask_output()
    job = json.loads((folder / JOB_FILE).read_text())
    size = job["world_size"]
    meet = f"file://{folder}/rendezvous"
    me = Rank(rank=rank, world_size=size, local_rank=rank, init_method=meet, local_size=size)
    try:
        module, _, function = job["target"].partition(":")
        result = getattr(importlib.import_module(module), function)(job["payload"], me)
        if rank == 0:
            result_file(folder).write_text(json.dumps(result))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        try:
            _leave(error_file(folder, rank), error, rank)
        except OSError:  # no room: the log is what the launcher shows then
            traceback.print_exception(error)
        # Other threads (gloo's, a reader's) may be stuck with the ranks that are gone.
        sys.stdout.flush()
        os._exit(1)
    _end()


def _end() -> None:
    """End as Python does, up to taking itself apart: gloo's threads have aborted one process in fifteen meanwhile."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave(path: Path, error: BaseException, rank: int) -> None:
    # A full disk refuses what is written, and once more what is still buffered when the file is closed.
    twice = isinstance(error, OSError) and isinstance(error.__context__, OSError)
    facts = {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error, chain=not twice)),
        "time": time.time(),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts))
    temporary.replace(path)


if __name__ == "__main__":
    main()
