"""Verification of an export against its model: the same images, logits and top-1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.data import ImageDataset, Splits, eval_transform, make_loader
from weft.data.loader import ImageLoader
from weft.deploy.runtimes import Infer
from weft.errors import VerificationError
from weft.progress import Work
from weft.report import markup
from weft.report.intervals import Estimate, difference_of

# of every 10 images, batches of 2, 1 and 7 are compared: a graph that is specialised to one size fails for another
CHUNK, CUTS = 10, (2, 3)
# maximum difference of logits, relative to the largest logit; int8 is verified by its top-1
TOLERANCE = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.1}
MIN_AGREEMENT = 99.9  # percent of images with equal top-1, in fp32
RANDOM_IMAGES = 60
MIN_LOGIT = 1e-6  # differences are relative to at least this: an untrained head can have logits of 0


@dataclass(frozen=True)
class ConsideredExport:
    """An export that format auto considered.

    Attributes:
        format, precision: of the export.
        refused: reason why it was not built, or failed its verification; None if it passed.
        seconds: median time of a batch, by batch size; empty if it was refused.
        difference: largest difference of logits from the model, relative to the largest logit; None if refused.
        top1: accuracy on the held-out images in percent; None without labelled images.
    """

    format: str
    precision: str
    refused: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    difference: float | None = None
    top1: float | None = None


@dataclass(frozen=True)
class ExportReport:
    """Result of an export: files, and differences between the export and the model.

    Attributes:
        out: the directory or file.
        format, precision: of the export.
        compared_on: description of the images that were compared.
        images: number of these images.
        max_difference, mean_difference: of the logits.
        max_logit: largest absolute logit of the model.
        agreement: percent of images with the same top-1 class.
        top1, top1_model: accuracy of the export and of the model in percent; None for random images.
        bytes: size of the files.
        drop: top-1 of the model minus that of the export in points, with its 95 % interval; None for random images.
        candidates: all exports that format `auto` considered, with their times; this one is the fastest.
    """

    out: str
    format: str
    precision: str
    compared_on: str
    images: int
    max_difference: float
    mean_difference: float
    max_logit: float
    agreement: float
    top1: float | None
    top1_model: float | None
    bytes: int
    drop: Estimate | None = None
    candidates: tuple[ConsideredExport, ...] = ()

    @property
    def relative_difference(self) -> float:
        """Largest difference of logits, relative to the largest logit of the model."""
        return self.max_difference / max(self.max_logit, MIN_LOGIT)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON values."""
        values = asdict(self) | {"drop": None if self.drop is None else self.drop._asdict()}
        if not self.candidates:
            del values["candidates"]
        return values

    def _repr_html_(self) -> str:
        largest = f"{self.max_difference:.2g}, of logits up to {self.max_logit:.2g}"
        rows = [
            ("format", f"{self.format}, {self.precision}, {self.bytes / 1e6:.1f} MB"),
            ("compared on", f"{self.images:,} {self.compared_on}"),
            ("largest difference", largest),
            ("same class", f"{self.agreement:.2f} % of the images"),
        ]
        if self.top1 is not None and self.top1_model is not None:
            rows.append(("top-1", f"{self.top1:.2f} %, of the model {self.top1_model:.2f} %"))
        return markup.fragment(markup.table(("export", ""), [*rows, ("files", self.out)]))

    def drop_text(self, max_drop: float) -> str:
        """Return what the images show about the drop of top-1, as a sentence; empty for random images."""
        if self.drop is None:
            return ""
        text = (
            f"drop of top-1 on {self.images:,} {self.compared_on}: {self.drop.value:.2f} points (95 % CI"
            f" {self.drop.low:.2f} to {self.drop.high:.2f})"
        )
        if self.drop.high <= max_drop:
            return f"{text}, within {max_drop:g} points"
        return f"{text}; too few images to show that it is at most {max_drop:g} points"


class Reference:
    """Images, labels, and the logits of the model in float32, which are computed once for all exports.

    Args:
        model: in evaluation mode.
        data: labelled images, of which the held-out ones are used; None for random images.
        size: (channels, height, width) of the images.
    """

    def __init__(self, model: nn.Module, data: Splits | None, size: tuple[int, ...]) -> None:
        self.model, self.data, self.size = model, data, size
        self._logits: list[np.ndarray] = []  # of the batches in order

    def compare(
        self, infer: Infer, out: Path, format: str, precision: str, num_bytes: int, progress: Work
    ) -> ExportReport:
        """Compare an export with the model on the same images, in batches of several sizes.

        Raises:
            VerificationError: the logits have another shape.
        """
        exported, classes = [], []
        progress.begin("checking", RANDOM_IMAGES if self.data is None else len(self.data.val))
        for number, (images, labels) in enumerate(self._batches()):
            if number == len(self._logits):
                self._logits.append(self._inferred(images))
            exported.append(np.asarray(infer(np.ascontiguousarray(images.numpy())), dtype=np.float32))
            classes.append(labels.numpy())
            progress.advance(len(images))
        expected, actual, targets = (np.concatenate(parts) for parts in (self._logits, exported, classes))
        if expected.shape != actual.shape:
            raise VerificationError(
                f"The logits of the export must have the shape of those of the model, {expected.shape}; got"
                f" {actual.shape}. Nothing was written."
            )
        difference = np.abs(expected - actual)
        top, top_model = actual.argmax(1), expected.argmax(1)
        is_labelled, right, right_model = self.data is not None, top == targets, top_model == targets
        lost, gained = int((right_model & ~right).sum()), int((right & ~right_model).sum())
        return ExportReport(
            out=str(out),
            format=format,
            precision=precision,
            compared_on="held-out images" if is_labelled else "random images",
            images=len(expected),
            max_difference=float(difference.max()),
            mean_difference=float(difference.mean()),
            max_logit=float(np.abs(expected).max()),
            agreement=100 * float((top == top_model).mean()),
            top1=100 * float(right.mean()) if is_labelled else None,
            top1_model=100 * float(right_model.mean()) if is_labelled else None,
            bytes=num_bytes,
            drop=difference_of(lost, gained, len(right)) if is_labelled else None,
        )

    def _inferred(self, images: Tensor) -> np.ndarray:
        with torch.inference_mode():
            return self.model(images.to(next(self.model.parameters()).device)).float().cpu().numpy()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (b c h w) and their labels (b)."""
        chunks: Iterable[tuple[Tensor, Tensor]]
        if self.data is None:
            images = torch.randn(RANDOM_IMAGES, *self.size, generator=torch.Generator().manual_seed(0))
            chunks = ((part, torch.zeros(len(part), dtype=torch.int64)) for part in images.split(CHUNK))
        else:
            chunks = labelled_batches(self.data, "val", self.model, CHUNK)
        for images, labels in chunks:
            for batch in zip(images.tensor_split(CUTS), labels.tensor_split(CUTS), strict=True):
                if len(batch[0]):
                    yield batch


def relative_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of logits, relative to the largest expected logit."""
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), MIN_LOGIT))


def verify(report: ExportReport, max_drop: float) -> None:
    """Raise a VerificationError if the export differs too much from the model.

    A loss of one image is allowed: a few images cannot show a smaller one.
    """
    if not np.isfinite(report.max_difference):
        raise VerificationError(
            f"The logits of the {report.format} export must be finite; they are not. Nothing was written."
        )
    if report.relative_difference > TOLERANCE.get(report.precision, math.inf):
        raise VerificationError(
            f"The logits of the {report.format} export in {report.precision} must differ from those of the model by at"
            f" most {TOLERANCE[report.precision]:g} of the largest logit; they differ by"
            f" {report.relative_difference:.2g}. Nothing was written."
        )
    if report.precision == "fp32" and report.agreement < MIN_AGREEMENT:
        raise VerificationError(
            f"The {report.format} export must predict the class that the model predicts for {MIN_AGREEMENT} % of the"
            f" {report.compared_on}; it does for {report.agreement:.2f} %. Nothing was written."
        )
    if report.drop is not None and report.drop.value > max(max_drop, 100 / report.images) + 1e-9:
        raise VerificationError(
            f"The {report.precision} export must lose at most {max_drop:g} points of top-1, or one image; on"
            f" {report.images} held-out images the model has {report.top1_model:.2f} % and the export"
            f" {report.top1:.2f} %, a drop of {report.drop.value:.2f} points (95 % CI {report.drop.low:.2f} to"
            f" {report.drop.high:.2f}). Nothing was written. Calibrate on more images, use bf16, or raise --max-drop."
        )


def labelled_batches(data: Splits, split: str, model: nn.Module, batch_size: int) -> ImageLoader:
    """Return a loader of images with the preprocessing of evaluation; training images are in random order."""
    network: Any = model
    transform = eval_transform(network.pretrained_cfg)
    dataset = ImageDataset(getattr(data, split), transform, value_range=transform.value_range)
    return make_loader(dataset, batch_size, shuffle=split == "train")
