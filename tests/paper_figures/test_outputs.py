"""The files: the same bytes wherever they are made, tables alike in all formats, pictures of the docs up to date."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from paper_figures.__main__ import ITEMS, main
from tests.paper_figures.conftest import FILES, rows

ROOT = Path(__file__).parents[2]


def test_a_second_time_gives_the_same_bytes(out, runs, tmp_path):
    assert main(["--out", str(tmp_path), "--runs", str(runs)]) == 0
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_another_process_gives_the_same_bytes(out, runs, tmp_path):
    """Elsewhere, in another language and time zone, with other hashes of texts: whatever does not simulate for long."""
    names = sorted(
        set(ITEMS) - {"iteration_time", "breakdown", "pipelining", "inverse_placement", "ablation", "overlap"}
    )
    shutil.copytree(runs, tmp_path / "copy")
    command = [sys.executable, "-m", "paper_figures", *names, "--out", "made", "--runs", "copy"]
    other = {"PYTHONHASHSEED": "4242", "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env={**os.environ, **other})
    made = sorted((tmp_path / "made").iterdir())
    assert {path.name.partition(".")[0] for path in made} == set(names)
    for path in made:
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def differing(picture, other):
    """The share of pixels that differ visibly."""
    one, two = (matplotlib.image.imread(path)[..., :3] for path in (picture, other))
    return 1.0 if one.shape != two.shape else float((abs(one - two).max(axis=-1) > 0.1).mean())


@pytest.mark.parametrize(
    ("name", "item"),
    [(name, name) for name in ("breakdown", "scaling", "placement_bounds")] + [("optimisation", "convergence")],
)
def test_pictures_in_the_docs_are_what_is_drawn(out, name, item):
    picture = ROOT / "docs" / "images" / f"{name}.png"
    assert differing(picture, out / f"{item}.png") < 0.001, f"copy what python -m paper_figures {item} draws there"


def test_a_changed_picture_is_noticed(out, tmp_path):
    pixels = matplotlib.image.imread(out / "breakdown.png").copy()
    pixels[600:640, 200:400, :3] = 0.5  # of 1.8 million, 8,000
    matplotlib.image.imsave(tmp_path / "changed.png", pixels)
    assert differing(out / "breakdown.png", tmp_path / "changed.png") > 0.001


def markdown_cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def latex_cells(text):
    lines = [line.removesuffix(r"\\") for line in text.splitlines() if " & " in line]
    return [[cell.strip().replace(r"\%", "%") for cell in line.split("&")] for line in lines]


@pytest.mark.parametrize(("suffix", "cells"), [(".md", markdown_cells), (".tex", latex_cells)])
@pytest.mark.parametrize("name", [name for name, suffixes in FILES.items() if ".csv" in suffixes])
def test_all_formats_of_a_table_show_the_same_numbers(out, name, suffix, cells):
    exact = [list(row.values()) for row in rows(out / f"{name}.csv")]
    shown = cells((out / f"{name}{suffix}").read_text())[-len(exact) :]
    compared = 0
    for one, other in zip(exact, shown, strict=True):
        for value, text in zip(one, other, strict=True):
            if re.fullmatch(r"-?[\d,]*\.?\d+%?", text):
                plain = text.rstrip("%").replace(",", "")
                unit = 10.0 ** -len(plain.partition(".")[2])
                assert abs(float(value) * (100 if "%" in text else 1) - float(plain)) <= 0.5001 * unit, (value, text)
                compared += 1
            else:
                assert value == text or (value, text) == ("", "-")
    assert compared >= 20
