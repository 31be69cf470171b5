"""A matplotlib figure as SVG for a page: no script, no date, no colour of its own, and told in words as well.

Ink and grid are drawn in two colours that no other part uses and become `currentColor` and CSS variables, so that one
picture serves light, dark and paper. Text stays text: it can be searched, and it takes the page's font.
"""

from __future__ import annotations

import io
import re
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.figure import Figure

INK, GRID, FAINT = "#010203", "#040506", "#070809"
_BECOMES = {INK: "currentColor", GRID: "var(--grid)", FAINT: "var(--faint)"}
# Of the colours that people with every kind of colour vision tell apart (Okabe and Ito 2008), those that show on
# white and on black; dash and marker differ as well, so that no line is told by its colour alone.
MARKED = (("#d55e00", "-", "o"), ("#0072b2", "--", "s"), ("#009e73", "-.", "^"), ("#cc79a7", ":", "D"))
SETTINGS: Any = {  # matplotlib's own type for it changes with its version
   
    "svg.fonttype": "none", "svg.hashsalt": "tdbg", "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "text.color": INK, "grid.color": GRID, "axes.spines.top": False,
    "axes.spines.right": False, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "legend.frameon": False, "axes.grid": True, "grid.linewidth": 0.5, "axes.axisbelow": True,
    "text.usetex": False, "text.parse_math": False, "axes.formatter.use_mathtext": False, "path.simplify": True,
}  # fmt: skip


def figure(width: float = 7.2, height: float = 2.4) -> Figure:
    """An empty figure in the page's style; inches, of which the page makes the width of its column."""
    with matplotlib.rc_context(SETTINGS):
        return Figure(figsize=(width, height), layout="constrained")


def drawn(fig: Figure, name: str, title: str, words: str) -> str:
    """The picture as one <svg> element. `name` keeps its ids apart from those of other pictures of the page."""
    out = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, becomes in _BECOMES.items():
        text = text.replace(colour, becomes)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'(xlink:)?href="#([^"]+)"', rf'href="#{name}-\2"', text)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # of no use within HTML, and they look like addresses
    head, _, rest = text.partition(">")
    head = re.sub(r' (?:width|height|version)="[^"]*"', "", head)
    label = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(words)}</desc>'
    return f'{head} role="img" aria-labelledby="{name}-title {name}-desc">{label}{rest.strip()}'
