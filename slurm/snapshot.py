"""The code as it was when a sweep was submitted: a copy that its jobs run, whatever is edited later."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from experiments.provenance import SNAPSHOT, code_identity

PACKAGES = ("experiments", "kfac", "slurm", "analysis", "hydra_plugins")
FOLDER = "code"


def project_root() -> Path:
    """The folder that the packages are imported from."""
    return Path(__file__).resolve().parents[1]


def take_snapshot(folder: Path) -> Path:
    """Copy the project's packages to ``folder/code/DIGEST``, unless that is there already, and return it.

    It carries its commit and the difference from it (``experiments.provenance``), so that a run's record names the code
    that ran.
    """
    root = project_root()
    files = _files(root)
    identity, patch = code_identity()
    digest = hashlib.sha256(json.dumps(identity).encode() + patch.encode())
    for name in files:
        digest.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
    target = folder / FOLDER / digest.hexdigest()[:12]
    if target.is_dir():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    for name in files:
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, temporary / name)
    (temporary / SNAPSHOT).write_text(json.dumps({"identity": identity, "patch": patch}, indent=1) + "\n")
    try:
        temporary.rename(target)
    except OSError:  # somebody else was faster
        shutil.rmtree(temporary)
        if not target.is_dir():
            raise
    return target


def _files(root: Path) -> list[str]:
    """The packages' files: those that git knows or would add, or all but caches outside a checkout."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES],
        capture_output=True, text=True, check=False,
    ) if shutil.which("git") else None  # fmt: skip
    names = [name for name in listed.stdout.split("\0") if name] if listed and listed.returncode == 0 else []
    if not names:
        paths = (path for package in PACKAGES for path in (root / package).rglob("*"))
        names = [str(path.relative_to(root)) for path in paths if "__pycache__" not in path.parts]
    return sorted(name for name in names if (root / name).is_file())
