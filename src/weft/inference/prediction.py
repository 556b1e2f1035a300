"""`weft predict`: classify image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoints.resolve import check_model
from weft.data import BadImage
from weft.data.preprocessing import Pixels
from weft.inference.arguments import InferenceOptions, check_top_k, image_files, value_note
from weft.inference.image_card import image_card
from weft.inference.prediction_files import check_prediction_output, write_predictions
from weft.inference.predictor import Predictor
from weft.progress import Work, obeys_quiet, say
from weft.report import markup
from weft.report.notebook import ImageList, described
from weft.text import printable


@dataclass(frozen=True)
class FilePrediction:
    """Prediction for one image file: the most probable classes, or the reason why there is none.

    Attributes:
        image: path of the file, printable.
        top: (class, probability), most probable first.
        error: message, if the file cannot be read.
        reason: short code of the error, such as `truncated`.
        rejected: whether the most probable class is below the threshold of `reject_at_error`; None without one.
        unknown: whether the image resembles no training image; None if the model cannot tell.
    """

    image: str
    top: list[tuple[str, float]]
    error: str | None = None
    reason: str | None = None
    rejected: bool | None = None
    unknown: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        if self.error is not None:
            return {"image": self.image, "error": self.error, "reason": self.reason}
        top = [{"class": name, "probability": share} for name, share in self.top]
        rejected = {} if self.rejected is None else {"rejected": self.rejected}
        unknown = {} if self.unknown is None else {"unknown": self.unknown}
        return {"image": self.image, "top": top, **rejected, **unknown}

    def __repr__(self) -> str:
        """Return the image and its classes in one line."""
        top = ", ".join(f"{name!r} {100 * share:.1f} %" for name, share in self.top)
        values = [("image", repr(self.image)), ("top", None if self.error is not None else f"[{top}]")]
        values += [("error", self.error and repr(self.error)), ("rejected", self.rejected), ("unknown", self.unknown)]
        return described("FilePrediction", values)

    def _repr_html_(self) -> str:
        return markup.fragment(markup.gallery([self.card()]))

    def card(self) -> markup.Card:
        """Return the image and its classes, for a gallery."""
        if self.error is not None:
            return markup.Card([], [self.error], self.image)
        lines = [f"{name}, {100 * share:.1f} %" for name, share in self.top]
        lines += ["rejected: the confidence is below the threshold"] if self.rejected else []
        lines += ["unknown: the image resembles no training image"] if self.unknown else []
        return image_card(self.image, lines)


@obeys_quiet
def predict(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top_k: int = 5,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    tta: bool = False,
    reject_at_error: float | None = None,
    out: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> list[FilePrediction]:
    """Classify image files.

    Args:
        run: a run directory, whose best model is loaded, a model directory, an export, or the name of a public model.
        images: files, folders (with all images below them) or patterns such as 'x/*.png'.
        top_k: number of classes per image; at most the number that the model has.
        batch_size, img_size, device, precision, limit, max_pixels: as in `train`.
        tta: test-time augmentation: average the logits of each image and of its mirror image.
        reject_at_error: reject predictions below the confidence at which this share of the held-out images was
            classified wrongly, from 0 to 1; None rejects none.
        out: a file that ends in .csv, with a row per class of each image; or a directory, into which the images are
            copied, with one folder per class, `unknown` for images that resemble no training image, `rejected` for
            those below the threshold, and predictions.csv. The images themselves are only read. None to write no
            files.
        force: replace an existing file, or directory of copies.
        quiet: print no progress and no notes.

    Returns:
        One prediction per image, in the order given; with `error` for a file that cannot be read. A notebook shows the
        list, and a slice of it, as a gallery.

    Raises:
        UsageError: a setting that is not supported, no threshold for `reject_at_error`, or `out` is taken.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    check_top_k(top_k)
    options = InferenceOptions.of(locals())
    check_model(run)
    paths = image_files(images)[: options.limit]
    if out is not None:
        check_prediction_output(Path(out), images, paths, force=force)
    if not any(Path(path).exists() for path in paths):  # nothing to load the model for, which can take seconds
        missing = (BadImage(path, "missing") for path in paths)
        return ImageList(FilePrediction(printable(bad.name), [], str(bad), bad.reason) for bad in missing)
    predictor = Predictor.load(
        run,
        img_size=options.img_size,
        device=options.device,
        precision=options.precision,
        mirror=tta,
        max_pixels=options.max_pixels,
    )
    threshold = None
    if reject_at_error is not None:
        rejection = predictor.reject_at(reject_at_error)
        threshold = rejection.threshold
        say(str(rejection))
    predictions = ImageList[FilePrediction]()
    if note := value_note(paths, predictor.preprocessing.value_range, predictor.max_pixels):
        say(note)
    with Work("classifying", len(paths)) as work:
        for batch in prepared_batches(predictor, paths, options.batch_size):
            rows = iter(predictor.predict([item for _, item in batch if isinstance(item, Pixels)]))
            for path, item in batch:
                if isinstance(item, BadImage):
                    predictions.append(FilePrediction(printable(path), [], str(item), item.reason))
                else:
                    row = next(rows)
                    top = row.top(predictor.classes, top_k)
                    is_rejected = None if threshold is None else top[0][1] < threshold
                    predictions.append(FilePrediction(printable(path), top, None, None, is_rejected, row.unknown))
            work.advance(len(batch))
    if out is not None:
        write_predictions(Path(out), paths, predictions, force=force)
    return predictions


def prepared_batches(
    predictor: Predictor, paths: Sequence[str], batch_size: int
) -> Iterator[list[tuple[str, Pixels | BadImage]]]:
    """Read and resize image files in batches; yields each path with the image, or with why it cannot be used."""
    for start in range(0, len(paths), batch_size):
        yield [(path, _prepared(predictor, path)) for path in paths[start : start + batch_size]]


def _prepared(predictor: Predictor, path: str) -> Pixels | BadImage:
    try:
        return predictor.prepare(Path(path))
    except BadImage as error:
        return BadImage(error.name, error.reason, "it is a folder without images") if Path(path).is_dir() else error
