import csv
import io
import json
import subprocess
import sys

import pytest

from analysis.__main__ import main
from tests.analysis.records import write_record


@pytest.fixture
def runs(tmp_path):
    write_record(tmp_path, "d", schedule="dkfac", times_s=(9.0, 0.4, 0.4, 0.4))
    write_record(tmp_path, "s", schedule="spdkfac", times_s=(9.0, 0.2, 0.2, 0.2))
    (write_record(tmp_path, "bad") / "run.json").write_text("{")
    return tmp_path


def test_text_compares_the_runs_and_warns_of_the_damaged_one(runs, capsys):
    assert main([str(runs)]) == 0
    shown = capsys.readouterr()
    assert "2.000" in shown.out
    assert "Where the time goes" in shown.out
    assert f"warning: skipped {runs / 'single' / 'bad'}" in shown.err


def test_a_filter_keeps_the_baseline(runs, capsys):
    assert main([str(runs), "--schedule", "spdkfac", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["schedule"] == "spdkfac"
    assert row["speed-up over dkfac"] == pytest.approx(2.0)


def test_csv_is_one_table_with_every_run(runs, capsys):
    assert main([str(runs), "--format", "csv", "--baseline", "spdkfac"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(row["speed-up over spdkfac"]) for row in rows] == pytest.approx([0.5, 1.0])
    assert float(rows[0]["exposed [ms] BP"]) == pytest.approx(40.0)


@pytest.mark.parametrize("style", ["markdown", "latex"])
def test_other_formats(runs, capsys, style):
    assert main([str(runs), "--format", style]) == 0
    assert ("| dkfac |" if style == "markdown" else "dkfac & 400.0 &") in capsys.readouterr().out


def test_timeline_command(runs, capsys):
    assert main(["timeline", str(runs / "single" / "s"), "--iteration", "0"]) == 0
    assert "InverseComp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere"], 2, "no folder nowhere"),
        (["timeline", "nowhere"], 2, "no run record in nowhere"),
    ],
)
def test_mistakes_are_one_line(arguments, status, message, capsys):
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.json", "[]"),
        ("run.json", '{"schema": 1}'),
        ("timelines/iter000000.rank1.json", '{"traceEvents": []}'),
        ("timelines/iter000000.rank1.json", "[]"),
    ],
)
def test_the_timeline_of_a_damaged_record_is_one_line_that_names_the_file(tmp_path, capsys, file, text):
    path = write_record(tmp_path, "a")
    (path / file).write_text(text)
    assert main(["timeline", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert str(path / file) in shown.err


def test_damaged_metrics_leave_the_table_with_its_other_intervals(runs, capsys):
    (runs / "single" / "d" / "metrics.jsonl").write_text('{"kind": "train", "iter": 0, "iteration_s": "x"}\n')
    assert main([str(runs), "--intervals", "--baseline", "spdkfac", "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert [row["low of speed-up"] for row in json.loads(shown.out)["rows"]] == [None, pytest.approx(1.0)]
    assert f"warning: skipped {runs / 'single' / 'd' / 'metrics.jsonl'}" in shown.err


def test_no_runs_says_so(tmp_path, runs, capsys):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    assert "no run records below" in capsys.readouterr().err
    assert main([str(runs), "--model", "resnet50"]) == 1


def test_the_command_starts_without_torch_and_has_help(runs):
    code = "import sys, analysis.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "analysis", "--help"], capture_output=True, text=True, check=True)
    assert "timeline RUN" in shown.stdout
