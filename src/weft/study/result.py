"""Result of a study or comparison: one row per variant or model, and the whole."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.progress import clock
from weft.report import markup
from weft.report.intervals import Estimate, interval_text
from weft.report.notebook import described
from weft.study.plan import Study

MIN_P = 1e-6  # smaller p-values are not printed

VARIANTS = (
    *("variant", "paper, top-1 %", "paper, effect", "top-1 % (95 % CI)", "effect (95 % CI)"),
    *("result", "parameters", "MACs"),
)
MODELS = (
    *("model", "initial weights", "top-1 % (95 % CI)", "difference to best (95 % CI)", "McNemar p", "result"),
    *("parameters", "MACs", "training time", "peak memory"),
)
DEPLOYED = ("model", "form", "fastest runtime", "top-1 %", "latency, ms", "images/s", "MB", "Pareto frontier")
FAILED = "Failed runs"
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows


@dataclass(frozen=True)
class Form:
    """A deployable form of a trained model, with its fastest runtime.

    Attributes:
        name: `float` (the fastest of torch and OpenVINO, fp32 and bf16) or `int8`.
        way: runtime and precision, such as `openvino bf16`.
        top1: accuracy of this form on the validation images, in percent.
        latency_ms: median latency of one image.
        images_per_second: highest throughput, of batches of 1 and 32.
        megabytes: size of its file.
    """

    name: str
    way: str
    top1: float
    latency_ms: float
    images_per_second: float
    megabytes: float


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
class Row:
    """Result of one variant of a study, or of one model of a comparison.

    Attributes:
        name, against: names of the variant and of the one that it is compared with, if any: the baseline of a study,
            the best model of a comparison.
        top1: top-1 accuracy in percent, one per seed that finished.
        mean: over the seeds; None if none finished.
        effect: difference to the compared variant in points, on the same images or seed by seed; None without one.
        p_value: McNemar's test against the compared variant, by the first seed.
        verdict: whether the sign of the effect is significant.
        params, macs: of the network.
        seconds: of its training runs.
        curve: (epoch, held-out top-1 in percent, mean over the seeds); empty for a variant that shares its runs with
            an earlier one.
        errors: (seed, reason) of runs that failed.
        paper, paper_effect: the paper's top-1 in percent, and its points above the same variant there.
        model: model name.
        weights: name of the public weights that it started from; '' if it was trained from scratch.
        stopped_after: epoch at which halving stopped it, or None.
        peak_mib: peak memory of a training run.
        forms: deployable forms, with accuracy and speed.
    """

    name: str
    against: str | None = None
    top1: tuple[float, ...] = ()
    mean: Estimate | None = None
    effect: Estimate | None = None
    p_value: float | None = None
    verdict: str = ""
    params: int = 0
    macs: int = 0
    seconds: float = 0.0
    curve: tuple[tuple[int, float], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    paper: float | None = None
    paper_effect: float | None = None
    model: str = ""
    weights: str = ""
    stopped_after: int | None = None
    peak_mib: int = 0
    forms: tuple[Form, ...] = ()

    @property
    def is_worse(self) -> bool:
        """Whether it is significantly less accurate than the one that it is compared with."""
        return self.effect is not None and self.effect.high < 0

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON values; the ends of an infinite interval are None."""
        record = dataclasses.asdict(self)
        for key in ("mean", "effect"):
            if record[key] is not None:
                record[key] = [value if math.isfinite(value) else None for value in record[key]]
        return record


@dataclass(frozen=True)
class ExperimentResult:
    """Result of `run_study` and of `compare`.

    Attributes:
        out: directory.
        study: what was run; for a comparison, a study whose variants are the models.
        rows: one per variant, in the order of the study; the models of a comparison with the best first, failed ones
            last.
        seconds: of all training runs together.
        notes: decisions, as sentences.
        epochs: of a complete run of a comparison; None for a study.
        protocol: training protocol of a comparison, as a sentence.
        limits: of the recommendation of a comparison; None for a study.
        frontier: (name, form) on the Pareto frontier of accuracy and throughput, within the limits.
        advice: recommendation for each need.
    """

    out: Path
    study: Study
    scale: str
    data: str
    seeds: int
    rows: tuple[Row, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    epochs: int | None = None
    protocol: str = ""
    limits: Limits | None = None
    frontier: tuple[tuple[str, str], ...] = ()
    advice: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the study or the caller adds to the base recipe in every variant."""
        return self.study.scales[self.scale].set

    @property
    def failed(self) -> list[tuple[str, int, str]]:
        """Name, seed and reason of the runs that failed."""
        return [(row.name, seed, reason) for row in self.rows for seed, reason in row.errors]

    def tables(self) -> dict[str, Table]:
        """Return header and rows of the tables of the report, by their heading."""
        heading, header = ("Variants", VARIANTS) if self.limits is None else ("Training", MODELS)
        cells = [_cells(row) for row in self.rows if row.top1 or self.limits is None]
        tables: dict[str, Table] = {heading: (header, [tuple(row[name] for name in header) for row in cells])}
        if self.limits is not None:
            tables["Inference on this machine"] = DEPLOYED, self._deployed(self.limits)
        if self.failed:
            failed = [(name, str(seed), reason) for name, seed, reason in self.failed]
            tables[FAILED] = (header[0], "seed", "reason"), failed
        return tables

    def _deployed(self, limits: Limits) -> list[tuple[str, ...]]:
        outside = {True: "", False: "exceeds the limits"}
        return [
            (
                row.name,
                form.name,
                form.way,
                f"{form.top1:.2f}",
                f"{form.latency_ms:.2f}",
                f"{form.images_per_second:,.0f}",
                f"{form.megabytes:.1f}",
                "yes" if (row.name, form.name) in self.frontier else outside[limits.allows(form)],
            )
            for row in self.rows
            for form in row.forms
        ]

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
            "notes": list(self.notes),
            "epochs": self.epochs,
            "protocol": self.protocol,
            "limits": None if self.limits is None else dataclasses.asdict(self.limits),
            "frontier": [list(point) for point in self.frontier],
            "advice": self.advice,
            "out": str(self.out),
            "rows": [row.as_dict() for row in self.rows],
        }

    def __repr__(self) -> str:
        """Return the main values in one line."""
        values = [("study", repr(self.study.name)), ("scale", repr(self.scale)), ("data", repr(self.data))]
        values += [("rows", len(self.rows)), ("seeds", self.seeds), ("out", repr(str(self.out)))]
        return described("ExperimentResult", values)

    def _repr_html_(self) -> str:
        """Return the claim or recommendation, and the tables of the report."""
        text = self.advice or f"{self.study.title}. Claim: {self.study.claim}"
        parts = [markup.element("p", text, dir="auto"), *(markup.table(*table) for table in self.tables().values())]
        return markup.fragment("".join([*parts, markup.element("p", f"Report: {self.out / 'report.html'}")]))


StudyResult = Comparison = ExperimentResult  # names of the results of `run_study` and `compare`


def _cells(row: Row) -> dict[str, str]:
    """Return the cells of a row by their header."""
    effect = interval_text(row.effect, signed=True)
    return {
        "variant": row.name,
        "model": row.name if row.model in ("", row.name) else f"{row.name} ({row.model})",
        "initial weights": row.weights or "scratch",
        "paper, top-1 %": "" if row.paper is None else f"{row.paper:g}",
        "paper, effect": "" if row.paper_effect is None else f"{row.paper_effect:+g}",
        "top-1 % (95 % CI)": interval_text(row.mean),
        "effect (95 % CI)": effect,
        "difference to best (95 % CI)": effect,
        "McNemar p": "" if row.p_value is None else f"{row.p_value:.2g}" if row.p_value >= MIN_P else f"< {MIN_P:g}",
        "result": row.verdict,
        "parameters": f"{row.params:,}" if row.params else "",
        "MACs": f"{row.macs / 1e6:,.1f}M" if row.macs else "",
        "training time": clock(row.seconds),
        "peak memory": f"{row.peak_mib:,} MiB",
    }
