"""Results of the networks that training could start from, in memory and in a run directory."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.errors import CheckpointError
from weft.files import write_table
from weft.report.intervals import Estimate, interval_text


class ProbedNetwork(NamedTuple):
    """Result of a candidate.

    Attributes:
        model: its name.
        images: number of images of its last round.
        accuracy: of the probe, in percent.
        ms: time of a forward pass of one image on this machine, in milliseconds.
        licence: SPDX identifier of the licence of its weights.
        is_chosen: training starts from it.
    """

    model: str
    images: int
    accuracy: Estimate
    ms: float
    licence: str
    is_chosen: bool = False

    def __str__(self) -> str:
        """Describe the result in one line."""
        return (
            f"{self.model}: {interval_text(self.accuracy)} % by probe on {self.images:,} images, {self.ms:.1f} ms an"
            f" image, {self.licence}"
        )

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        chosen = "chosen" if self.is_chosen else ""
        return self.model, interval_text(self.accuracy), f"{self.images:,}", f"{self.ms:.1f}", self.licence, chosen


COLUMNS = ("model", "images", "top1", "low", "high", "ms", "licence", "chosen")
HEADER = ("network", "accuracy of the probe %", "images", "ms an image", "licence of the weights", "")


def write_candidates(file: Path, candidates: Sequence[ProbedNetwork]) -> None:
    """Write the results of all candidates to a CSV file."""
    rows = [(one.model, one.images, *one.accuracy, one.ms, one.licence, int(one.is_chosen)) for one in candidates]
    write_table(file, COLUMNS, rows)


def read_candidates(file: Path) -> list[ProbedNetwork]:
    """Read the results of all candidates; none if there is no file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not file.is_file():
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
        return [
            ProbedNetwork(
                row["model"],
                int(row["images"]),
                Estimate(float(row["top1"]), float(row["low"]), float(row["high"])),
                float(row["ms"]),
                row["licence"],
                row["chosen"] == "1",
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise CheckpointError(
            f"{file} must be the file that the run wrote; it cannot be read ({error!r}). Copy it again, or delete it."
        ) from error
