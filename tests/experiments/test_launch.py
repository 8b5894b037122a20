"""Ranks that fail, die, hang or are interrupted: told once, ended soon, and none stays behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from experiments.launch import LaunchError, launch
from experiments.ranks import rank_from_environment
from experiments.settings import ConfigError

ROOT = Path(__file__).resolve().parents[2]
JOBS = """
import os, signal, subprocess, sys, time
from pathlib import Path

FOLDER = Path(__file__).parent

def started(payload, rank):
    whole = Path(FOLDER, f"pid{rank.rank}")  # written elsewhere first: nobody reads half of it
    part = Path(FOLDER, f"part{rank.rank}")
    part.write_text(str(os.getpid()))
    part.replace(whole)

def square(payload, rank):
    started(payload, rank)
    print(f"thread setting {os.environ['OMP_NUM_THREADS']}\\n", end="")
    return {"answer": (rank.rank + 7) ** 2, "world_size": rank.world_size}

class Aborts:
    def __del__(self):  # when the interpreter takes itself apart
        os.kill(os.getpid(), signal.SIGABRT)

def ends_badly(payload, rank):
    import atexit
    global kept
    kept = Aborts()
    atexit.register(Path(FOLDER, f"exit{rank.rank}").write_text, "said goodbye")
    print("last words")
    return rank.rank

def others_hang(payload, rank):
    started(payload, rank)
    if rank.rank == 1:
        while not Path(FOLDER, "pid0").exists():
            time.sleep(0.01)
        raise ValueError("one is enough")
    hang(payload, rank)

def one_killed(payload, rank):
    started(payload, rank)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    raise ConnectionError("the peer is gone")

def one_stopped(payload, rank):
    started(payload, rank)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    other = Path(FOLDER, "pid1")
    while not other.exists() or ") T " not in Path("/proc", other.read_text(), "stat").read_text():
        time.sleep(0.01)
    raise TimeoutError("waited in vain")

def disk_is_full(payload, rank):
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)

def mistake(payload, rank):
    from experiments.settings import ConfigError
    raise ConfigError("seed=x is not\\na number")

def crash(payload, rank):
    import ctypes
    ctypes.string_at(0)

def hang(payload, rank):
    started(payload, rank)
    subprocess.Popen(["sleep", "1000"])
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    while True:
        time.sleep(1)

def stop_when_asked(payload, rank):
    from experiments.ranks import StopRequest
    stop = StopRequest().listen()
    started(payload, rank)
    while not stop.asked:
        time.sleep(0.01)
    return "stopped"
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A folder with job functions that ranks can import."""
    (tmp_path / "rankjobs.py").write_text(textwrap.dedent(JOBS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def alive(jobs):
    """Processes of the ranks, and what they started, that still run."""
    groups = {int(path.read_text()) for path in jobs.glob("pid*")}
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) in groups and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def in_own_process(jobs, target, grace_s=5.0):
    """A launcher that one can send signals to."""
    code = f"""
        import experiments.launch as l
        try:
            print("result", l.launch("rankjobs:{target}", {{}}, 2, stop_grace_s={grace_s}, log_folder=l.Path("logs")))
        except KeyboardInterrupt:
            print("interrupted")
    """
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{jobs}"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=jobs,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_returns_rank_0s_result(jobs, capfd):
    assert launch("rankjobs:square", {"folder": "."}, 2, threads=3) == {"answer": 49, "world_size": 2}
    assert "thread setting 3" in capfd.readouterr().out


def test_what_happens_in_a_process_that_is_done_does_not_fail_the_job(jobs, capfd):
    """Threads of communication libraries abort now and then while Python takes itself apart."""
    assert launch("rankjobs:ends_badly", {}, 2) == 0
    assert capfd.readouterr().out.count("last words") == 2
    assert [(jobs / f"exit{rank}").read_text() for rank in range(2)] == ["said goodbye"] * 2


def test_first_failure_is_told_and_the_others_are_killed(jobs):
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch("rankjobs:others_hang", {}, 3, log_folder=jobs / "logs")
    assert time.monotonic() - start < 30
    failure = caught.value.failure
    assert (failure.rank, failure.message) == (1, "failed: ValueError: one is enough")
    assert 'raise ValueError("one is enough")' in failure.traceback
    assert str(caught.value).count("one is enough") == 3  # the message, and the traceback's two lines
    assert alive(jobs) == []


def test_a_killed_rank_is_named_with_its_signal(jobs):
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        launch("rankjobs:one_killed", {}, 2, log_folder=jobs / "logs")
    assert alive(jobs) == []


def test_a_rank_that_a_signal_has_stopped_is_named_and_ended(jobs):
    with pytest.raises(LaunchError) as caught:
        launch("rankjobs:one_stopped", {}, 2, log_folder=jobs / "logs")
    process = (jobs / "pid1").read_text()
    assert caught.value.failure.message.splitlines() == [
        "failed: TimeoutError: waited in vain",
        f"Stopped by a signal (SIGSTOP; kill -CONT lets it go on): rank 1 (process {process})",
    ]
    assert alive(jobs) == []


def test_a_full_disk_is_told_once(jobs):
    with pytest.raises(LaunchError, match=r"rank 0 failed: OSError: .*No space left on device") as caught:
        launch("rankjobs:disk_is_full", {}, 1)
    assert caught.value.failure.traceback.count("Traceback") == 1
    assert caught.value.failure.mistake == ""


def test_a_mistake_is_one_line(jobs):
    with pytest.raises(LaunchError) as caught:
        launch("rankjobs:mistake", {}, 2)
    assert caught.value.failure.mistake == "seed=x is not a number"


def test_a_crash_shows_where(jobs):
    with pytest.raises(LaunchError, match=r"(?s)was killed by SIGSEGV.*Segmentation fault.*in crash"):
        launch("rankjobs:crash", {}, 1, log_folder=jobs / "logs")


def test_ctrl_c_kills_what_does_not_stop(jobs):
    process = in_own_process(jobs, "hang", grace_s=0.5)
    wait_for(lambda: len(list(jobs.glob("pid*"))) == 2 and len(alive(jobs)) == 4)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "interrupted\n"
    assert alive(jobs) == []


def test_a_second_signal_does_not_wait(jobs):
    process = in_own_process(jobs, "hang", grace_s=1000.0)
    wait_for(lambda: len(alive(jobs)) == 4)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "interrupted\n"
    assert alive(jobs) == []


def test_ranks_that_stop_when_asked_return(jobs):
    process = in_own_process(jobs, "stop_when_asked", grace_s=1000.0)
    wait_for(lambda: len(alive(jobs)) == 2)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert output == "result stopped\n"
    assert errors == "\nstopping ... (killed after 1000 s, or at once at a second signal)\n"


def test_ranks_die_with_their_launcher(jobs):
    process = in_own_process(jobs, "stop_when_asked")
    wait_for(lambda: len(alive(jobs)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: alive(jobs) == [])


def test_works_outside_the_main_thread(jobs):
    results = []
    thread = threading.Thread(target=lambda: results.append(launch("rankjobs:square", {}, 1)))
    thread.start()
    thread.join()
    assert results == [{"answer": 49, "world_size": 1}]


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_RESTART_COUNT": "2",
}


def test_rank_from_torchrun_and_slurm(tmp_path):
    assert rank_from_environment({}, 4, tmp_path) is None
    rank = rank_from_environment(TORCHRUN, 4, tmp_path)
    assert (rank.rank, rank.world_size, rank.local_rank, rank.init_method) == (3, 4, 1, "tcp://node0:29500")
    rank = rank_from_environment(SLURM, 4, tmp_path)
    assert (rank.rank, rank.world_size, rank.local_rank) == (3, 4, 1)
    assert rank.init_method.startswith(f"spdkfac://{tmp_path}/")
    # A requeued job and another step of the job meet elsewhere.
    starts = [SLURM, {**SLURM, "SLURM_RESTART_COUNT": "3"}, {**SLURM, "SLURM_STEP_ID": "1"}]
    methods = {rank_from_environment(environ, 4, tmp_path).init_method for environ in starts}
    assert len(methods) == 3


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "2"}, "world_size=4, but torchrun started 2"),
        ({**SLURM, "SLURM_NTASKS": "1"}, "world_size=4, but SLURM started 1"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM did not set SLURM_LOCALID to a number"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT are not"),
    ],
)
def test_half_a_launcher_is_an_error(tmp_path, environ, words):
    with pytest.raises(ConfigError, match=words):
        rank_from_environment(environ, 4, tmp_path)


def test_folders_of_killed_launchers_are_removed_and_those_of_live_ones_stay(jobs, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("experiments.launch.STALE_S", 0.0)
    killed, live = in_own_process(jobs, "stop_when_asked"), None
    try:
        wait_for(lambda: len(alive(jobs)) == 2)
        killed.kill()
        killed.communicate()
        live = in_own_process(jobs, "hang", grace_s=0.1)
        wait_for(lambda: len(alive(jobs)) == 4)
        assert len(list(tmp_path.glob("spdkfac-launch-*"))) == 2
        launch("rankjobs:square", {}, 1)
        assert len(list(tmp_path.glob("spdkfac-launch-*"))) == 1
    finally:
        if live is not None:
            live.send_signal(signal.SIGINT)
            live.communicate(timeout=20)
    assert list(tmp_path.glob("spdkfac-launch-*")) == []
