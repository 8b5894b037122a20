"""Pictures show every span where it belongs; the page holds all data and loads nothing."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba

from experiments.timeline_view import draw_timeline, write_html, write_png
from kfac.timeline import KIND_COLORS, KINDS, Span, Timeline
from tests.legibility import problems

SPANS = (
    Span(0, "compute", "FF", "forward", 0.0, 0.002),
    Span(0, "compute", "BP", "back </script><b>", 0.002, 0.005),
    Span(0, "communication", "FactorComm", "A message 0", 0.001, 0.006),
    Span(3, "compute", "InverseComp", "invert fc A", 0.004, 0.008),
)
TIMELINE = Timeline(SPANS, {0: 3}, total_s=0.01)


def test_bars_are_the_spans():
    axes = draw_timeline(TIMELINE, "title").axes[0]
    drawn = set()
    for bars in axes.collections:
        for path, color in zip(bars.get_paths(), list(bars.get_facecolor()) * 9, strict=False):
            (x0, y0), (x1, _) = path.get_extents().get_points()
            drawn.add((round(x0, 6), round(x1, 6), round(y0, 3), tuple(color)))
    rows = {(0, "compute"): 0.0, (0, "communication"): 1.0, (3, "compute"): 2.4}
    assert drawn == {
        (round(1e3 * s.start_s, 6), round(1e3 * s.end_s, 6), rows[s.rank, s.lane], to_rgba(KIND_COLORS[s.kind]))
        for s in SPANS
    }
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0\nof 3 alike", "rank 3"]
    lanes = [text.get_text() for text in axes.get_yticklabels(minor=True)]
    assert lanes == ["compute", "communication"] * 2
    assert axes.get_xlim() == (0, 10)
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["FF", "BP", "FactorComm", "InverseComp"]


def test_the_critical_path_is_underlined_where_it_is_known(tmp_path):
    def names(timeline):
        return [text.get_text() for text in draw_timeline(timeline).legends[0].get_texts()]

    path = Timeline(tuple(replace(s, critical=s.kind in ("FF", "FactorComm")) for s in SPANS), total_s=0.01)
    black = [
        [tuple(p.get_extents().get_points()[:, 0].round(6)) for p in bars.get_paths()]
        for bars in draw_timeline(path).axes[0].collections
        if len(bars.get_facecolor()) and tuple(bars.get_facecolor()[0]) == to_rgba("black")
    ]
    assert sorted(bar for bars in black for bar in bars) == [(0, 2), (1, 6)]
    assert names(path)[-1] == "critical path" not in names(TIMELINE)
    write_html(path, tmp_path / "t.html")
    data = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "t.html").read_text())[1])
    assert {span[2] for span in data["spans"] if span[5:] == [1]} == {"forward", "A message 0"}


def test_a_long_title_takes_several_lines():
    title = draw_timeline(TIMELINE, "long " * 40).get_suptitle()
    assert max(map(len, title.split("\n"))) <= 78
    assert title.count("\n") == 2


def test_more_ranks_than_fit_are_said():
    spans = tuple(Span(rank, "compute", "FF", "f", 0, 1 + 0.1 * rank) for rank in range(20))
    # Rank 0 stands for 3, rank 19 for 43: 64 in all.
    figure = draw_timeline(Timeline(spans, {0: 3, 19: 43}), "x")
    assert figure.get_suptitle().startswith("x; 8 of 64 ranks, those that differ most; each stands for")
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[0].startswith("rank 0\nleast busy\nfor ")
    assert sum(int(label.split("for ")[1].split()[0]) if "for " in label else 1 for label in labels[:-1]) == 64 - 43
    assert labels[-1] == "rank 19\nbusiest\nof 43 alike"


def test_the_legend_names_what_can_be_seen():
    """Not what only ranks do that are not shown, nor what takes no time; what is short is a pixel long."""
    long = [Span(rank, "compute", "FF", "f", 0, 1 + 0.1 * rank) for rank in range(20)]
    elsewhere = Span(10, "communication", "GradComm", "short", 0, 1e-9)
    others = (Span(19, "compute", "BP", "short", 2.95, 2.95 + 1e-9), Span(19, "compute", "InverseComp", "none", 3, 3))
    figure = draw_timeline(Timeline((*long, elsewhere, *others)), max_ranks=2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FF", "BP"]
    (bars,) = (b for b in figure.axes[0].collections if tuple(b.get_facecolor()[0]) == to_rgba(KIND_COLORS["BP"]))
    (path,) = bars.get_paths()
    assert path.get_extents().width == pytest.approx(1e3 * 2.95 / 1000, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_a_picture_is_legible(ranks):
    of_rank = [
        (Span(r, "compute", "FF", "f", 0, 1 + r % 20), Span(r, "communication", "FactorComm", "m", 3, 3.5 + r % 7))
        for r in range(ranks)
    ]
    spans = (Span(0, "compute", kind, "x", 200 + k, 201 + k, k == 3) for k, kind in enumerate(KINDS))
    timeline = Timeline((*(span for pair in of_rank for span in pair), *spans))
    assert problems(draw_timeline(timeline, "resnet50-spdkfac+placement=optimized-w64: iteration 120, measured")) == []


def test_png_is_the_same_every_time(tmp_path):
    write_png(TIMELINE, tmp_path / "a.png")
    write_png(TIMELINE, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_an_empty_timeline_is_drawn(tmp_path):
    write_png(Timeline(()), tmp_path / "a.png")
    write_html(Timeline(()), tmp_path / "a.html")


def page(tmp_path):
    write_html(TIMELINE, tmp_path / "t.html", "one <b>")
    return (tmp_path / "t.html").read_text()


def test_the_page_holds_every_span_and_the_breakdown(tmp_path):
    text = page(tmp_path)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert data["title"] == "one <b> (2 more ranks are like one that is shown)"
    spans = {
        (data["lanes"][lane]["long"], data["kinds"][kind]["name"], name, start, length)
        for lane, kind, name, start, length in data["spans"]
    }
    assert spans == {
        ("rank 0 (of 3 alike) compute", "FF", "forward", 0.0, 2000.0),
        ("rank 0 (of 3 alike) compute", "BP", "back </script><b>", 2000.0, 3000.0),
        ("rank 0 (of 3 alike) communication", "FactorComm", "A message 0", 1000.0, 5000.0),
        ("rank 3 compute", "InverseComp", "invert fc A", 4000.0, 4000.0),
    }
    exposed = {kind["name"]: kind["exposed_us"] for kind in data["kinds"]}
    # Ranks 0 to 2: FF 2, BP 3, FactorComm 1 exposed, 4 other; rank 3: InverseComp 4, 6 other.
    assert exposed == pytest.approx({"FF": 1500, "BP": 2250, "FactorComm": 750, "InverseComp": 1000, "Other": 4500})
    assert next(k for k in data["kinds"] if k["name"] == "FactorComm")["hidden_us"] == pytest.approx(3000)


def test_the_page_loads_nothing(tmp_path):
    text = page(tmp_path).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|src=|@import|url\((?!#)|fetch\(|<link", text)
    assert len(text) < 14_000


@pytest.mark.skipif(not shutil.which("node"), reason="node checks the page's script where it is installed")
@pytest.mark.parametrize("critical", [False, True])
def test_the_script_draws_every_span(tmp_path, critical):
    spans = tuple(replace(s, critical=critical and s.kind in ("FF", "FactorComm")) for s in SPANS)
    write_html(replace(TIMELINE, spans=spans), tmp_path / "timeline.html")
    text = (tmp_path / "timeline.html").read_text()
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0]
    data = re.search(r'id="data">(.*?)</script>', text)[1]
    stand_in = """
        let drawn = [], lines = [], handlers = {}, fill = "";
        const pen = new Proxy({}, { set(_, key, value) { if (key === "fillStyle") fill = value; return true; },
          get: (_, key) => (...a) => {
            if (key === "fillRect" && fill.startsWith("#")) drawn.push([fill, ...a]);
            if (key === "fillRect" && a[3] === 2) lines.push(a);
          } });
        const node = tag => ({ tag, style: { setProperty() {} }, clientWidth: 800, offsetWidth: 10, append() {},
          getContext: () => pen, getBoundingClientRect: () => ({ left: 0, top: 0, width: 800 }),
          addEventListener(name, f) { handlers[this.tag + name] = f; } });
        const known = {};
        globalThis.document = { title: "", documentElement: {},
          getElementById: id => known[id] ??= Object.assign(node(id), { textContent: DATA }),
          querySelector: tag => known[tag] ??= node(tag), createElement: node };
        globalThis.getComputedStyle = () => ({ getPropertyValue: name => name });
        globalThis.matchMedia = () => node("media");
        globalThis.requestAnimationFrame = f => f();
        globalThis.addEventListener = (name, f) => { (handlers["window" + name] ??= f); };
        globalThis.innerWidth = 900; globalThis.innerHeight = 900;
        globalThis.scrollBy = () => {};
        const bars = () => { const all = drawn.map(([color, x, y, w]) => [color, x, w]); drawn = []; return all; };
    """
    check = """
        const all = bars(), underlined = lines.map(([x, y, w]) => [x, w]);
        handlers.laneswheel({ clientX: 150, clientY: 20, deltaY: -400, preventDefault() {} });
        const zoomed = bars();
        handlers.lanesdblclick();
        const back = bars();
        handlers.lanespointermove({ clientX: 160, clientY: 10 });
        const named = [known.tip.textContent, known.tip.style.visibility];
        handlers.lanespointermove({ clientX: 700, clientY: 10 });
        let stopped = false;
        handlers.laneswheel({ clientX: 20, clientY: 20, deltaY: -400, preventDefault() { stopped = true; } });
        console.log(JSON.stringify([all, zoomed, back, named, known.tip.style.visibility, stopped,
          underlined]));
    """
    source = f"const DATA = {json.dumps(data)};{stand_in}\n{script}\n{check}"
    done = subprocess.run(["node", "-e", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    everything, zoomed, back, named, elsewhere, stopped, underlined = json.loads(done.stdout)
    width = (800 - 150 - 8) / 10_000
    lanes = sorted(SPANS, key=lambda s: (s.rank, s.lane != "compute", s.start_s))
    expected = [[150 + 1e6 * s.start_s * width, 1e6 * s.duration_s * width] for s in lanes]
    assert [color for color, *_ in everything] == [KIND_COLORS[s.kind] for s in lanes]
    assert [pytest.approx(bar[1:]) for bar in everything] == expected
    assert zoomed[0][2] == pytest.approx(everything[0][2] * 2.71828, rel=1e-3)
    assert back == everything
    on_path = ", on the critical path" if critical else ""
    said = f"FF: forward, 2.000 ms, from 0.00 µs to 2.000 ms, rank 0 (of 3 alike) compute{on_path}"
    assert named == [said, "visible"]
    marked = [e for e, s in zip(expected, lanes, strict=True) if critical and s.kind in ("FF", "FactorComm")]
    assert [pytest.approx(line) for line in underlined] == marked
    assert elsewhere == "hidden"
    assert not stopped, "over the names the wheel scrolls the page"
