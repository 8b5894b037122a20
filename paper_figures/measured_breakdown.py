"""Measured breakdown figure: exposed milliseconds per kind of the small model's runs, with their quartiles."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath

from kfac.timeline import KIND_COLORS
from paper_figures.item import Context, Made, Provenance
from paper_figures.measured import NO_RUNS, Measured, Setting, add_runs, measured, settings
from paper_figures.style import COLUMN_IN, EDGE, PAGE_IN, paper_style, save

NAME = "measured_breakdown"
_LEGEND_COLUMNS = 3
_BARS_IN = 1.6  # height of one panel's bars
_LINE_IN = 0.13  # height of a line of labels
_PAD_IN = 0.06  # above and below a panel
_BESIDE_IN = 0.6  # left of a panel: numbers and their name
_LABEL_PT, _CAPTION_PT = 7.0, 6.0
_CHARACTERS_PER_IN = {8.0: 17, _CAPTION_PT: 22}  # that fit for sure, by font size


def draw(groups: Sequence[Measured]) -> Figure:
    """One panel per setting, one bar per schedule; call it inside :func:`~paper_figures.style.paper_style`.

    A bar's height is the mean recorded iteration; the mark beside it the median and quartiles of all iterations, most
    of which no timeline recorded.
    """
    panels: dict[Setting, list[Measured]] = {}
    for group, setting in zip(groups, settings(groups), strict=True):
        panels.setdefault(setting, []).append(group)
    width_in, upright = _layout(panels)
    titles = {setting: textwrap.wrap(_title(setting), _characters(width_in, 8.0)) for setting in panels}
    captions = {s: textwrap.wrap(_caption(of), _characters(width_in, _CAPTION_PT)) for s, of in panels.items()}
    kinds = [kind for kind in KIND_COLORS if any(group.breakdown_s().get(kind, 0.0) > 0 for group in groups)]
    handles: list[Artist] = [Patch(facecolor=KIND_COLORS[kind], label=kind, **EDGE) for kind in kinds]
    handles.append(Line2D([], [], color=EDGE["edgecolor"], marker="o", ms=2, lw=0.8, label="median, quartiles"))
    height_in = 0.15 + 0.15 * math.ceil(len(handles) / _LEGEND_COLUMNS)
    for setting, members in panels.items():
        labels_in = max(_label_in(group, upright) for group in members)
        height_in += _BARS_IN + labels_in + 2 * _PAD_IN + _LINE_IN * (2 + len(titles[setting]) + len(captions[setting]))
    figure = Figure(figsize=(width_in, height_in), layout=ConstrainedLayoutEngine(h_pad=_PAD_IN))
    for axes, (setting, members) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        _panel(axes, members, upright)
        axes.set_xlim(-0.5, max(map(len, panels.values())) - 0.35)  # bars of all panels are equally wide
        axes.set_title("\n".join(titles[setting]))
        axes.set_xlabel("\n".join(captions[setting]), fontsize=_CAPTION_PT)
    figure.legend(handles=handles, loc="outside upper center", ncols=_LEGEND_COLUMNS, frameon=False, handlelength=1.5)
    return figure


def _layout(panels: Mapping[Setting, Sequence[Measured]]) -> tuple[float, bool]:
    """The width in which no two labels touch, and whether they must stand upright for that."""
    bars = max(map(len, panels.values()))
    labels = [_label(group) for members in panels.values() for group in members]
    widest_in = max(_width_in(line) for label in labels for line in label.split("\n"))
    for width_in in (COLUMN_IN, PAGE_IN):
        if _BESIDE_IN + (bars + 0.15) * (widest_in + 0.06) <= width_in:
            return width_in, False
    lines = max(label.count("\n") + 1 for label in labels)
    return max(PAGE_IN, _BESIDE_IN + (bars + 0.15) * (_LINE_IN * lines + 0.04)), True


def _label(group: Measured) -> str:
    ranks = group.run.world_size
    return group.run.schedule.replace("+", "\n") + f"\n{ranks} rank" + "s" * (ranks > 1)


def _label_in(group: Measured, upright: bool) -> float:
    lines = _label(group).split("\n")
    return max(map(_width_in, lines)) if upright else _LINE_IN * len(lines)


def _width_in(line: str) -> float:
    return float(TextPath((0, 0), line, size=_LABEL_PT).get_extents().width) / 72


def _characters(width_in: float, size_pt: float) -> int:
    return int((width_in - _BESIDE_IN) * _CHARACTERS_PER_IN[size_pt])


def _title(setting: Setting) -> str:
    start = f"{setting.sweep}: " if setting.sweep else ""
    what = (f"{setting.model}, {setting.data}, batch {setting.batch_size} per rank", *setting.others, "measured")
    return start + ", ".join(what)


def _caption(members: Sequence[Measured]) -> str:
    recorded, all_of = _range(g.recorded() for g in members), _range(g.spread.n for g in members)
    plural = "" if recorded == "1" else "s"
    return f"bars: mean of {recorded} recorded iteration{plural}; dot: median and quartiles of all {all_of}"


def _range(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _panel(axes: Axes, members: Sequence[Measured], upright: bool) -> None:
    for x, group in enumerate(members):
        bottom = 0.0
        breakdown_s = group.breakdown_s()
        for kind, color in KIND_COLORS.items():
            milliseconds = 1e3 * breakdown_s.get(kind, 0.0)
            axes.bar(x, milliseconds, 0.6, bottom=bottom, color=color, **EDGE)
            bottom += milliseconds
        spread = group.spread
        middle, low, high = (1e3 * value for value in (spread.median, spread.q25, spread.q75))
        axes.errorbar(
            x + 0.4,
            middle,
            [[middle - low], [high - middle]],
            fmt="o",
            color=EDGE["edgecolor"],
            ms=2,
            lw=0.8,
            capsize=2,
        )
    axes.set_xticks(range(len(members)), list(map(_label, members)), rotation=90 if upright else 0, fontsize=_LABEL_PT)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("iteration time [ms]")


def make(context: Context) -> Made:
    """Write the figure as PDF and PNG; without runs there is none, and an old one is removed."""
    provenance = Provenance(NAME)
    found, warnings = measured(context.runs)
    groups = [group for group in found if group.breakdown_s()]
    add_runs(provenance, groups)
    for group in groups:
        for kind, seconds in group.breakdown_s().items():
            provenance.add(f"{group.label}/{kind}", seconds, "measured", **group.origin())
    if not groups:
        for suffix in (".pdf", ".png"):
            (context.out / f"{NAME}{suffix}").unlink(missing_ok=True)
        return Made((provenance.write(context.out),), NO_RUNS.format(context.runs) + "\n", tuple(warnings))
    with paper_style():
        files = save(draw(groups), context.out / NAME)
    return Made((*files, provenance.write(context.out)), warnings=tuple(warnings))
