"""The code that runs is the code as it was when the sweep was submitted."""

import json
import subprocess
import sys

from experiments.provenance import code_identity
from slurm.snapshot import project_root, take_snapshot


def test_a_snapshot_runs_by_itself_and_says_what_it_is(tmp_path):
    copy = take_snapshot(tmp_path)
    assert take_snapshot(tmp_path) == copy  # the same code is copied once
    assert (copy / "experiments" / "train.py").read_bytes() == (
        project_root() / "experiments" / "train.py"
    ).read_bytes()
    assert (copy / "experiments" / "conf" / "site" / "slurm.yaml").exists()
    script = (
        "import json, experiments.train, slurm.job; from experiments.provenance import code_identity;"
        "print(json.dumps([experiments.train.__file__, slurm.job.__file__, *code_identity()]))"
    )
    environ = {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, cwd=project_root(), capture_output=True, text=True, check=True
    )
    train, job, identity, patch = json.loads(done.stdout)
    assert train.startswith(f"{copy}/")
    assert job.startswith(f"{copy}/")
    assert (identity, patch) == code_identity()


def test_changed_code_is_another_snapshot(tmp_path, monkeypatch):
    (tmp_path / "project" / "kfac").mkdir(parents=True)
    file = tmp_path / "project" / "kfac" / "a.py"
    file.write_text("x = 1\n")
    monkeypatch.setattr("slurm.snapshot.project_root", lambda: tmp_path / "project")
    first = take_snapshot(tmp_path)
    file.write_text("x = 2\n")
    second = take_snapshot(tmp_path)
    assert first != second
    assert [(copy / "kfac" / "a.py").read_text() for copy in (first, second)] == ["x = 1\n", "x = 2\n"]
