"""What clusters do to jobs, on a real SLURM: every run must end with bitwise the parameters of one left alone."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from experiments.records import RunRecord
from slurm import launcher, local, manifest
from slurm.status import sweep_status
from tests.slurm.conftest import compose, scontrol

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

ITERATIONS = 150
AT_ONCE = 3  # jobs that share this machine's cores
DISK_BYTES = 16 << 20
HELD_AFTER = 12  # iterations; checkpoints are saved before iterations 10, 20, ...
TINY = (
    "model=mlp", "model.hidden=[16]", "data.image_size=8", "cluster=default", f"iterations={ITERATIONS}",
    "batch_size=16", "world_size=2", "tracking=none", "progress=1", "checkpoint.every=10", "timeline.count=0",
    "evaluation.every=40",
)  # fmt: skip


class Job:
    """A run on SLURM that can be held in the middle of training."""

    def __init__(self, root: Path, fate: Callable, *site: str) -> None:
        request = compose(root, *TINY, f"sweep={fate.__name__}", "site=local_cluster", *site)
        self.sweep = root / fate.__name__
        self.path = self.sweep / request.config.run_id
        self.fate, self.request = fate, request

    def hold(self) -> int:
        """Stop rank 0 after some iterations; the other rank waits for it in a collective."""
        rows = self.path / "metrics.jsonl"
        until(lambda: rows.exists() and rows.read_text().count("\n") >= HELD_AFTER)
        process = self.process(0)
        os.kill(process, signal.SIGSTOP)
        assert len(rows.read_text().splitlines()) < ITERATIONS
        return process

    def process(self, rank: int) -> int:
        """The process id of a rank."""
        wanted = {f"SLURM_JOB_ID={self.id}".encode(), f"SLURM_PROCID={rank}".encode()}
        for entry in Path("/proc").iterdir():
            try:
                found = set((entry / "environ").read_bytes().split(b"\0")) if entry.name.isdigit() else set()
                # srun and the script have the variables of rank 0, too.
                if wanted <= found and (entry / "comm").read_text().startswith("python"):
                    return int(entry.name)
            except OSError:
                continue
        raise AssertionError(f"no rank {rank} of job {self.id}")

    def state(self) -> str:
        (row,) = sweep_status(self.sweep)
        return row.state

    def meet_fate(self) -> None:
        (submission,) = launcher.submit(self.sweep, [self.request])
        self.id, self.submitted_s = submission.job_id, time.time()
        self.fate(self)
        until(lambda: self.state() in ("finished", "failed", "lost", "interrupted"))


def until(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def release(process, number):
    """Let a held rank go on once the signal is there; SLURM may have done so itself (it sends SIGCONT first)."""
    bit = 1 << (number - 1)

    def there():
        try:
            text = Path(f"/proc/{process}/status").read_text()
        except OSError:  # it has ended
            return True
        lines = dict(line.split(":\t") for line in text.splitlines())
        return int(lines["ShdPnd"], 16) & bit or not lines["State"].startswith("T")

    until(there)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


def preempted(job):
    process = job.hold()
    wanted = ["-p", "high", "-w", "node0", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    subprocess.run(["sbatch", *wanted], check=True, capture_output=True, cwd=job.sweep)
    release(process, signal.SIGUSR2)


def timed_out(job):
    """An hour's limit is shortened to what has passed and a little more, and given back after the signal."""
    process = job.hold()
    ran_s = time.time() - job.submitted_s
    scontrol("update", f"jobid={job.id}", f"timelimit={int(ran_s / 60) + 2}")
    release(process, signal.SIGUSR2)
    until(lambda: "Restarts=1" in scontrol("show", "job", job.id))
    scontrol("update", f"jobid={job.id}", "timelimit=60")


def on_a_node_that_fails(job):
    job.hold()
    scontrol("update", "nodename=node3", "state=down", "reason=test")
    until(lambda: "Restarts=1" in scontrol("show", "job", job.id))


def with_a_killed_rank(job):
    process = job.hold()
    os.kill(job.process(1), signal.SIGKILL)
    os.kill(process, signal.SIGCONT)


def on_a_full_disk(job):
    process = job.hold()
    filler = job.sweep.parent / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert not shutil.disk_usage(job.sweep).free
    os.kill(process, signal.SIGCONT)
    stuck(job.path)
    filler.unlink()


def without_its_file_system(job):
    process = job.hold()
    away = job.sweep.with_name("away")
    job.sweep.rename(away)
    os.kill(process, signal.SIGCONT)
    stuck(away / job.path.name)
    assert not job.sweep.exists()  # nothing was written in its place
    away.rename(job.sweep)


def stuck(path):
    """Wait until a run does not come further."""
    rows, seen, since_s = path / "metrics.jsonl", 0, time.monotonic()
    while time.monotonic() < since_s + 2:
        if (size := rows.stat().st_size) != seen:
            seen, since_s = size, time.monotonic()
        time.sleep(0.05)
    assert rows.read_text().count("\n") < ITERATIONS


def cancelled_and_resumed(job):
    os.kill(job.hold(), signal.SIGCONT)
    manifest.note_cancelled(job.sweep, [job.id])
    subprocess.run(["scancel", job.id], check=True)
    until(lambda: job.state() == "cancelled")
    assert "Restarts=0" in scontrol("show", "job", job.id)  # a cancelled job is not queued again
    launcher.resubmit(job.sweep, {"cancelled"})


FATES = {
    preempted: ("site.partition=low", "tasks_per_node=1", "+site.extra.nodelist='node0,node1'"),
    timed_out: ("site.signal_s=120", "+site.extra.nodelist=node1"),
    on_a_node_that_fails: ("tasks_per_node=1", "+site.extra.nodelist='node2,node3'"),
    with_a_killed_rank: ("+site.extra.nodelist=node1",),
    cancelled_and_resumed: ("+site.extra.nodelist=node2",),
    on_a_full_disk: ("+site.extra.nodelist=node3",),
    without_its_file_system: ("+site.extra.nodelist=node1",),
}
WAITING = (on_a_full_disk, without_its_file_system)
"""These wait for better times, instead of being started again."""


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """The folder of a file system with room for a run and little more; None where only root could mount it."""
    folder = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def fates(slurm_in_process, tmp_path_factory, small_disk):
    """All of them at once, and the same run left alone, on this machine without SLURM."""
    root = tmp_path_factory.mktemp("fates")
    reference = compose(root, *TINY, "sweep=reference", "site=local")
    roots = {on_a_full_disk: small_disk}
    jobs = {fate: Job(place, fate, *site) for fate, site in FATES.items() if (place := roots.get(fate, root))}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(job.meet_fate) for job in jobs.values()]
        launcher.submit(root / "reference", [reference])
        for future in futures:
            future.result()
    return jobs, root / "reference" / reference.config.run_id


def rows(path):
    return [(row["kind"], row["iter"], row["loss"]) for row in RunRecord.load(path).rows()]


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.__name__)
def test_nothing_is_lost(fates, fate):
    jobs, reference = fates
    if fate not in jobs:
        pytest.skip("mounting a small file system needs root, and is not allowed in every container")
    path = jobs[fate].path
    record = RunRecord.load(path)
    assert record.status == "finished"
    assert record.restarts == (fate not in WAITING)
    assert rows(path) == rows(reference)
    assert [row[1] for row in rows(path) if row[0] == "train"] == list(range(ITERATIONS))
    ours, theirs = (torch.load(folder / "model.pt", weights_only=True) for folder in (path, reference))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert len(list(jobs[fate].sweep.glob("*/run.json"))) == 1
    assert not (path / "checkpoint").exists()
    reason = record.head["segments"][0]["end_reason"]
    assert reason in {
        preempted: ["interrupted"], timed_out: ["interrupted"], with_a_killed_rank: ["failed"],
        on_a_full_disk: ["finished"], without_its_file_system: ["finished"],
        cancelled_and_resumed: ["interrupted", "failed", None], on_a_node_that_fails: ["interrupted", "failed", None],
    }[fate]  # fmt: skip


def test_without_slurm_there_is_the_same_state(fates):
    _, reference = fates
    (row,) = sweep_status(reference.parent)
    assert (row.state, row.iteration, row.iterations, row.restarts) == ("finished", ITERATIONS, ITERATIONS, 0)
    (submission,) = manifest.read(reference.parent).submissions.values()
    assert local.is_local(submission.job_id)
    assert submission.ended
