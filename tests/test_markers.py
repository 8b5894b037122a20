"""The skip rules of conftest.py, on a small suite of their own."""

import os
import subprocess
import sys
from pathlib import Path

SUITE = """
import pytest
def test_runs(): pass
@pytest.mark.slurm
def test_slurm(): pass
@pytest.mark.gpu
def test_gpu(): pytest.skip("no GPU today")
def test_other(): pytest.skip("not today")
@pytest.mark.xfail
def test_known(): assert False
"""
MODULE = "import pytest\npytest.importorskip('no_such_module')\n"


def run_suite(folder: Path, module: str = "", **environment: str) -> str:
    (folder / "conftest.py").write_text(
        (Path(__file__).parent / "conftest.py").read_text().replace("/usr/sbin", "/none").replace("/sbin", "/none")
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: g\n  slurm: s\n  netns: n\n")
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_module.py").write_text(module)
    clean = {name: value for name, value in os.environ.items() if name != "REQUIRE_ALL"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider"],
        cwd=folder, env={**clean, "PATH": "/none", **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout


def test_what_a_machine_lacks_is_skipped_with_a_reason(tmp_path):
    output = run_suite(tmp_path, MODULE)
    assert "1 passed, 4 skipped, 1 xfailed" in output
    assert "not installed: slurmctld, slurmd, munged, sbatch" in output


def test_require_all_fails_a_module_that_skips_itself(tmp_path):
    output = run_suite(tmp_path, MODULE, REQUIRE_ALL="1")
    assert "1 error" in output  # the module that skipped itself stops the run before its tests
    assert "skipped, but REQUIRE_ALL is set: Skipped: could not import 'no_such_module'" in output


def test_require_all_lets_only_gpu_tests_skip(tmp_path):
    output = run_suite(tmp_path, REQUIRE_ALL="1")
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in output  # slurm's is at set-up
    assert "REQUIRE_ALL is set: Skipped: not today" in output
