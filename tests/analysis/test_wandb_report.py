"""The W&B report and workspace are saved through the real libraries, and hold the panels that they should."""

import json

import pytest

from analysis.__main__ import main
from analysis.comparison import Comparison
from analysis.wandb_report import Place
from tests.analysis.records import write_record

pytest.importorskip("wandb_workspaces")


def sweep(tmp_path, **options):
    tracking = {"project": "p", "entity": None, "tags": []}
    write_record(tmp_path, "d", schedule="dkfac", tracking=tracking, **options)
    write_record(tmp_path, "s", schedule="spdkfac", tracking=tracking, **options)
    return tmp_path


def walk(data):
    yield data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from walk(item)


def panels(spec):
    return [node for node in walk(spec) if isinstance(node, dict) and {"viewType", "config"} <= node.keys()]


def test_report_and_workspace_are_saved(tmp_path, server, capsys):
    assert main(["report", str(sweep(tmp_path)), "--wandb"]) == 0
    addresses = capsys.readouterr().out.split()[2:]
    assert [address.startswith(f"{server.url}/team/p") for address in addresses] == [True, True]
    report, workspace = server.store.views.values()
    assert (report["type"], workspace["type"]) == ("runs", "project-view")
    spec = json.loads(report["spec"])
    kinds = [panel["viewType"] for panel in panels(spec)]
    assert sorted(kinds) == sorted([
        *["Bar Chart"] * 3, "Scatter Plot", *["Run History Line Plot"] * 4, *["Media Browser"] * 2, "Run Comparer",
    ])  # fmt: skip
    text = json.dumps(spec)
    grouped = {"section": "config", "name": "schedule_label.value"}
    assert [node for node in walk(spec) if node == [grouped]], "the run sets are grouped by schedule"
    for key in ("iteration_s/median", "breakdown_s/FactorComm", "hidden_s/GradComm", "train/loss", "timeline_page"):
        assert key in text
    groups = [node for node in walk(spec) if isinstance(node, dict) and node.get("value") == "single"]
    assert groups, "the run sets show the sweep alone"
    assert "2 runs, 2 finished" in text
    sections = json.loads(workspace["spec"])["section"]["panelBankConfig"]["sections"]
    assert [s["name"] for s in sections if s["panels"]] == ["Speed", "Learning", "Timelines", "Configurations"]
    assert sorted(panel["viewType"] for panel in panels(json.loads(workspace["spec"]))) == sorted(kinds)


def test_a_draft_is_a_draft(tmp_path, server):
    assert main(["report", str(sweep(tmp_path)), "--wandb", "--draft", "--project", "p", "--entity", "team"]) == 0
    assert next(iter(server.store.views.values()))["type"] == "runs/draft"


def test_runs_of_several_projects_need_a_choice(tmp_path):
    sweep(tmp_path)
    write_record(tmp_path, "x", tracking={"project": "q", "entity": "team"})
    comparison = Comparison.of([tmp_path])
    with pytest.raises(ValueError, match=r"several W&B projects \(p, q\): choose one with --project"):
        Place.of(comparison)
    assert Place.of(comparison, project="p").sweeps == ("single",)


def test_a_server_that_refuses_is_one_line_and_the_local_report_is_there(tmp_path, server, capsys):
    server.fault = lambda request: 403
    assert main(["report", str(sweep(tmp_path)), "--wandb"]) == 2
    shown = capsys.readouterr()
    assert "error: W&B" in shown.err
    assert shown.err.count("\n") == 1
    assert (tmp_path / "report.html").exists()
