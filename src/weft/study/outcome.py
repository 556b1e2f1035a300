"""Result of a comparison: entries, limits, Pareto frontier, recommendation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import markup
from weft.intervals import Estimate, interval_text
from weft.notebook import described
from weft.progress import clock
from weft.study.speeds import Form

MIN_P = 1e-6  # smaller p-values are not printed

TRAINED = (
    *("model", "initial weights", "top-1 % (95 % CI)", "difference to best (95 % CI)", "McNemar p", "result"),
    *("parameters", "MACs", "training time", "peak memory"),
)
DEPLOYED = ("model", "form", "fastest runtime", "top-1 %", "latency, ms", "images/s", "MB", "Pareto frontier")


@dataclass(frozen=True)
class Entry:
    """Result of one candidate.

    Attributes:
        accuracy: top-1 accuracy in percent with its interval; of a stopped run, that of its best epoch.
        stopped_after: epoch at which halving stopped it, or None.
        to_best: difference of top-1 to the best candidate, on the same images; None for the best itself.
        p_value: McNemar's test against the best, or None.
        forms: deployable forms, with accuracy and speed.
        seconds, peak_mib: time and peak memory of training, one seed.
        error: reason of a failure, or None.
        weights: name of the public weights that it started from; '' if it was trained from scratch.
    """

    name: str
    model: str
    accuracy: Estimate | None = None
    top1: tuple[float, ...] = ()
    stopped_after: int | None = None
    to_best: Estimate | None = None
    p_value: float | None = None
    params: int = 0
    macs: int = 0
    megabytes: float = 0.0
    seconds: float = 0.0
    peak_mib: int = 0
    forms: tuple[Form, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    error: str | None = None
    weights: str = ""

    @property
    def is_worse(self) -> bool:
        """Whether it is significantly less accurate than the best."""
        return self.to_best is not None and self.to_best.high < 0


@dataclass(frozen=True)
class Limits:
    """Limits on a deployed model; None for no limit."""

    latency_ms: float | None = None
    megabytes: float | None = None

    def allows(self, form: Form) -> bool:
        """Return whether a form is within the limits."""
        slow = self.latency_ms is not None and form.latency_ms > self.latency_ms
        large = self.megabytes is not None and form.megabytes > self.megabytes
        return not (slow or large)


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; the best candidate first, failed ones last.

    Attributes:
        out: directory.
        protocol: training protocol, as a sentence.
        notes: decisions, as sentences.
        entries: one per candidate.
        frontier: (name, form) on the Pareto frontier of accuracy and throughput, within the limits.
        advice: recommendation for each need.
    """

    out: Path
    data: str
    epochs: int
    seeds: int
    limits: Limits
    protocol: str
    notes: tuple[str, ...]
    entries: tuple[Entry, ...]
    frontier: tuple[tuple[str, str], ...]
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {**dataclasses.asdict(self), "out": str(self.out)}

    def __repr__(self) -> str:
        """Return the main values in one line."""
        tops = ", ".join(f"{entry.name!r} {interval_text(entry.accuracy) or 'failed'}" for entry in self.entries)
        values = [("data", repr(self.data)), ("top1", f"[{tops}]"), ("epochs", self.epochs), ("seeds", self.seeds)]
        return described("Comparison", [*values, ("out", repr(str(self.out)))])

    def _repr_html_(self) -> str:
        """Return the recommendation, and the tables of the report."""
        parts = [markup.element("p", self.advice, dir="auto")]
        parts.append(markup.table(TRAINED, [trained_cells(entry) for entry in self.entries if entry.error is None]))
        parts.append(markup.table(DEPLOYED, deployed_rows(self)))
        if failed := [(entry.name, str(entry.error)) for entry in self.entries if entry.error is not None]:
            parts.append(markup.table(("failed model", "reason"), failed))
        return markup.fragment("".join([*parts, markup.element("p", f"Report: {self.out / 'report.html'}")]))


def trained_cells(entry: Entry) -> tuple[str, ...]:
    """Return a row of the table of training results."""
    stopped = "" if entry.stopped_after is None else f"stopped after epoch {entry.stopped_after}"
    if entry.to_best is None:
        result = "best"
    else:
        result = "worse than the best" if entry.is_worse else "not significant"
    return (
        f"{entry.name} ({entry.model})" if entry.name != entry.model else entry.name,
        entry.weights or "scratch",
        interval_text(entry.accuracy),
        interval_text(entry.to_best, signed=True),
        _p_value(entry.p_value),
        stopped or result,
        f"{entry.params:,}",
        f"{entry.macs / 1e6:,.0f}M",
        clock(entry.seconds),
        f"{entry.peak_mib:,} MiB",
    )


def _p_value(p_value: float | None) -> str:
    if p_value is None:
        return ""
    return f"{p_value:.2g}" if p_value >= MIN_P else f"< {MIN_P:g}"


def deployed_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the rows of the table of inference results."""
    rows = []
    for entry in comparison.entries:
        for form in entry.forms:
            is_allowed = comparison.limits.allows(form)
            on_it = (entry.name, form.name) in comparison.frontier
            rows.append(
                (
                    entry.name,
                    form.name,
                    form.way,
                    f"{form.top1:.2f}",
                    f"{form.latency_ms:.2f}",
                    f"{form.images_per_second:,.0f}",
                    f"{form.megabytes:.1f}",
                    "yes" if on_it else "" if is_allowed else "exceeds the limits",
                )
            )
    return rows


def pareto(entries: Sequence[Entry], limits: Limits) -> tuple[tuple[str, str], ...]:
    """Return (name, form) of the Pareto frontier of accuracy and throughput: finished runs, within the limits."""
    points = [
        (entry, form) for entry in entries for form in entry.forms if limits.allows(form) and not entry.stopped_after
    ]

    def is_beaten(form: Form) -> bool:
        return any(
            other.top1 >= form.top1
            and other.images_per_second >= form.images_per_second
            and (other.top1, other.images_per_second) != (form.top1, form.images_per_second)
            for _, other in points
        )

    return tuple((entry.name, form.name) for entry, form in points if not is_beaten(form))


def advise(entries: Sequence[Entry], limits: Limits) -> str:
    """Recommend a model for each need, as one paragraph. Models without a significant difference are not ranked."""
    points = [
        (entry, form) for entry in entries for form in entry.forms if limits.allows(form) and not entry.stopped_after
    ]
    if not points:
        return "No finished model is within the limits. Raise the limits, or compare smaller models."
    best, best_form = max(points, key=lambda point: point[1].top1)
    sentences = [f"For accuracy, use {best.name} ({best_form.name}): {best_form.top1:.2f} %."]
    alike = [(entry, form) for entry, form in points if entry is best or not entry.is_worse]
    quick, quick_form = max(alike, key=lambda point: point[1].images_per_second)
    others = sorted({entry.name for entry, _ in alike} - {best.name})
    if others:
        sentences.append(f"The difference between {best.name} and {', '.join(others)} is not significant.")
    sentences.append(
        f"For speed without a significant loss, use {quick.name} ({quick_form.name}):"
        f" {quick_form.images_per_second:.0f} images/s, {quick_form.latency_ms:.1f} ms latency,"
        f" {quick_form.top1:.2f} %."
    )
    fastest, fastest_form = max(points, key=lambda point: point[1].images_per_second)
    if fastest is not quick:
        sentences.append(
            f"The fastest is {fastest.name} ({fastest_form.name}): {fastest_form.images_per_second:.0f} images/s at"
            f" {fastest_form.top1:.2f} %."
        )
    small, small_form = min(alike, key=lambda point: point[1].megabytes)
    sentences.append(
        f"The smallest without a significant loss is {small.name} ({small_form.name}), {small_form.megabytes:.1f} MB."
    )
    stopped = [entry.name for entry in entries if entry.stopped_after]
    if stopped:
        sentences.append(f"{', '.join(stopped)} stopped early; longer training could change the ranking.")
    scratch = [entry.name for entry in entries if not entry.weights and entry.error is None]
    if scratch and any(entry.weights for entry in entries):
        sentences.append(
            f"{', '.join(scratch)} {'was' if len(scratch) == 1 else 'were'} trained from scratch, since there are"
            " no public weights, while the others started from ImageNet: the comparison shows which to use here, not"
            " which architecture is better."
        )
    return " ".join(sentences)
