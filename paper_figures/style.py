"""One look for all figures, and files that are byte-identical when drawn again.

Colours come from :data:`kfac.timeline.KIND_COLORS`, the ones that timelines use. Sizes are those of a two-column page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

COLUMN_IN = 3.4
"""Width of one column in inches."""
PAGE_IN = 7.0
"""Width of both columns in inches."""

PNG_DPI = 300
"""Dots per inch of pictures."""

EDGE: dict[str, Any] = {"edgecolor": "#262626", "linewidth": 0.4}
"""The outline of everything filled: neighbours stay apart in grey print."""

_NOTE_PT, _NOTE_CHARACTERS_PER_IN = 6.5, 20.0

_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 7.0,
    "axes.titlesize": 8.0,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType: text in the PDF stays text, and editors can change it
    "svg.hashsalt": "spdkfac",
}


def note(figure: Figure, text: str) -> None:
    """Below everything, what a reader must know to read a figure; needs the constrained layout."""
    fits = int(_NOTE_CHARACTERS_PER_IN * figure.get_figwidth())
    figure.supxlabel(textwrap.fill(text, fits), fontsize=_NOTE_PT, color="#262626")


@contextmanager
def paper_style() -> Iterator[None]:
    """Matplotlib's defaults with this module's settings on top, whatever the user's own file says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PDF and as PNG, without dates or version strings; returns the files.

    Call it inside :func:`paper_style`: fonts are embedded while writing.
    """
    pdf, png = stem.with_suffix(".pdf"), stem.with_suffix(".png")
    figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None, "Creator": None})
    figure.savefig(png, dpi=PNG_DPI, metadata={"Software": None})
    return [pdf, png]
