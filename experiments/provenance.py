"""Where a run's numbers come from: code, versions, hardware, environment; nothing secret."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.redaction import MASK, SECRET

PACKAGES = (
    "spdkfac",
    "torch",
    "torchvision",
    "timm",
    "deepspeed",
    "numpy",
    "scipy",
    "scikit-learn",
    "hydra-core",
    "wandb",
)
RECORDED = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|DNNL|ONEDNN|ATEN|TORCH|PYTORCH|TRITON|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|UCX|FI|DS"
    r"|HIP|HSA|ROCR|SLURM|SLURMD|MALLOC)_.*|TORCHELASTIC_.*|TORCHINDUCTOR_.*|TORCHDYNAMO_.*"
    r"|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONHASHSEED"
)
"""The environment variables that are recorded: what can change a run's numbers or times (threads, kernels, devices,
communication, the job), nothing about the person who started it. Of those whose name says that they are secret
(:data:`experiments.redaction.SECRET`) the value is not."""
SNAPSHOT = "snapshot.json"
"""Beside the packages of a copy of the code (``slurm.snapshot``): which commit it is of, and the patch."""
URL_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")
"""A user and password inside an address."""


def code_identity(package: Path | None = None) -> tuple[dict[str, Any], str]:
    """Which code runs, and its difference from the commit as a patch.

    Args:
        package: a folder inside the checkout; by default this package's.

    Returns:
        ``{"commit", "dirty"}`` and the patch in a git checkout (or a snapshot of one), ``{"version"}`` and an empty
        patch otherwise.
    """
    package = package or Path(__file__).parent
    snapshot = package.parent / SNAPSHOT
    if snapshot.is_file():
        data = json.loads(snapshot.read_text())
        return data["identity"], data["patch"]
    root = _git(package, "rev-parse", "--show-toplevel")
    commit = _git(package, "rev-parse", "HEAD")
    tracked = _git(package, "ls-files", "--", str(package))
    if not (root and commit and tracked):
        return {"version": _version("spdkfac")}, ""
    top = Path(root.strip())
    patch = _git(top, "diff", "HEAD", "--binary") or ""
    for name in (_git(top, "ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml") or "").splitlines():
        patch += _git(top, "diff", "--no-index", "--", os.devnull, name, accept=(0, 1)) or ""
    return {"commit": commit.strip(), "dirty": bool(patch)}, patch


def patch_digest(patch: str) -> str:
    """A short name of a patch, empty for none."""
    return hashlib.sha256(patch.encode()).hexdigest()[:12] if patch else ""


def environment_facts(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Versions, hardware and the environment variables that matter; values with secret-looking names are hidden."""
    environ = os.environ if environ is None else environ
    return {
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "variables": {
            name: MASK if SECRET.search(name) else URL_LOGIN.sub(rf"\1{MASK}@", value)
            for name, value in sorted(environ.items())
            if RECORDED.fullmatch(name)
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    return (_run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]) or "").splitlines()


def _git(folder: Path, *arguments: str, accept: tuple[int, ...] = (0,)) -> str | None:
    return _run(["git", "-C", str(folder), *arguments], accept)


def _run(command: list[str], accept: tuple[int, ...] = (0,)) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode in accept else None
