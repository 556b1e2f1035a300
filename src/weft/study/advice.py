"""Pareto frontier and recommendation of a comparison. Models without a significant difference are not ranked."""

from __future__ import annotations

from collections.abc import Sequence

from weft.study.result import Form, Limits, Row


def _points(rows: Sequence[Row], limits: Limits) -> list[tuple[Row, Form]]:
    """Return the forms of finished runs within the limits."""
    return [(row, form) for row in rows for form in row.forms if limits.allows(form) and not row.stopped_after]


def pareto(rows: Sequence[Row], limits: Limits) -> tuple[tuple[str, str], ...]:
    """Return (name, form) of the Pareto frontier of accuracy and throughput: finished runs, within the limits."""
    points = _points(rows, limits)

    def is_beaten(form: Form) -> bool:
        return any(
            other.top1 >= form.top1
            and other.images_per_second >= form.images_per_second
            and (other.top1, other.images_per_second) != (form.top1, form.images_per_second)
            for _, other in points
        )

    return tuple((row.name, form.name) for row, form in points if not is_beaten(form))


def advise(rows: Sequence[Row], limits: Limits) -> str:
    """Recommend a model for each need, as one paragraph. Models without a significant difference are not ranked."""
    points = _points(rows, limits)
    if not points:
        return "No finished model is within the limits. Raise the limits, or compare smaller models."
    best, best_form = max(points, key=lambda point: point[1].top1)
    sentences = [f"For accuracy, use {best.name} ({best_form.name}): {best_form.top1:.2f} %."]
    alike = [(row, form) for row, form in points if row is best or not row.is_worse]
    quick, quick_form = max(alike, key=lambda point: point[1].images_per_second)
    others = sorted({row.name for row, _ in alike} - {best.name})
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
    stopped = [row.name for row in rows if row.stopped_after]
    if stopped:
        sentences.append(f"{', '.join(stopped)} stopped early; longer training could change the ranking.")
    scratch = [row.name for row in rows if not row.weights and row.top1]
    if scratch and any(row.weights for row in rows):
        sentences.append(
            f"{', '.join(scratch)} {'was' if len(scratch) == 1 else 'were'} trained from scratch, since there are"
            " no public weights, while the others started from ImageNet: the comparison shows which to use here, not"
            " which architecture is better."
        )
    return " ".join(sentences)
