"""Write reports as one self-contained HTML file: conclusions, figures, tables.

The colours of figures are the Okabe-Ito palette, which is safe for colour-blind readers. Figures are SVG: their text
uses the fonts of the browser, and black and white follow the light or dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.files import write_file, writing
from weft.report import markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
NUM_STYLES = len(COLOURS) * len(MARKERS)  # pairs of colour and marker, after which `series_style` repeats them
REPORT = "report.html"
MAX_HEADLINE = 160  # characters of a first sentence in large type
SVG_STYLE = """<style>
text { font-family: system-ui, sans-serif !important; }
@media (prefers-color-scheme: dark) {
  text:not([style*="fill:"]) { fill: #e8e6e1; }
  [style*="stroke: #000000"] { stroke: #e8e6e1 !important; }
  [style*="fill: #000000"] { fill: #e8e6e1 !important; }
  [style*="fill: #ffffff"] { fill: #14181a !important; }
  [style*="stroke: #ffffff"] { stroke: #14181a !important; }
}
</style>"""

Fields = Sequence[tuple[str, str]]  # (name, value)
Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]  # header, rows


def series_style(number: int) -> tuple[str, str]:
    """Return the colour and the marker of a series of points; the first 49 pairs differ."""
    turn = number // len(COLOURS)
    return COLOURS[number % len(COLOURS)], MARKERS[(number + turn) % len(MARKERS)]


@dataclass(frozen=True)
class Section:
    """Part of a report: a heading, a paragraph, figures, a table.

    Attributes:
        figures: each with its alternative text.
        html: images or a table with markup of its own.
        is_wide: figures are scrolled on narrow screens, not made smaller.
    """

    heading: str
    text: str = ""
    figures: Sequence[tuple[Figure, str]] = ()
    html: str = ""
    table: Table | None = None
    is_wide: bool = False


@dataclass(frozen=True)
class Lead:
    """Conclusions at the top of a report: sentences, and a list of what to do next."""

    sentences: Sequence[str]
    next_steps: Sequence[str] = ()


def write_page(folder: Path, title: str, lead: Lead, summary: Fields, sections: Sequence[Section]) -> None:
    """Write `report.html`.

    Args:
        folder: output folder; created if missing, and an existing report is replaced.
        title: heading of the report.
        lead: conclusions.
        summary: (name, value) lines below the conclusions.
        sections: parts of the report.
    """
    with writing(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has the fonts of every script
        folder.mkdir(parents=True, exist_ok=True)
        page = _html(title, lead, summary, sections)
    write_file(folder / REPORT, page)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches. matplotlib, which takes long to import, is imported here."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def shown(name: str, width: int) -> str:
    """Format a name for a matplotlib figure: printable, at most `width` characters, without mathtext."""
    text = "".join(char if char.isprintable() else "?" for char in name)
    text = (text if len(text) <= width else f"{text[: width - 1]}…").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # matplotlib omits labels with a leading _ from legends


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG that follows the light or dark mode; its text uses the fonts of the browser."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "weft"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + SVG_STYLE, buffer.getvalue(), count=1).encode()


def _html(title: str, lead: Lead, summary: Fields, sections: Sequence[Section]) -> str:
    """Return a self-contained HTML page."""
    headline, *others = lead.sentences
    kind = {"class": "headline"} if len(headline) <= MAX_HEADLINE else {}
    conclusions = markup.element("p", headline, dir="auto", **kind)
    conclusions += "".join(markup.element("p", sentence, dir="auto") for sentence in others)
    if lead.next_steps:
        steps = "".join(markup.element("li", step, dir="auto") for step in lead.next_steps)
        conclusions += f"<h2>What to do next</h2><ul>{steps}</ul>"
    body = [markup.element("h1", title, dir="auto"), f'<div class="lead">{conclusions}</div>']
    if summary:
        body.append(f"<section><h2>Summary</h2>{markup.fields(summary)}</section>")
    for section in sections:
        parts = [markup.element("h2", section.heading)]
        if section.text:
            parts.append(markup.element("p", section.text, dir="auto"))
        parts.append(section.html)
        if section.figures:
            images = [markup.image("image/svg+xml", svg(figure), alt) for figure, alt in section.figures]
            kind = "scroll wide" if section.is_wide else "figures"
            parts.append(f'<div class="{kind}">{"".join(images)}</div>')
        if section.table is not None:
            parts.append(markup.table(*section.table))
        body.append(f"<section>{''.join(parts)}</section>")
    return markup.page(title, "\n".join(body))
