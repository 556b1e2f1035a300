"""Read and write measurements as CSV, and the tables in documents that are made from them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_csv(file: Path) -> list[dict[str, str]]:
    """All lines, as texts by column; none where there is no file yet."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All lines anew; the first has the columns."""
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def filled(page: str, name: str, text: str | None = None) -> tuple[str, str]:
    """A page with a table between its two marks, and the table that stood there."""
    begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
    before, found, rest = page.partition(begin)
    old, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"The page must have the marks '{begin.strip()}' and '{end.strip()}'; it has not.")
    return f"{before}{begin}{old if text is None else text}{end}{after}", old
