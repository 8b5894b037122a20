"""A checkout of kfac-pytorch (KAISA), whose package has the name of this project's. Nothing here may import kfac."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any


def check_checkout(checkout: Path | None) -> None:
    """Refuse what is no checkout of kfac-pytorch.

    Raises:
        ValueError: naming the variable that says where it is.
    """
    if checkout is not None and not (checkout / "kfac" / "preconditioner.py").is_file():
        raise ValueError(f"KAISA={checkout} is no checkout of kfac-pytorch: it has no kfac/preconditioner.py")


def import_kaisa(checkout: Path) -> Any:
    """The class ``KFACPreconditioner`` of a checkout, in a process that has not imported this project's kfac.

    Raises:
        RuntimeError: if kfac was imported from elsewhere.
    """
    _answer_for_a_checkout()
    sys.path.insert(0, str(checkout))
    found = importlib.import_module("kfac.preconditioner")
    home = Path(found.__file__ or "").resolve()
    if not home.is_relative_to(checkout.resolve()):
        raise RuntimeError(f"kfac was imported from {home}, not from the checkout")
    return found.KFACPreconditioner


def _answer_for_a_checkout() -> None:
    """kfac-pytorch asks for its own installed version when it is imported, which a checkout does not have."""
    installed = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return installed(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name == "kfac-pytorch":
                return "a checkout"
            raise

    importlib.metadata.version = version


def kaisa_identity(checkout: Path) -> dict[str, str]:
    """Version and commit of a checkout, as far as it says."""
    project = checkout / "pyproject.toml"
    declared = tomllib.loads(project.read_text()).get("project", {}) if project.is_file() else {}
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {"version": str(declared.get("version", "?")), "commit": done.stdout.strip() or "?"}
