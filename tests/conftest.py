"""What every test starts from: one thread per process; markers that skip, with a reason, what a machine cannot run.

With ``REQUIRE_ALL=1`` (continuous integration) a skip is a failure, except for tests marked ``gpu``.
"""

import functools
import os
import shutil
import subprocess

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("WANDB_MODE", "offline")

REQUIRE_ALL = os.environ.get("REQUIRE_ALL", "") not in ("", "0")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@functools.cache
def _without_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


@functools.cache
def _without_slurm() -> str:
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name, path=SBIN)]
    return f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)" if missing else ""


@functools.cache
def _without_namespaces() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for name in ("ip", "tc"):
        if not shutil.which(name, path=SBIN):
            return f"not installed: {name} (Debian: iproute2)"
    probe = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"this kernel or sandbox makes no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


_REASONS = {"gpu": _without_gpu, "slurm": _without_slurm, "netns": _without_namespaces}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, reason in _REASONS.items():
        if item.get_closest_marker(marker) and (why := reason()):
            pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but REQUIRE_ALL is set: {report.longrepr[2]}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if REQUIRE_ALL and report.skipped:  # a whole module that skips itself, as by pytest.importorskip
        report.outcome = "failed"
        report.longrepr = f"skipped, but REQUIRE_ALL is set: {report.longrepr[2]}"
    return report
