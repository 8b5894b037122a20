"""The import rules that import-linter cannot state: parts of torch, and a library that starts without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kfac", "experiments", "slurm", "analysis", "paper_figures", "hydra_plugins")
COLLECTIVES = ("deepspeed", "torch.distributed")


def imported(path: Path) -> set[str]:
    """Every module name that a file imports (`import a.b`, `from a import b`) or reaches as an attribute (`a.b.c`)."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return names


def talks(path: Path) -> bool:
    return any(name == c or name.startswith(f"{c}.") for name in imported(path) for c in COLLECTIVES)


def test_one_module_talks_to_other_ranks():
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if talks(path)}
    # engine.py only reads and writes an engine's gradients; rendezvous.py only makes the store through which ranks meet
    assert found == {"kfac/communication.py", "kfac/engine.py", "experiments/rendezvous.py"}


@pytest.mark.parametrize(
    "line", ["import torch.distributed as dist", "from torch import distributed", "torch.distributed.barrier()"]
)
def test_the_check_sees_every_form_of_import(tmp_path, line):
    (tmp_path / "module.py").write_text(f"import torch\n{line}\n")
    assert talks(tmp_path / "module.py")


@pytest.mark.parametrize(
    "module",
    ["kfac", "kfac.planning", "kfac.simulation", "kfac.schedules", "kfac.timeline", "kfac.config", "analysis", "slurm"],
)
def test_starts_without_torch(module):
    check = f"import sys, {module}; sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("room", "may"),
    [
        ("kfac/planning", ("kfac.planning",)),
        ("kfac/simulation", ("kfac.simulation", "kfac.planning", "kfac.timeline")),
    ],
)
def test_a_room_imports_only_what_lies_below_it(room, may):
    for path in (ROOT / room).rglob("*.py"):
        ours = {name for name in imported(path) if name.startswith("kfac.")}
        assert [name for name in ours if not any(f"{name}.".startswith(f"{m}.") for m in may)] == [], path
