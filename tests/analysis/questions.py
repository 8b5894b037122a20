"""Runs that the commands are asked about, and their answers."""

import json

import pytest

from analysis.__main__ import main
from tests.analysis.records import write_record


@pytest.fixture
def runs(tmp_path):
    """Three seeds of two schedules, on 2 ranks; the second one's factors and times are known."""
    for seed in range(3):
        write_record(tmp_path, f"d{seed}", schedule="dkfac", seed=seed, times_s=(9.0, 0.4 + seed / 100, 0.4, 0.5))
        path = write_record(
            tmp_path, f"s{seed}", schedule="spdkfac", seed=seed, times_s=(9.0, 0.2, 0.2 + seed / 100, 0.3)
        )
        summary = json.loads((path / "summary.json").read_text())
        summary["breakdown_s"] |= {"FactorComm": 0.001 * (seed + 1)}
        summary["hidden_s"] |= {"FactorComm": 0.05}
        (path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def rows_of(capsys, *arguments):
    """The rows that a command of analysis gives programs."""
    assert main([*map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]
