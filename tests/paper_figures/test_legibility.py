"""Every figure, as drawn: what a reviewer would object to, and that the check for it finds it."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kfac.planning import ClusterProfile, LinearCost, PolynomialCost
from kfac.timeline import KIND_COLORS
from paper_figures.__main__ import ITEMS
from paper_figures.item import Context
from paper_figures.style import COLUMN_IN, PAGE_IN, note, paper_style
from tests.analysis.records import write_record
from tests.legibility import axes_named, fill_problems, problems, texts

TABLES = ("models", "iteration_time", "ablation", "overlap", "measured_iteration_time")
FIGURES = [name for name in ITEMS if name not in TABLES]
SIZES, DIMS = [256, 2**14, 2**22], [10, 144, 576]
MEDIANS_S, LOW_S, HIGH_S = [0.02, 0.3, 90.0], [0.01, 0.3, 60.0], [0.05, 0.9, 100.0]


def write_profile(folder, quartiles):
    """Of a slow network, where points lie far above the published curves."""
    spread = {"q25_s": LOW_S, "q75_s": HIGH_S} if quartiles else {}
    points = {"elements": SIZES, "seconds": MEDIANS_S, "fit_error": 0.31, **spread}
    line = LinearCost(1e-2, 2e-5)
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    ClusterProfile(
        world_size=2,
        all_reduce=line,
        reduce=line,
        broadcast=line,
        inverse=PolynomialCost((1e-2, 1e-1)),
        provenance={
            "all_reduce": points,
            "broadcast": points,
            "inverse": {"dims": DIMS, "seconds": MEDIANS_S, **spread},
        },
    ).save(folder / "profiles" / "cluster_profile.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for number, schedule in enumerate(("sgd", "dkfac", "mpdkfac", "spdkfac", "auto")):
        times_s = (9.0, 1.1 + number, 1.2 + number, 1.4 + number)
        write_record(folder, f"resnet20-{schedule}-w2-s0-00000000", schedule=schedule, times_s=times_s)
    write_profile(folder, quartiles=True)
    return folder


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The figure that an item draws, instead of its files."""

    def draw(name, runs):
        saved = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: saved.append(figure))
        with paper_style():
            ITEMS[name].make(Context(tmp_path, runs))
        return saved[0]

    return draw


def spread_of(container):
    """Lower and upper ends of the error bars."""
    (bars,) = container.lines[2]
    return [[segment[0][1], segment[1][1]] for segment in bars.get_segments()]


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_that_a_reviewer_would_object_to(name, runs, drawn):
    figure = drawn(name, runs)
    assert figure.get_figwidth() in (COLUMN_IN, PAGE_IN)
    with paper_style():
        assert problems(figure) == []


def test_the_items_without_figures_are_the_tables(runs, tmp_path):
    for name in TABLES:
        made = ITEMS[name].make(Context(tmp_path, runs))
        assert {path.suffix for path in made.paths} == {".md", ".tex", ".csv", ".json"}


def test_kinds_are_told_apart_by_all():
    assert list(fill_problems([(kind, color, None) for kind, color in KIND_COLORS.items()])) == []


@pytest.mark.parametrize(
    ("name", "title", "sizes"),
    [
        ("communication_costs", "all-reduce", SIZES),
        ("communication_costs", "broadcast", SIZES),
        ("inverse_costs", "inverting", DIMS),
    ],
)
def test_measured_points_have_their_quartiles(name, title, sizes, runs, drawn, tmp_path):
    figure = drawn(name, runs)
    axes = axes_named(figure, title)
    (container,) = axes.containers
    assert container.lines[0].get_xydata().tolist() == [[x, 1e3 * y] for x, y in zip(sizes, MEDIANS_S, strict=True)]
    expected = [[1e3 * low, 1e3 * high] for low, high in zip(LOW_S, HIGH_S, strict=True)]
    assert spread_of(container) == [pytest.approx(pair) for pair in expected]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[-2].endswith("(median, quartiles)")
    assert labels[-1] == ("fit to it" if name == "inverse_costs" else "fit to it, median error 31%")
    numbers = json.loads((tmp_path / f"{name}.provenance.json").read_text())["numbers"]
    kind = {"all-reduce": "all_reduce", "inverting": "inverse"}.get(title, title)
    assert numbers[f"measured/{kind}/{sizes[-1]:g}/q75"]["value"] == HIGH_S[-1]


def drawn_numbers(figure):
    """All that the figure shows: heights of bars, and where lines, error bars and bands are."""
    found = [patch.get_height() for axes in figure.axes for patch in axes.patches]
    for axes in figure.axes:
        found += [y for line in axes.lines for y in line.get_ydata()]
        for collection in axes.collections:
            found += [y for path in collection.get_paths() for _, y in path.vertices]
    return np.array(found, float)


def not_drawn(figure, numbers):
    """The paths of numbers that the figure does not show in seconds, milliseconds or percent."""
    shown = drawn_numbers(figure)
    return [
        path
        for path, number in numbers.items()
        if number["value"] and not any(np.isclose(shown, s * number["value"], rtol=1e-9).any() for s in (1, 1e3, 1e2))
    ]


CURVES = ("communication_costs", "inverse_costs")
"""What draws lines at other sizes than those that are written down."""


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in CURVES])
def test_every_number_written_down_is_drawn(name, runs, drawn, tmp_path):
    figure = drawn(name, runs)
    numbers = json.loads((tmp_path / f"{name}.provenance.json").read_text())["numbers"]
    extremes = ("/min", "/max") if name == "factor_sizes" else ()  # which are not in the histogram
    if name == "factor_sizes":
        means = [line.get_xdata()[0] for axes in figure.axes for line in axes.lines if len(line.get_xdata()) == 2]
        assert {n["value"] for path, n in numbers.items() if path.endswith("/mean")} == set(means)
        extremes = (*extremes, "/mean")
    numbers = {path: n for path, n in numbers.items() if not path.endswith(extremes or ("//",))}
    if name == "placement_bounds":  # nearer than a hundredth of a percent is drawn there
        numbers = {path: {"value": max(1e-4, n["value"])} for path, n in numbers.items()}
    assert len(numbers) > 10
    assert not_drawn(figure, numbers) == []
    first = next(path for path, n in numbers.items() if n["value"])
    assert not_drawn(figure, {first: {"value": 1.001234567 * numbers[first]["value"]}}) == [first]


@pytest.mark.parametrize("name", CURVES)
def test_curves_pass_through_the_numbers_written_down(name, runs, drawn, tmp_path):
    figure = drawn(name, runs)
    titles = {"all_reduce": "all-reduce", "inverse": "inverting"} if name == CURVES[0] else {"inverse": "inverting"}
    other = "broadcast" if name == CURVES[0] else "inverting and broadcasting"
    numbers = json.loads((tmp_path / f"{name}.provenance.json").read_text())["numbers"]
    checked = 0
    for path, number in numbers.items():
        tag, kind, *label, size = path.split("/") + [""] * ("crossing" in path)
        if tag != "measured" and label[:1] != [""] and label:
            axes = axes_named(figure, titles.get(kind, other))
            (line,) = (line for line in axes.lines if line.get_label() == label[0])
            x, y = np.log(line.get_xydata().T)
            assert np.exp(np.interp(np.log(float(size)), x, y)) == pytest.approx(1e3 * number["value"], rel=2e-3)
            checked += 1
    assert checked >= 18


def test_profiles_without_quartiles_are_drawn_as_medians(tmp_path, drawn):
    write_profile(tmp_path / "old", quartiles=False)
    axes = axes_named(drawn("communication_costs", tmp_path / "old"), "broadcast")
    assert "measured here, 2 ranks (median)" in [text.get_text() for text in axes.get_legend().get_texts()]
    assert not any(container.lines[2] for container in axes.containers)


def sound():
    """A figure without problems, of two lines."""
    figure = Figure(figsize=(COLUMN_IN, 2.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], "-o", label="one")
    axes.plot([0, 1], [1, 0], "--s", label="two")
    axes.set_xlabel("ranks")
    axes.set_ylabel("time [s]")
    figure.legend(loc="outside upper center", ncols=2)
    note(figure, "Measured.")
    return figure


def patches(figure, *looks):
    figure.legends.clear()
    handles = [Patch(label=str(number), **look) for number, look in enumerate(looks)]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(looks))


SPOILED = {
    "nothing says whether": lambda f: f.supxlabel("Some numbers."),
    "'small' has 5 pt": lambda f: f.axes[0].text(0.5, 0.1, "small", fontsize=5),
    "'time [s]' leaves the figure": lambda f: (f.set_layout_engine("none"), f.axes[0].set_position((0, 0.3, 1, 0.5))),
    "'a' and 'bb' are on one another": lambda f: (f.axes[0].text(0.5, 0.1, "a"), f.axes[0].text(0.5, 0.1, "bb")),
    "'far' is not drawn": lambda f: f.axes[0].annotate("far", (0.5, -9)),
    "a legend covers a line": lambda f: f.axes[0].legend(loc="center"),
    "'on it' covers a line": lambda f: f.axes[0].text(0.5, 0.5, "on it", ha="center", va="center"),
    "a legend covers a bar": lambda f: (f.axes[0].bar([0.5], [1]), f.axes[0].legend(loc="center")),
    "without a unit": lambda f: f.axes[0].set_ylabel("time"),
    "differ in colour alone": lambda f: (
        f.axes[0].plot([0, 1], [0, 0], "--s", label="three"),
        f.legend(loc="outside lower center", ncols=3),
    ),
    "are equally light": lambda f: patches(f, {"facecolor": "#d55e00"}, {"facecolor": "#777777"}),
    "look alike to deuteranopes": lambda f: patches(f, {"facecolor": "#8c8c8c"}, {"facecolor": "#009e73"}),
}


@pytest.mark.parametrize("expected", SPOILED)
def test_the_check_finds_what_it_looks_for(expected):
    with paper_style():
        figure = sound()
        assert problems(figure) == []
        SPOILED[expected](figure)
        assert any(expected in problem for problem in problems(figure)), problems(figure)


def test_hatches_tell_alike_colours_apart():
    with paper_style():
        figure = sound()
        patches(figure, {"facecolor": "#d55e00"}, {"facecolor": "#777777", "hatch": "///"})
        assert problems(figure) == []


def test_turned_labels_touch_only_where_they_do():
    with paper_style():
        figure = sound()
        turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        figure.axes[0].set_xticks(np.linspace(0, 1, 9), [f"schedule {k}" for k in "abcdefghi"], **turned)
        assert problems(figure) == []
        figure.axes[0].set_xticks(np.linspace(0, 1, 40), ["schedule"] * 40, **turned)
        assert any("are on one another" in problem for problem in problems(figure))
        assert {text.get_rotation() for text in texts(figure) if text.get_text() == "schedule"} == {30}
