"""runs.csv of a study: one line per variant and seed, written after every run that ends.

The file is enough to continue a study: with study.json and runs.csv in the folder of `--out`, `weft study` trains only
what is missing, also on another machine. A line counts as finished only if recipe, settings, data and seed of its run
are those of today; `settings` is their fingerprint.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import UsageError
from weft.files import write_whole
from weft.text import reason_of

COLUMNS = ("variant", "seed", "img_size", "top1", "params", "macs", "seconds", "error", "curve", "settings")
Key = tuple[str, int]
"""Variant and seed."""


@dataclass(frozen=True)
class FinishedRun:
    """A line of the table: the result of one variant with one seed.

    Attributes:
        variant, seed: what was trained.
        img_size: evaluation size in pixels; None for the training size.
        top1: accuracy in percent on the validation images; None if the run failed.
        params, macs: parameters and multiply-adds of the network.
        seconds: time of training and evaluation.
        error: reason of a failure.
        curve: validation top-1 accuracy in percent by epoch.
        settings: fingerprint of recipe, settings, data and seed. Variants that share a run have the same one.
        right: (images) whether each prediction is correct; empty if the run was read from the file.
    """

    variant: str
    seed: int
    img_size: int | None
    top1: float | None
    params: int = 0
    macs: int = 0
    seconds: float = 0.0
    error: str | None = None
    curve: tuple[tuple[int, float], ...] = ()
    settings: str = ""
    right: np.ndarray = field(default_factory=lambda: np.zeros(0, bool), compare=False)


def fingerprint(content: Mapping[str, Any]) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def read_runs(path: Path) -> list[FinishedRun]:
    """Read runs.csv; no runs if the file is missing.

    Raises:
        UsageError: the file cannot be read as a table of runs, has an accuracy that is none, or the same run twice.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = set(COLUMNS[:8]) - set(reader.fieldnames or ())  # the other two are younger
            if missing:
                raise KeyError(", ".join(sorted(missing)))
            runs = [(reader.line_num, _run(cells)) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} must be a table of runs with the columns {', '.join(COLUMNS)}; {type(error).__name__}:"
            f" {reason_of(error)}. Restore or remove the file."
        ) from error
    lines_of: dict[tuple[str, int, str], int] = {}
    for line, run in runs:
        for top1 in (run.top1 or 0, *(value for _, value in run.curve)):
            if not 0 <= top1 <= 100:
                raise UsageError(
                    f"{path}, line {line}: accuracies must be percentages from 0 to 100; got {top1:g}. Correct the"
                    " line, or remove it to repeat its run."
                )
        first = lines_of.setdefault((run.variant, run.seed, run.settings), line)
        if first != line:
            raise UsageError(
                f"{path}, line {line}: a run must have one line; variant '{run.variant}' with seed {run.seed} is also"
                f" in line {first}. Remove one of the two."
            )
    return [run for _, run in runs]


def write_runs(path: Path, runs: Iterable[FinishedRun]) -> None:
    """Write runs.csv."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        is_finished = run.top1 is not None
        numbers = (str(run.top1), run.params, run.macs, f"{run.seconds:.0f}") if is_finished else ("", "", "", "")
        curve = " ".join(f"{epoch}:{top1}" for epoch, top1 in run.curve)
        cells = (run.variant, run.seed, run.img_size or "", *numbers, run.error or "", curve, run.settings)
        writer.writerow(cells)
    write_whole(path, buffer.getvalue().encode())


def _run(cells: Mapping[str, str]) -> FinishedRun:
    points = (point.split(":") for point in (cells.get("curve") or "").split())
    return FinishedRun(
        variant=cells["variant"],
        seed=int(cells["seed"]),
        img_size=int(cells["img_size"]) if cells["img_size"] else None,
        top1=float(cells["top1"]) if cells["top1"] else None,
        params=int(cells["params"] or 0),
        macs=int(cells["macs"] or 0),
        seconds=float(cells["seconds"] or 0),
        error=cells["error"] or None,
        curve=tuple((int(epoch), float(top1)) for epoch, top1 in points),
        settings=cells.get("settings") or "",
    )
