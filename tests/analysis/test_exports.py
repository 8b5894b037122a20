"""What is exported, and which columns people and programs get."""

import csv
import io
import sys

import pytest

from analysis.__main__ import main
from tests.analysis.questions import rows_of
from tests.analysis.records import write_record


def test_exported_runs_have_every_key_of_their_configuration(runs, capsys):
    assert main(["export", str(runs)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 6
    assert [row["config.warmup"] for row in rows] == ["1"] * 6
    assert rows[0]["commit"] == "0" * 40
    assert float(rows[0]["exposed [ms] BP"]) == pytest.approx(40.0)


def test_exported_iterations_and_spans(runs, capsys):
    rows = rows_of(capsys, "export", runs, "--rows", "iterations", "--schedule", "dkfac")
    assert len(rows) == 3 * 5
    assert [row["iteration_s"] for row in rows[:4]] == [9.0, 0.4, 0.4, 0.5]
    assert rows[4]["kind"] == "eval"
    spans = rows_of(capsys, "export", runs, "--rows", "spans", "--schedule", "dkfac")
    assert len(spans) == 3 * 2 * 4
    assert (spans[0]["kind"], spans[0]["start_s"], spans[0]["end_s"]) == ("FactorComm", 0.03, 0.07)


def test_parquet_holds_what_csv_does(runs, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_record(runs, "g", schedule="sgd", seed=7, kfac={"damping": "auto"})
    write_record(runs, "h", schedule="kfac", seed=8, kfac={"damping": 0.5})
    for suffix in ("csv", "parquet"):
        assert main(["export", str(runs), "--output", str(tmp_path / f"out.{suffix}")]) == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    expected = list(csv.reader((tmp_path / "out.csv").open()))
    assert table.column_names == expected[0]
    for i, name in enumerate(table.column_names):
        for value, text in zip(table[name].to_pylist(), (row[i] for row in expected[1:]), strict=True):
            assert ("" if value is None else str(value)) == text or float(value) == float(text)
    assert str(table.schema.field("seed").type) == "int64"
    assert table.schema.metadata[b"title"] == b"Runs"


def test_columns_are_chosen_by_name_or_pattern_in_the_given_order(runs, tmp_path, capsys):
    options = ["--columns", "seed, Schedule,config.w*,median"]
    assert main(["export", str(runs), *options]) == 0
    header, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header == ["seed", "schedule", "config.warmup", "iteration median [ms]"]
    assert [row[:2] for row in rows] == [[str(seed), name] for name in ("dkfac", "spdkfac") for seed in range(3)]
    assert [float(row[3]) for row in rows[:3]] == pytest.approx([400, 410, 420])
    for suffix in ("md", "tex", "txt"):  # also of columns that people are not shown otherwise
        assert main(["export", str(runs), *options, "--output", str(tmp_path / f"x.{suffix}")]) == 0
        text = (tmp_path / f"x.{suffix}").read_text()
        assert "config.warmup" in text
        assert "FactorComm" not in text
    assert main([str(runs), "--columns", "schedule,FF"]) == 0  # each table has those that it knows
    out = capsys.readouterr().out
    assert "exposed [ms]" in out
    assert "iteration" not in out.split("Iteration times")[0]
    assert main(["timeline", str(runs / "single" / "d0"), "--columns", "rank,kind,exposed"]) == 0
    assert "hidden [ms]" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("warm", "did you mean config.warmup?"),
        ("sched", "did you mean schedule"),
        ("zzzz", "there are: schedule, model"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_some_that_are(runs, capsys, columns, words):
    assert main(["export", str(runs), "--columns", f"schedule,{columns}"]) == 2
    shown = capsys.readouterr()
    assert f"error: --columns: no column '{columns}'; {words}" in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_latex_has_the_columns_that_a_page_has_room_for(runs, capsys):
    write_record(runs, "k", schedule="kfac", seed=9, kfac={f"option{i}": i for i in range(130)})
    write_record(runs, "l", schedule="kfac", seed=8, kfac={f"option{i}": -i for i in range(130)})
    assert main(["export", str(runs), "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()[0].split(",")) > 130
    assert main(["export", str(runs), "--schedule", "dkfac", "--format", "latex"]) == 0
    shown = capsys.readouterr()
    aligns = [line.split("}{")[1] for line in shown.out.splitlines() if line.startswith(r"\begin{tabular}")]
    assert [len(of) - 1 <= 16 for of in aligns] == [True, True]
    assert "All rows: schedule dkfac, model resnet20, data digits, ranks 2" in shown.out
    assert shown.err == ""
    # What cannot be set is said, with the remedy.
    assert main(["export", str(runs), "--schedule", "kfac", "--format", "latex"]) == 0
    assert "columns: choose some with --columns, as in --columns 'seed,kfac.option1" in capsys.readouterr().err
    for i in range(70):
        write_record(runs, f"m{i}", schedule="mpdkfac", seed=i)
    assert main(["export", str(runs), "--schedule", "mpdkfac", "--format", "latex"]) == 0
    assert "70 rows: choose some of the runs" in capsys.readouterr().err


def test_parquet_without_its_library_names_the_extra(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(runs), "--output", str(tmp_path / "x.parquet")]) == 2
    assert "pip install 'spdkfac[parquet]'" in capsys.readouterr().err
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.parametrize(("suffix", "mark"), [(".md", "| dkfac |"), (".tex", "\\toprule"), (".txt", "exposed [ms]")])
def test_output_files(runs, tmp_path, capsys, suffix, mark):
    path = tmp_path / "new" / f"t{suffix}"
    assert main([str(runs), "--output", str(path)]) == 0
    assert mark in path.read_text()
    assert capsys.readouterr().out == f"{path}\n"
