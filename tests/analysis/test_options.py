"""Options that differ between runs are shown, those that do not are not, and K-FAC's only of runs that have it."""

import csv
import io

import pytest

from analysis.__main__ import main
from analysis.options import differing_options, with_differing_options
from analysis.report import runs_table
from analysis.runs import load_runs
from tests.analysis.records import write_record


@pytest.fixture
def runs(tmp_path):
    def record(name, *, lr=0.1, schedule="dkfac", **kfac):
        options = {"damping": 0.001, "kl_clip": 0.001, "layers": ["linear"], **kfac}
        settings = {"kfac": options, "optimizer": {"lr": lr, "momentum": 0.9}}
        write_record(tmp_path, name, schedule=schedule, timelines=0, **settings)

    record("a")
    record("b", damping=0.1, kl_clip=None)
    record("c", layers=["linear", "norm"], added_later=True)
    return tmp_path


def cells(table, title):
    place = [column.title for column in table.columns].index(title)
    return [row[place] for row in table.rows]


def test_what_differs_has_a_column(runs):
    found, _ = load_runs([runs])
    assert differing_options(found) == ["kfac.damping", "kfac.kl_clip", "kfac.layers"]
    plain = runs_table(found)
    table = with_differing_options(plain, found)
    assert cells(table, "kfac.damping") == [0.001, 0.1, 0.001]
    assert cells(table, "kfac.kl_clip") == [0.001, "null", 0.001]
    assert cells(table, "kfac.layers") == ["linear", "linear", "linear+norm"]
    for column in plain.columns:  # the others stay what and where they are
        assert cells(table, column.title) == cells(plain, column.title)
    assert [c.title for c in table.columns if c.title != "kfac.layers"][6:9] == [
        "kfac.damping",
        "kfac.kl_clip",
        "status",
    ]
    assert with_differing_options(runs_table(found[:1]), found[:1]) == runs_table(found[:1])


def test_runs_without_k_fac_have_none_of_its_options(runs):
    write_record(runs, "s", schedule="sgd", **{"kfac": {"damping": 7.0, "fisher": "mc"}, "optimizer": {"lr": 0.3}})
    found, _ = load_runs([runs])
    found[-1].config["schedule"] = {"name": "sgd", "curvature": False}
    table = with_differing_options(runs_table(found), found)
    assert cells(table, "kfac.damping")[-1] is None
    found[-1].config["schedule"]["curvature"] = True  # negative control
    assert cells(with_differing_options(runs_table(found), found), "kfac.damping")[-1] == 7.0


def test_the_command_shows_them(runs, capsys):
    assert main([str(runs), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["kfac.damping"] for row in rows] == ["0.001", "0.1", "0.001"]
    assert main([str(runs)]) == 0
    assert capsys.readouterr().out.count("kfac.damping") == 2  # in both tables
