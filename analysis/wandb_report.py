"""The comparison as a W&B report and a workspace, built with wandb-workspaces.

Both are made of the same panels. The local report says all of it and more; this is for those who look in W&B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.comparison import Comparison
from analysis.comparison_tables import all_tables
from analysis.report_pages import headline
from analysis.tables import to_markdown
from analysis.wandb_state import Target
from experiments.records import RunRecord
from kfac.timeline import KINDS, OTHER

GROUP_BY = "config.schedule_label"
WALL_CLOCK = "_absolute_runtime"
"""W&B's seconds since a run's first row, by the rows' own times; ``_runtime`` is when its process got them."""
TEXT_TABLES = ("overview", "scaling", "differences")
"""Tables that go into the report as text."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the report lies.

    Args:
        entity: the user or team.
        project: its project.
        sweeps: the names of the runs' groups there.
    """

    entity: str
    project: str
    sweeps: tuple[str, ...]

    @classmethod
    def of(cls, comparison: Comparison, project: str | None = None, entity: str | None = None) -> Place:
        """That of the runs, unless one is given.

        Raises:
            ValueError: if the runs lie in several projects, or nobody is logged in.
        """
        targets = [Target.of(RunRecord.load(run.path), project, entity) for run in comparison.runs]
        projects = sorted({target.project for target in targets})
        if len(projects) > 1:
            raise ValueError(f"the runs lie in several W&B projects ({', '.join(projects)}): choose one with --project")
        entities = {target.entity for target in targets} - {None}
        sweeps = tuple(dict.fromkeys(run.path.resolve().parent.name for run in comparison.runs))
        return cls(entity=entities.pop() or "" if entities else default_entity(), project=projects[0], sweeps=sweeps)


def default_entity() -> str:
    """Whoever is logged in.

    Raises:
        ValueError: if nobody is, or the server cannot be reached.
    """
    import wandb

    try:
        return str(wandb.Api(timeout=30).default_entity)
    except Exception as error:
        raise ValueError(f"W&B: {str(error).partition(chr(10))[0]} (wandb login)") from error


def save_report(comparison: Comparison, place: Place, *, draft: bool = False) -> str:
    """Save the report; returns its address.

    Raises:
        ValueError: if W&B refuses it, or cannot be reached.
    """
    try:
        report = build_report(comparison, place).save(draft=draft)
    except Exception as error:
        raise ValueError(f"the W&B report is not saved: {str(error).partition(chr(10))[0]}") from error
    return str(report.url)


def save_workspace(comparison: Comparison, place: Place) -> str:
    """Save the workspace as a new view of the project; returns its address.

    Raises:
        ValueError: if W&B refuses it, or cannot be reached.
    """
    try:
        workspace = build_workspace(comparison, place).save()
    except Exception as error:
        raise ValueError(f"the W&B workspace is not saved: {str(error).partition(chr(10))[0]}") from error
    return str(workspace.url)


def build_report(comparison: Comparison, place: Place) -> Any:
    """Run sets grouped by schedule; the tables as text; panels of speed, learning, timelines and configurations."""
    from wandb_workspaces.reports import v2 as wr

    tables = all_tables(comparison)
    blocks: list[Any] = [wr.P(headline(comparison)), wr.TableOfContents()]
    for name in TEXT_TABLES:
        if name in tables:
            blocks += [wr.H2(tables[name].title), wr.MarkdownBlock(to_markdown(tables[name]))]
    for title, panels in panel_groups().items():
        runsets = [
            wr.Runset(
                entity=place.entity,
                project=place.project,
                name=sweep,
                filters=f"Metric('Group') = '{sweep}'",
                groupby=[GROUP_BY],
            )
            for sweep in place.sweeps
        ]
        blocks += [wr.H2(title), wr.PanelGrid(runsets=runsets, panels=panels)]
    title = f"{comparison.title}: comparison"[:128]
    return wr.Report(
        entity=place.entity, project=place.project, title=title, description=headline(comparison), blocks=blocks
    )


def build_workspace(comparison: Comparison, place: Place) -> Any:
    """The same panels as sections of a workspace that shows the same runs."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws

    sections = [ws.Section(name=title, panels=panels, is_open=True) for title, panels in panel_groups().items()]
    names = " or ".join(f"Metric('Group') = '{sweep}'" for sweep in place.sweeps)
    return ws.Workspace(
        entity=place.entity,
        project=place.project,
        name=f"{comparison.title}: comparison",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="iter", max_runs=100),
        runset_settings=ws.RunsetSettings(filters=names, groupby=[expr.Config("schedule_label")]),
    )


def panel_groups() -> dict[str, Sequence[Any]]:
    """The panels by what they show; their keys are those that the sink logs."""
    from wandb_workspaces.reports import v2 as wr

    def place(x: int, y: int, w: int = 12, h: int = 8) -> Any:
        return wr.Layout(x=x, y=y, w=w, h=h)

    kinds = [wr.SummaryMetric(f"breakdown_s/{kind}") for kind in (*KINDS, OTHER)]
    hidden = [wr.SummaryMetric(f"hidden_s/{kind}") for kind in KINDS if kind.endswith("Comm")]
    return {
        "Speed": [
            wr.BarPlot(
                title="Seconds per iteration (median)",
                metrics=[wr.SummaryMetric("iteration_s/median")],
                layout=place(0, 0),
            ),
            wr.ScatterPlot(
                title="Scaling",
                x=wr.Config("world_size"),
                y=wr.SummaryMetric("iteration_s/median"),
                layout=place(12, 0),
            ),
            wr.BarPlot(title="Where the time goes: exposed seconds", metrics=kinds, layout=place(0, 8)),
            wr.BarPlot(title="Communication that computing hides, seconds", metrics=hidden, layout=place(12, 8)),
        ],
        "Learning": [
            wr.LinePlot(title="Training loss over iterations", x="iter", y=["train/loss"], layout=place(0, 0)),
            wr.LinePlot(title="Training loss over time", x=WALL_CLOCK, y=["train/loss"], layout=place(12, 0)),
            wr.LinePlot(title="Test accuracy over iterations", x="iter", y=["eval/accuracy"], layout=place(0, 8)),
            wr.LinePlot(title="Test loss over time", x=WALL_CLOCK, y=["eval/loss"], layout=place(12, 8)),
        ],
        "Timelines": [
            wr.MediaBrowser(title="Timelines", media_keys=["timeline"], num_columns=1, layout=place(0, 0, 24, 12)),
            wr.MediaBrowser(
                title="Timelines to zoom into", media_keys=["timeline_page"], num_columns=1, layout=place(0, 12, 24, 12)
            ),
        ],
        "Configurations": [wr.RunComparer(diff_only="split", layout=place(0, 0, 24, 12))],
    }
