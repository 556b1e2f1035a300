"""HTML of reports and of results in notebooks: pages, tables, confusion matrices, galleries of images.

All text is escaped, and class names may be in any script: the browser chooses the fonts and the direction of the text.
Colours follow the light or dark mode of the reader. Pages need no other file and no script.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from weft.text import printable

if TYPE_CHECKING:
    import numpy as np

NUMBER = re.compile(r"[<+-]?\s?[\d.,]+\s?[%MGk]?( to [\d.,]+)?(\s\([^)]*\))?|[-+]?")  # with an interval
VISIBLE_SHARE = 0.12  # opacity of a cell with one image of many
SMALL = 96  # pixels; smaller images are enlarged without smoothing


class Card(NamedTuple):
    """Images of a gallery that belong together, and their caption.

    Attributes:
        images: alternative text -> pixels, uint8, (height, width) or (height, width, 3).
        lines: lines of the caption.
        name: file name of the image, or an empty text.
    """

    images: Mapping[str, np.ndarray]
    lines: Sequence[str]
    name: str = ""


def escaped(text: str) -> str:
    """Return text for HTML, with characters that are not printable escaped."""
    return html.escape(printable(text))


def element(name: str, text: str, **attributes: str) -> str:
    """Return an element with escaped text."""
    return f"<{name}{_attributes(attributes)}>{escaped(text)}</{name}>"


def image(mime: str, content: bytes, alt: str, **attributes: str) -> str:
    """Return an image that is part of the page."""
    data = base64.b64encode(content).decode("ascii")
    return f'<img alt="{escaped(alt)}" src="data:{mime};base64,{data}"{_attributes(attributes)}>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are aligned right."""
    is_number = [all(NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(header))]
    kinds = [{"class": "number"} if number else {"dir": "auto"} for number in is_number]

    def cells(values: Iterable[str], tag: str) -> str:
        row = zip(values, kinds, strict=True)
        return "<tr>" + "".join(element(tag, value, **kind) for value, kind in row) + "</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return f'<div class="scroll"><table><thead>{cells(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def matrix(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """Return a confusion matrix: rows are true classes, columns predicted ones; colours are shares of the row."""
    is_long = any(len(name) > 3 for name in names)

    def head(name: str) -> str:
        inner = element("div", name, **{"class": "long"}) if is_long else escaped(name)
        return f'<th scope="col" dir="auto">{inner}</th>'

    rows = []
    for true, (name, row) in enumerate(zip(names, counts, strict=True)):
        total = max(sum(row), 1)
        cells = [element("th", name, scope="row", dir="auto")]
        for predicted, count in enumerate(row):
            opacity = VISIBLE_SHARE + (0.75 - VISIBLE_SHARE) * count / total
            kind = {"class": "right" if true == predicted else "wrong", "style": f"--share: {opacity:.2f}"}
            cells.append(element("td", f"{count}", **kind) if count else "<td></td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    corner = element("th", "true class ↓  predicted →", **{"class": "axes"})
    top = corner + "".join(map(head, names))
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="matrix">{body}</table></div>'


def gallery(cards: Sequence[Card]) -> str:
    """Return a gallery of images with captions."""
    shown = []
    for card in cards:
        images = "".join(_picture(alt, pixels) for alt, pixels in card.images.items())
        lines = [element("div", line, dir="auto") for line in card.lines]
        if card.name:
            lines.append(element("div", card.name, **{"class": "name"}))
        caption = f"<figcaption>{''.join(lines)}</figcaption>"
        shown.append(f'<figure class="card"><div class="images">{images}</div>{caption}</figure>')
    kind = "cards narrow" if all(len(card.images) <= 1 for card in cards) else "cards"
    return f'<div class="{kind}">{"".join(shown)}</div>'


def _picture(alt: str, pixels: np.ndarray) -> str:
    """Return an image of a gallery: lossless if it is small, since it is then enlarged."""
    from PIL import Image

    buffer, is_small = io.BytesIO(), min(pixels.shape[:2]) <= SMALL
    Image.fromarray(pixels).save(buffer, "PNG" if is_small else "JPEG", quality=90)
    kind = {"class": "small"} if is_small else {}
    return image("image/png" if is_small else "image/jpeg", buffer.getvalue(), alt, **kind)


def fields(values: Sequence[tuple[str, str]]) -> str:
    """Return a list of names and values."""
    return f"<dl>{''.join(element('dt', name) + element('dd', value) for name, value in values)}</dl>"


def page(title: str, body: str) -> str:
    """Return a whole page."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', title)}<style>{_style('markup')}{_style('page')}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body class="weft">\n{body}\n</body></html>\n'


def fragment(body: str) -> str:
    """Return HTML for a notebook, with its style sheet; text between dollar signs is not a formula."""
    ignored = "tex2jax_ignore mathjax_ignore"
    return f'<style>{_style("markup")}</style><div class="weft cell {ignored}">{body}</div>'


@cache
def _style(name: str) -> str:
    return (resources.files("weft.report") / f"{name}.css").read_text(encoding="utf-8")


def _attributes(attributes: dict[str, str]) -> str:
    return "".join(f' {name}="{escaped(value)}"' for name, value in attributes.items())
