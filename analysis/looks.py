"""How lines of a chart are told apart: by their mark and their dashes, whatever their colours look like to somebody."""

from __future__ import annotations

from dataclasses import dataclass

COLORS = 8
"""How many line colours the page defines, ``--c0`` and on; ``--rest`` is that of lines without a look of their own."""
DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""Of the first eight lines, the next eight, and so on."""
MARKS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",  # disc
    "M-3.5,-3.5h7v7h-7z",  # square
    "M0,-5L4.5,3.5H-4.5z",  # triangle
    "M0,-5.2L4.4,0L0,5.2L-4.4,0z",  # diamond
    "M0,5L4.5,-3.5H-4.5z",  # triangle upside down
    "M-1.3,-4.5h2.6v3.2h3.2v2.6h-3.2v3.2h-2.6v-3.2h-3.2v-2.6h3.2z",  # plus
    "M-3.2,-5L0,-1.8L3.2,-5L5,-3.2L1.8,0L5,3.2L3.2,5L0,1.8L-3.2,5L-5,3.2L-1.8,0L-5,-3.2z",  # cross
    "M0,-5.5L1.6,-1.8L5.5,-1.8L2.4,0.8L3.5,4.8L0,2.4L-3.5,4.8L-2.4,0.8L-5.5,-1.8L-1.6,-1.8z",  # star
)
"""Outlines about their middle; one for each colour."""
LOOKS = COLORS * len(DASHES)
"""So many lines can be told apart; further ones are thin, grey and without marks."""


@dataclass(frozen=True)
class Look:
    """How a line is drawn.

    Args:
        color: for CSS.
        dash: of ``stroke-dasharray``; empty for a solid line.
        mark: an outline; empty for none.
        hollow: whether the mark is an outline only.
        size: of the mark, of 1.
    """

    color: str
    dash: str
    mark: str
    hollow: bool = False
    size: float = 1.0

    def mark_at(self, x: float, y: float, tip: str = "") -> str:
        """The mark at a place of an SVG, with a tooltip; of a line without marks a small dot."""
        outline = self.mark or "M-1.5,0a1.5,1.5 0 1,0 3,0a1.5,1.5 0 1,0 -3,0z"
        title = f"<title>{tip}</title>" if tip else ""
        fill = f"fill:var(--back);stroke:{self.color};stroke-width:1.5" if self.hollow else f"fill:{self.color}"
        scale = "" if self.size == 1 else f" scale({self.size:g})"
        place = f'style="{fill}" transform="translate({x:.1f} {y:.1f}){scale}"'
        return f'<path class="mark" {place} d="{outline}">{title}</path>'

    def stroke(self, width_px: float) -> str:
        """The line's style."""
        dash = f";stroke-dasharray:{self.dash}" if self.dash else ""
        return f"stroke:{self.color};stroke-width:{width_px if self.mark else 0.8:.1f}{dash}"

    def sample(self) -> str:
        """A bit of the line, for a legend."""
        line = f'<line x1="0" x2="30" y1="7" y2="7" style="{self.stroke(1.8)}"/>'
        mark = self.mark_at(15, 7) if self.mark else ""
        return f'<svg class="sample" viewBox="0 0 30 14" aria-hidden="true">{line}{mark}</svg>'


def look(number: int) -> Look:
    """The look of a line by its number."""
    if number >= LOOKS:
        return Look("var(--rest)", "", "")
    turn = number // COLORS
    # The marks of each turn differ too: a lone point has no dashes.
    hollow, size = turn % 2 == 1, 1.0 if turn < 2 else 0.65
    return Look(f"var(--c{number % COLORS})", DASHES[turn], MARKS[number % COLORS], hollow, size)
