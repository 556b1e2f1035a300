"""Result of a comparison: entries, limits, Pareto frontier, recommendation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.study.speeds import Form
from weft.study.statistics import Estimate


@dataclass(frozen=True)
class Entry:
    """A candidate, and what came of it.

    Attributes:
        accuracy: top-1 in percent with its interval; of a run that was stopped, of its best epoch until then.
        stopped_after: the epoch at which halving stopped it, or None.
        to_best: top-1 above the best's, on the same images; None for the best itself.
        p_value: of McNemar's test against the best, or None.
        forms: ways to deploy it, with accuracy and speed of each.
        seconds, peak_mib: of training, one seed.
        error: why there is nothing else, or None.
        weights: public weights that it started from, by their name on the hub; '' where it was trained from scratch.
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
    def is_told_apart(self) -> bool:
        """Whether the best is shown to be better than this one."""
        return self.to_best is not None and self.to_best.high < 0


@dataclass(frozen=True)
class Limits:
    """What a model may cost where it is used; None for anything."""

    latency_ms: float | None = None
    megabytes: float | None = None

    def allows(self, form: Form) -> bool:
        """Whether a way to deploy keeps within them."""
        slow = self.latency_ms is not None and form.latency_ms > self.latency_ms
        large = self.megabytes is not None and form.megabytes > self.megabytes
        return not (slow or large)


@dataclass(frozen=True)
class Comparison:
    """What `compare` came to; the best first, those that died last.

    Attributes:
        out: its directory.
        protocol: how all were trained, in a sentence.
        notes: what was decided on the way, in sentences.
        entries: one per candidate.
        frontier: (name, form) of those that none within the limits beats in both accuracy and images per second.
        advice: which to take under which need.
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
        """What `--json` prints."""
        facts = dataclasses.asdict(self)
        return {**facts, "out": str(self.out)}


def pareto(entries: Sequence[Entry], limits: Limits) -> tuple[tuple[str, str], ...]:
    """(name, form) of all that were trained to the end, keep within the limits, and that no other such beats in
    accuracy and speed at once."""
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


def advise(entries: Sequence[Entry], limits: Limits, frontier: Sequence[tuple[str, str]]) -> str:
    """One paragraph: which to take under which need. What is not told apart is not called better."""
    points = [
        (entry, form) for entry in entries for form in entry.forms if limits.allows(form) and not entry.stopped_after
    ]
    if not points:
        return "Nothing that was trained to the end keeps within the limits. Allow more, or compare smaller models."
    best, best_form = max(points, key=lambda point: point[1].top1)
    words = [f"For accuracy take {best.name} ({best_form.name}): {best_form.top1:.2f} %."]
    alike = [(entry, form) for entry, form in points if entry is best or not entry.is_told_apart]
    quick, quick_form = max(alike, key=lambda point: point[1].images_per_second)
    others = sorted({entry.name for entry, _ in alike} - {best.name})
    if others:
        words.append(f"No difference is shown between {best.name} and {', '.join(others)}.")
    words.append(
        f"For speed without a loss that shows take {quick.name} ({quick_form.name}):"
        f" {quick_form.images_per_second:.0f} images a second, {quick_form.latency_ms:.1f} ms for one,"
        f" {quick_form.top1:.2f} %."
    )
    fastest, fastest_form = max(points, key=lambda point: point[1].images_per_second)
    if fastest is not quick:
        words.append(
            f"Where speed is all, {fastest.name} ({fastest_form.name}): {fastest_form.images_per_second:.0f} images a"
            f" second at {fastest_form.top1:.2f} %."
        )
    small, small_form = min(alike, key=lambda point: point[1].megabytes)
    words.append(f"The smallest of the good ones is {small.name} ({small_form.name}), {small_form.megabytes:.1f} MB.")
    stopped = [entry.name for entry in entries if entry.stopped_after]
    if stopped:
        words.append(f"{', '.join(stopped)} stopped early, and could have come further.")
    scratch = [entry.name for entry in entries if not entry.weights and entry.error is None]
    if scratch and any(entry.weights for entry in entries):
        words.append(
            f"{', '.join(scratch)} {'was' if len(scratch) == 1 else 'were'} trained from scratch, for lack of public"
            " weights, while the others started from ImageNet: the comparison says which to take here, not which"
            " architecture is better."
        )
    return " ".join(words)
