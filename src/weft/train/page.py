"""Reports as Markdown and as a single HTML file: text, figures and tables.

Colours of the pictures are from the Okabe-Ito set, which all kinds of eyes tell apart.
"""

from __future__ import annotations

import base64
import html
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from weft.durable import writing
from weft.text import markdown, printable
from weft.train.rundir import write_text

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")

Facts = Sequence[tuple[str, str]]  # (name, value), or (file, caption)
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]  # heading, header, rows


def write_page(
    folder: Path, title: str, facts: Facts, pictures: Mapping[str, tuple[Figure, str]], tables: Sequence[Table]
) -> None:
    """Writes `report.md`, `report.html` and the pictures beside them.

    Args:
        folder: where to; made if missing, files in it are replaced.
        title: the heading.
        facts: lines above the tables, as (name, value).
        pictures: figure and caption by the file's name; the captions stand for what cannot be seen.
        tables: heading, header and rows of texts.
    """
    with writing(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the tables have the names in any script
        folder.mkdir(parents=True, exist_ok=True)
        for name, (figure, _) in pictures.items():
            figure.savefig(folder / name, dpi=130, metadata={"Software": None})
    captions = [(name, caption) for name, (_, caption) in pictures.items()]
    write_text(folder / "report.md", _markdown(title, facts, captions, tables))
    write_text(folder / "report.html", _html(folder, title, facts, captions, tables))


def shown(name: str, width: int) -> str:
    """A name for a picture: printable, cut, with `$` kept from starting a formula, and an underscore from hiding it."""
    text = "".join(letter if letter.isprintable() else "?" for letter in name)
    text = (text if len(text) <= width else f"{text[: width - 1]}…").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # matplotlib leaves labels that begin so out of legends


def _markdown(title: str, facts: Facts, captions: Facts, tables: Sequence[Table]) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(markdown, cells))} |"

    lines = [f"# {markdown(title)}", "", *(f"- {markdown(name)}: {markdown(value)}" for name, value in facts), ""]
    for name, caption in captions:
        lines += [f"![{markdown(caption)}]({name})", ""]
    for heading, header, rows in tables:
        lines += [f"## {markdown(heading)}", "", row(header), f"|{' --- |' * len(header)}", *map(row, rows), ""]
    return "\n".join(lines)


STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222; }
img { max-width: 100%; } table { border-collapse: collapse; margin-bottom: 2rem; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; overflow-wrap: anywhere; }"""


def _html(
    folder: Path,
    title: str,
    facts: Facts,
    captions: Facts,
    tables: Sequence[Table],
) -> str:
    """One page that needs no other file: the pictures are inside."""

    def shown(text: str) -> str:
        return html.escape(printable(text))

    def row(cells: Sequence[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{shown(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = [f"<h1>{shown(title)}</h1>", "<table>", *(row(fact) for fact in facts), "</table>"]
    for name, caption in captions:
        data = base64.b64encode((folder / name).read_bytes()).decode("ascii")
        body.append(f'<p><img alt="{shown(caption)}" src="data:image/png;base64,{data}"></p>')
    for heading, header, rows in tables:
        body += [
            f"<h2>{shown(heading)}</h2>",
            "<table>",
            row(header, "th"),
            *(row(cells) for cells in rows),
            "</table>",
        ]
    head = f'<meta charset="utf-8"><title>{shown(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
