"""Result of a study: one row per variant, and the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import markup
from weft.intervals import Estimate, interval_text
from weft.notebook import described
from weft.study.plan import Study

HEADER = (
    *("variant", "paper, top-1 %", "paper, effect", "top-1 % (95 % CI)", "effect (95 % CI)"),
    *("result", "parameters", "MACs"),
)


@dataclass(frozen=True)
class Row:
    """Result of one variant.

    Attributes:
        variant, against: names of the variant and of the one that it is compared with, if any.
        top1: top-1 accuracy in percent, one per seed that finished.
        mean: over the seeds; None if none finished.
        effect: difference to the compared variant in points, seed by seed; None without one.
        paper, paper_effect: the paper's top-1 in percent, and its points above the same variant there.
        verdict: whether the sign of the effect is significant.
        params, macs: of the network.
        seconds: of its training runs.
        errors: (seed, reason) of runs that failed.
    """

    variant: str
    against: str | None
    top1: tuple[float, ...]
    mean: Estimate | None
    effect: Estimate | None
    paper: float | None
    paper_effect: float | None
    verdict: str
    params: int
    macs: int
    seconds: float
    errors: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class StudyResult:
    """Result of a study.

    Attributes:
        out: its directory.
        rows: one per variant, in the study's order.
        curves: variant -> (epoch, held-out top-1 in percent, mean over the seeds); the first of variants that share
            their runs.
        seconds: of all training runs together.
        teacher: top-1 accuracy of the teacher that the study trained, in percent; None without one.
    """

    out: Path
    study: Study
    scale: str
    data: str
    seeds: int
    rows: tuple[Row, ...]
    curves: Mapping[str, tuple[tuple[int, float], ...]]
    seconds: float
    teacher: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that the study or the caller adds to the base recipe in every variant."""
        return self.study.scales[self.scale].set

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {
            "study": self.study.name,
            "title": self.study.title,
            "claim": self.study.claim,
            "source": self.study.source,
            "scale": self.scale,
            "data": self.data,
            "seeds": self.seeds,
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "teacher": self.teacher,
            "out": str(self.out),
            "variants": [_plain(row) for row in self.rows],
        }

    def __repr__(self) -> str:
        """Return the main values in one line."""
        values = [("study", repr(self.study.name)), ("scale", repr(self.scale)), ("data", repr(self.data))]
        values += [("variants", len(self.rows)), ("seeds", self.seeds), ("out", repr(str(self.out)))]
        return described("StudyResult", values)

    def _repr_html_(self) -> str:
        """Return the claim, and the table of the report."""
        parts = [markup.element("p", f"{self.study.title}. Claim: {self.study.claim}", dir="auto")]
        parts.append(markup.table(HEADER, [cells(row) for row in self.rows]))
        if failed := [(row.variant, f"{seed}", reason) for row in self.rows for seed, reason in row.errors]:
            parts.append(markup.table(("failed variant", "seed", "reason"), failed))
        return markup.fragment("".join([*parts, markup.element("p", f"Report: {self.out / 'report.html'}")]))


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        row.variant,
        "" if row.paper is None else f"{row.paper:g}",
        "" if row.paper_effect is None else f"{row.paper_effect:+g}",
        interval_text(row.mean),
        interval_text(row.effect, signed=True),
        row.verdict,
        f"{row.params:,}" if row.params else "",
        f"{row.macs / 1e6:,.1f}M" if row.macs else "",
    )


def _plain(row: Row) -> dict[str, Any]:
    record = dataclasses.asdict(row)
    for key in ("mean", "effect"):
        record[key] = None if record[key] is None else [_finite(number) for number in record[key]]
    return record


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
