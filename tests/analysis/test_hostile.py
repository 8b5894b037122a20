"""Names, numbers and files that somebody made up to break a table, a page or the reader: nothing runs, all is named."""

import csv
import io
import json
import os
import re
from html.parser import HTMLParser
from itertools import chain

import pytest

from analysis.__main__ import main
from analysis.columns import for_page
from analysis.comparison import Comparison
from analysis.report_pages import write_report
from analysis.runs import load_runs
from analysis.tables import Column, Table, printable
from tests.analysis.records import write_record

NAMES = {
    "html": "<img src=x onerror=alert(1)>",
    "script": "</script><script>alert(1)</script>",
    "closing": "</title></style></iframe></textarea><svg onload=alert(1)>",
    "quotes": '"\'`" onmouseover="alert(1)" x=\'',
    "latex": r"100% & a_b \input{/etc/passwd} ~ ^ $x$ {} # \\ [2cm]",
    "bracket": "[2cm] *",
    "markdown": "[x](javascript:alert(1)) | <b>y</b> `z`",
    "lines": "a\nb\r\nc\td\u2028e\x00f",
    "terminal": "\x1b[31mred\x1b[0m\x07\x9b2J",
    "direction": "\u202egnp.exe\u2066 \u200f",
    "surrogate": "half \ud800 a character",
    "formula": "=cmd|' /C calc'!A0",
    "template": "__BODY__ __TITLE__ {x} %s",
    "long": "n" * 10_000,
    "empty": "",
    "blank": "   ",
}
STYLES = ("text", "markdown", "latex", "csv", "json")
UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def write_hostile(runs, name, **options):
    """A record that says ``name`` wherever a name can be said."""
    path = write_record(runs, f"r{len(list(runs.glob('*/*')))}", times_s=(9.0, 0.2, 0.3, 0.25), **options)
    head = json.loads((path / "run.json").read_text())
    head |= dict.fromkeys(("run_id", "name", "schedule", "model", "data"), name)
    head["segments"][0] |= {"host": name, "start": name, "end_reason": name}
    head |= {"created": name, "code": {"commit": name, "dirty": True}}
    (path / "run.json").write_text(json.dumps(head))
    config = json.loads((path / "config.json").read_text())
    config |= {"kfac": {"damping": name, name or "x": 1}, "tracking": {"tags": [name]}}
    (path / "config.json").write_text(json.dumps(config))
    facts = {"host": name, "cpu": name, "gpus": [name], "python": name, "packages": {"torch": name}}
    (path / "environment.json").write_text(json.dumps(facts))
    return path


class Page(HTMLParser):
    """What a browser would make of a page: scripts, handlers, things that are loaded; frames' pages too."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.scripts, self.handlers, self.loads, self.texts, self.open = [], [], [], [], []
        self.frames = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "script":
            self.scripts.append(tag)
        for key, value in attributes:
            if key.startswith("on"):
                self.handlers.append((tag, key))
            if key in ("src", "href", "data", "action") and not (value or "").startswith("#"):
                self.loads.append(value)
            if key == "srcdoc":
                self.frames.append(value)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("kind", NAMES)
def test_the_report_shows_a_hostile_name_and_runs_nothing(tmp_path, kind):
    name = NAMES[kind]
    write_hostile(tmp_path, name)
    write_record(tmp_path, "other", schedule="dkfac")
    html, markdown = write_report(Comparison.of([tmp_path]), tmp_path / "out")
    page = Page(html.read_text())
    assert (page.scripts, page.handlers, page.loads) == ([], [], [])
    assert page.open[:5] == ["html", "meta", "meta", "title", "style"]
    assert page.open.count("main") == page.open.count("style") == 1
    assert not UNSEEN.search(html.read_text().replace("\n", ""))
    if kind == "script":  # what is shown is the name
        assert name in "".join(page.texts)
    for frame in page.frames:  # the zoomable timeline has its data and its script, and no other
        inner = Page(frame)
        assert (len(inner.scripts), inner.handlers, inner.loads) == (2, [], [])
    text = markdown.read_text()
    assert not UNSEEN.search(text)
    assert not re.search(r"<(img|script|/script|svg|b|/title)\b", text)
    assert "](javascript" not in text
    assert len({line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("| n ")}) <= 1


def test_a_page_that_runs_something_would_be_seen():
    """Negative control."""
    page = Page("<main><img src=x onerror=alert(1)></main><script>1</script>")
    assert (page.scripts, page.handlers, page.loads) == (["script"], [("img", "onerror")], ["x"])


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("style", STYLES)
def test_every_command_shows_a_hostile_name_in_every_style(tmp_path, capsys, kind, style):
    name = NAMES[kind]
    write_hostile(tmp_path, name)
    write_hostile(tmp_path, name, world_size=4)
    for command in ([], ["breakdown"], ["scaling"], ["export"], ["export", "--rows", "iterations"]):
        assert main([*command, str(tmp_path), "--format", style]) == 0
        out = capsys.readouterr().out
        out.encode()  # can be written
        shape = "csv" if style == "text" and command[:1] == ["export"] else style
        if shape == "json":
            assert json.loads(out)["rows"]
        elif shape == "csv":
            header, *rows = csv.reader(io.StringIO(out))
            assert {len(row) for row in rows} == {len(header)}
            assert not [cell for cell in [*header, *chain.from_iterable(rows)] if cell[:1] in ("=", "@", "\t", "\r")]
        else:
            assert not UNSEEN.search(out)
            assert max(map(len, out.splitlines())) < 6000
            if shape == "latex":
                check_latex(out)


def check_latex(text):
    """Groups are closed, only known commands are used, and no row begins with what the line above would swallow."""
    plain = re.sub(r"\\[&%$#_{}]", "", text)
    assert plain.count("{") == plain.count("}")
    commands = set(re.findall(r"\\([A-Za-z]+)", plain))
    assert commands <= {
        *("begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule", "multicolumn", "cmidrule"),
        *("par", "smallskip", "footnotesize", "resizebox", "textwidth"),
        *("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater"),
    }
    assert not re.search(r"^\s*[\[*]", text, re.MULTILINE)
    assert not re.search(r"[$~^#]|%.", plain.replace("!}{%\n", ""))


def test_a_file_of_each_kind_holds_hostile_names(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in NAMES.values():
        write_hostile(tmp_path / "runs", name)
    for suffix in (".csv", ".json", ".md", ".tex", ".txt", ".parquet"):
        assert main(["export", str(tmp_path / "runs"), "--output", str(tmp_path / f"x{suffix}")]) == 0
        assert (tmp_path / f"x{suffix}").stat().st_size > 0
    table = parquet.read_table(tmp_path / "x.parquet")
    assert NAMES["formula"] in table["schedule"].to_pylist()  # only a spreadsheet's file is changed
    assert f"'{NAMES['formula']}" in (tmp_path / "x.csv").read_text()


def test_numbers_in_a_csv_are_numbers_and_text_like_them_is_left():
    table = Table("t", (Column("a"),), ((-1.5,), ("-1.5e-3",), ("-inf",), ("-x",), ("+1+2",), ("-",), ("a=b",)))
    assert table.render("csv").split() == ["a", "-1.5", "-1.5e-3", "-inf", "'-x", "'+1+2", "-", "a=b"]


def test_printable_text_is_left_as_it_is():
    for text in ("Größe 3 µs × ∑ 数据 🙂", "a  b", "\\n"):
        assert printable(text) == text
    assert printable("a\nb\u202e") == "a\\nb\\u202e"


NUMBERS = {
    "eval_loss": (float("nan"), float("inf"), -1e308, 1e308, 10**300),
    "eval_accuracy": (float("nan"), -5, 1e300),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NUMBERS.items() for value in values])
def test_numbers_out_of_all_bounds_have_a_row_and_a_report(tmp_path, capsys, key, value):
    path = write_record(tmp_path, "a")
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {key: value}))
    assert main([str(tmp_path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 220
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize("seconds", [1e-300, 1e300, 5e-324])
def test_huge_and_tiny_times(tmp_path, capsys, seconds):
    write_record(tmp_path, "a", schedule="dkfac", times_s=(9.0, seconds, seconds, 2 * seconds))
    write_record(tmp_path, "b", times_s=(9.0, 0.1, 0.2, seconds))
    for command in ([str(tmp_path), "--intervals"], ["compare", "dkfac", "spdkfac", "--among", str(tmp_path)]):
        assert main(command) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) < 300
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "1", None, True, 10**400, [1]])
def test_iterations_that_took_no_possible_time_are_named(tmp_path, capsys, value):
    path = write_record(tmp_path, "a", summary=False, status="running")
    rows = [{"kind": "train", "iter": i, "loss": 1.0, "iteration_s": value if i == 2 else 0.1} for i in range(4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_record(tmp_path, "good")
    assert main([str(tmp_path)]) == 0
    assert f"warning: skipped {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1e308, 10**400, "x", [1], None, True])
def test_losses_of_any_kind_have_a_report(tmp_path, loss):
    path = write_record(tmp_path, "a")
    rows = [{"kind": k, "iter": i, "loss": loss, "iteration_s": 0.1} for i in range(4) for k in ("train", "eval")]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path)]) == 0
    assert main(["export", str(tmp_path), "--rows", "iterations"]) == 0


HEADS = (
    {"world_size": 0},
    {"world_size": -3},
    {"world_size": "many"},
    {"world_size": float("inf")},
    {"seed": []},
    {"schema": float("nan")},
    {"segments": [3]},
    {"segments": None},
    {"run_id": 5},
)
ODD_HEADS = (
    {"segments": []},
    {"segments": {}},
    {"segments": [{}]},
    {"code": "abc"},
    {"code": [1]},
    {"created": "yesterday"},
    {"created": ""},
    {"created": "9999-12-31T23:59:59-23:59"},
    {"name": None},
    {"seed": -(10**30)},
    {"world_size": 10**9},
    {"status": "dreaming"},
    {"error": "x"},
)


@pytest.mark.parametrize("change", HEADS, ids=str)
def test_heads_that_cannot_be_are_named(tmp_path, capsys, change):
    write_record(tmp_path, "good")
    path = write_record(tmp_path, "bad")
    (path / "run.json").write_text(json.dumps(json.loads((path / "run.json").read_text()) | change))
    assert main([str(tmp_path)]) == 0
    assert f"warning: skipped {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("change", ODD_HEADS, ids=str)
def test_heads_that_are_odd_are_shown_everywhere(tmp_path, change):
    write_record(tmp_path, "good", schedule="dkfac")
    path = write_record(tmp_path, "odd")
    (path / "run.json").write_text(json.dumps(json.loads((path / "run.json").read_text()) | change))
    outputs = [["--output", str(tmp_path / f"x.{suffix}")] for suffix in ("csv", "parquet", "tex", "md")]
    for command in (["report"], ["breakdown"], [], *(["export", *output] for output in outputs)):
        assert main([*command[:1], str(tmp_path), *command[1:]]) == 0


@pytest.mark.parametrize("facts", [{"gpus": "x"}, {"packages": [1]}, {"host": {}}, {"cpu": None}], ids=str)
def test_machines_that_are_odd_have_a_report(tmp_path, facts):
    path = write_record(tmp_path, "a")
    (path / "environment.json").write_text(json.dumps(facts))
    assert main(["report", str(tmp_path)]) == 0


FILES = ("run.json", "config.json", "summary.json")


def link_to_itself(path):
    path.symlink_to(path.name)


def enormous(path):
    with path.open("wb") as file:
        file.truncate(10**10)  # sparse: takes no room


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "make",
    [
        link_to_itself,
        enormous,
        os.mkfifo,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text("[" * 200_000),
        lambda path: path.write_text('{"a":' * 200_000),
        lambda path: path.write_bytes(b"\xff\xfe{\x00}\x00"),
        lambda path: path.write_text('{"seed": ' + "9" * 10_000 + "}"),
    ],
    ids=["loop", "enormous", "fifo", "folder", "device", "brackets", "braces", "utf16", "digits"],
)
def test_files_that_are_none_are_named_and_do_not_hold_up_the_others(tmp_path, file, make):
    good = write_record(tmp_path, "good")
    bad = write_record(tmp_path, "bad")
    (bad / file).unlink()
    make(bad / file)
    runs, problems = load_runs([tmp_path])
    assert [run.path for run in runs] == [good]
    assert [problem.path for problem in problems] == [bad] or (file, make.__name__) == ("run.json", "folder")
    assert all(len(str(problem)) < 1000 for problem in problems)


def test_files_that_may_not_be_read_are_named(tmp_path, monkeypatch):
    write_record(tmp_path, "good")
    bad = write_record(tmp_path, "bad")
    real = io.open

    def refuse(file, *arguments, **options):
        if str(file) == str(bad / "config.json"):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr(io, "open", refuse)
    runs, (problem,) = load_runs([tmp_path])
    assert [run.run_id for run in runs] == ["good"]
    assert "config.json is damaged: [Errno 13] Permission denied" in str(problem)


def test_warnings_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    write_record(tmp_path, "good")
    bad = write_record(tmp_path, "bad\x1b[2J\nwarning: all is well")
    (bad / "run.json").write_text("{")
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert shown.count("\n") == 1


def test_a_page_of_latex_leaves_out_what_all_rows_share_and_says_it():
    table = Table("t", (Column("a"), Column("b", ".1f", group="g"), Column("c")), ((1, 2.0, None), (2, 2.0, None)))
    slim, fault = for_page(table)
    assert [column.title for column in slim.columns] == ["a"]
    assert (slim.rows, slim.notes, fault) == (((1,), (2,)), ("All rows: g b 2.0.",), "")
    one = Table("t", table.columns, table.rows[:1])
    assert for_page(one) == (one, "")
