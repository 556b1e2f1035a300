"""Read and write measurements as CSV, and insert tables into documents."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.files import write_file


def read_csv(file: Path) -> list[dict[str, str]]:
    """Return all rows of a CSV file as strings by column; none if the file does not exist."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows to a CSV file atomically, with a header; a column that a row does not have is empty there."""
    text = io.StringIO(newline="")
    columns = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(file, text.getvalue())


def replace_rows(file: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ("processor_class",)) -> None:
    """Write rows to a CSV file in place of those with the same values in some columns; all other rows are kept.

    Args:
        file: the CSV file; it need not exist.
        rows: the new rows.
        columns: names of the columns. A row of the file that lacks one of them has an empty value there.
    """
    new = {tuple(str(row[column]) for column in columns) for row in rows}
    others = [row for row in read_csv(file) if tuple(row.get(column) or "" for column in columns) not in new]
    write_csv(file, [*others, *rows])


def filled(page: str, name: str, text: str | None = None) -> tuple[str, str]:
    """Replace the table between two markers of a page.

    Args:
        page: text of the page, with the markers `<!-- begin NAME -->` and `<!-- end NAME -->`.
        name: name in the markers.
        text: the new table; None to leave the page unchanged.

    Returns:
        The new text of the page, and the previous table.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
    before, opened, rest = page.partition(begin)
    old, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"The page must have the markers '{begin.strip()}' and '{end.strip()}'; one is missing.")
    return f"{before}{begin}{old if text is None else text}{end}{after}", old
