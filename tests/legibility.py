"""What a reviewer objects to in a figure, found by measuring it as drawn: for tests of everything that draws."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text

LEAST_PT = 6.0
WITHOUT_UNIT = (
    "ranks",
    "steps",
    "dimension d",
    "elements of a factor",
    "number of factors",
    "test accuracy",
    "test loss",
    "squared error in training",
)
"""Names of axes whose numbers count something or are shares."""
TAGS = re.compile("published|simulated|measured|traced", re.IGNORECASE)
LEAST_LUMA = 0.06
"""Between two fillings, of 1 from black to white."""
LEAST_LINE_LUMA = 0.2
"""The same between two lines of one look."""
LEAST_DISTANCE = 10.0
"""Between two fillings in CIE L*a*b*, also to the colour-blind."""

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "everybody": np.eye(3),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])


def luma(color) -> float:
    """How light a colour is in grey print (ITU-R BT.601)."""
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))


def distance(one, other, sight: str) -> float:
    """Of two colours in L*a*b*, as seen by some."""
    a, b = (_lab(to_rgb(color), SIGHT[sight]) for color in (one, other))
    return float(np.linalg.norm(a - b))


def _lab(rgb, matrix) -> np.ndarray:
    rgb = np.asarray(rgb, float)
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = _XYZ @ np.clip(matrix @ linear, 0, 1) / _WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def problems(figure: Figure, tagged: bool = True) -> list[str]:
    """One line each: texts that are small, clipped, hidden or on one another; legends on data; axes without units;
    series that only colour tells apart.

    Args:
        figure: drawn here at 100 dots per inch.
        tagged: whether it must say that its numbers are published, simulated, measured or traced.
    """
    figure.set_dpi(100)
    FigureCanvasAgg(figure).draw()
    found = [*_text_problems(figure), *_legend_problems(figure), *_unit_problems(figure), *_look_problems(figure)]
    if tagged and not any(TAGS.search(text.get_text()) for text in texts(figure)):
        found.append("nothing says whether it is published, simulated or measured")
    return found


def texts(figure: Figure) -> list[Text]:
    """All that is written."""
    found = [*figure.texts]
    for legend in _legends(figure):
        found += [*legend.get_texts(), legend.get_title()]
    for axes in figure.axes:
        found += [axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += [*_tick_labels(axes.xaxis), *_tick_labels(axes.yaxis)]
        found += [axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()]
    return [text for text in found if text.get_text().strip() and text.get_visible()]


def _tick_labels(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    room = 1e-9 * (high - low)
    return [
        tick.label1
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if low - room <= tick.get_loc() <= high + room and tick.label1.get_visible()
    ]


def _legends(figure: Figure) -> list[Legend]:
    return [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]


def outline(text: Text, renderer) -> np.ndarray:
    """The four corners of a text, whichever way it is turned."""
    degrees = text.get_rotation()
    if degrees % 90 == 0:
        box = text.get_window_extent(renderer)
        return np.array([(box.x0, box.y0), (box.x1, box.y0), (box.x1, box.y1), (box.x0, box.y1)])
    assert text.get_rotation_mode() == "anchor"
    text.set_rotation(0)
    corners = outline(text, renderer)
    text.set_rotation(degrees)
    anchor = text.get_transform().transform(text.get_unitless_position())
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return anchor + (corners - anchor) @ turn.T


def _touch(one: np.ndarray, other: np.ndarray, slack: float = 0.5) -> bool:
    """Whether two convex outlines overlap by more than ``slack`` pixels (separating axes)."""
    for corners in (one, other):
        for start, end in zip(corners, np.roll(corners, -1, axis=0), strict=True):
            normal = np.array([start[1] - end[1], end[0] - start[0]])
            normal = normal / (np.linalg.norm(normal) or 1.0)
            a, b = one @ normal, other @ normal
            if a.max() <= b.min() + slack or b.max() <= a.min() + slack:
                return False
    return True


def _text_problems(figure: Figure) -> Iterator[str]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    everything = texts(figure)
    for text in everything:
        if text.get_fontsize() < LEAST_PT:
            yield f"{text.get_text()!r} has {text.get_fontsize():g} pt"
        if isinstance(text, Annotation) and not text._check_xy(renderer):
            yield f"{text.get_text()!r} is not drawn: it points out of its axes"
    outlines = [(text.get_text(), outline(text, renderer)) for text in everything]
    width, height = figure.bbox.width, figure.bbox.height
    for name, corners in outlines:
        if corners.min() < -0.5 or corners[:, 0].max() > width + 0.5 or corners[:, 1].max() > height + 0.5:
            yield f"{name!r} leaves the figure"
    for (one, a), (other, b) in combinations(outlines, 2):
        if _touch(a, b):
            yield f"{one!r} and {other!r} are on one another"


def _legend_problems(figure: Figure) -> Iterator[str]:
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [("a legend", legend.get_window_extent(renderer)) for legend in _legends(figure)]
    boxes += [(repr(t.get_text()), t.get_window_extent(renderer)) for t in (*figure.texts, *_inside(figure))]
    for name, box in boxes:
        for axes in figure.axes:
            paths = [line.get_transform().transform_path(line.get_path()) for line in axes.lines if line.get_visible()]
            for drawn in axes.collections:
                paths += [drawn.get_transform().transform_path(path) for path in drawn.get_paths()]
            if any(path.vertices.size and path.intersects_bbox(box, filled=False) for path in paths):
                yield f"{name} covers a line"
            if any(patch.get_window_extent(renderer).overlaps(box) for patch in axes.patches if patch.get_height() > 0):
                yield f"{name} covers a bar"


def _inside(figure: Figure) -> list[Text]:
    """Texts in axes; those of an annotation may stand below them."""
    return [text for axes in figure.axes for text in axes.texts if text.get_text() and text.get_visible()]


def _unit_problems(figure: Figure) -> Iterator[str]:
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            numbers = [t.get_text() for t in _tick_labels(axis) if _is_number(t.get_text())]
            name = axis.label.get_text()
            if numbers and not re.search(r"\[.+\]", name) and name not in WITHOUT_UNIT:
                yield f"the {axis.axis_name} axis of {axes.get_title()!r} is called {name!r}, without a unit"


def _is_number(text: str) -> bool:
    plain = re.sub(r"\\mathdefault|[${}^\s\u2264\u2212-]", "", text)
    return bool(re.fullmatch(r"[\d.]+k?", plain))


def _look_problems(figure: Figure) -> Iterator[str]:
    for legend in _legends(figure):
        handles = list(zip(legend.legend_handles, (text.get_text() for text in legend.get_texts()), strict=True))
        lines = [(name, handle) for handle, name in handles if isinstance(handle, Line2D)]
        fills = [(name, handle) for handle, name in handles if isinstance(handle, Patch)]
        for (one, a), (other, b) in combinations(lines, 2):
            same = _look(a) == _look(b)
            if same and abs(luma(a.get_color()) - luma(b.get_color())) < LEAST_LINE_LUMA:
                yield f"lines {one!r} and {other!r} differ in colour alone"
        yield from fill_problems([(n, p.get_facecolor(), p.get_hatch()) for n, p in fills])


def _look(line: Line2D) -> tuple:
    return line.get_linestyle(), line._dash_pattern[1] and tuple(line._dash_pattern[1]), *_mark(line)


def _mark(line: Line2D) -> tuple:
    return (line.get_marker(), line.get_fillstyle() if line.get_marker() not in ("None", "", None) else "")


def fill_problems(fills: Sequence[tuple[str, object, str | None]]) -> Iterator[str]:
    """Pairs of fillings (name, colour, hatch) that some cannot tell apart."""
    for (one, a, hatch), (other, b, other_hatch) in combinations(fills, 2):
        if hatch != other_hatch:
            continue
        if abs(luma(a) - luma(b)) < LEAST_LUMA:
            yield f"{one!r} and {other!r} are equally light"
        for sight in SIGHT:
            if distance(a, b, sight) < LEAST_DISTANCE:
                yield f"{one!r} and {other!r} look alike to {sight}"


def axes_named(figure: Figure, title: str) -> Axes:
    """The axes with this title."""
    return next(axes for axes in figure.axes if axes.get_title() == title)
