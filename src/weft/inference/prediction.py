"""`weft predict`: classify image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.checkpoints.resolve import check_model
from weft.data import BadImage
from weft.data.preprocessing import Pixels
from weft.inference.arguments import InferenceOptions, image_files, note_values
from weft.inference.prediction_files import FilePrediction, check_prediction_output, write_predictions
from weft.inference.predictor import Predictor
from weft.progress import Work, obeys_quiet, say
from weft.recipes.checks import check_argument
from weft.recipes.schema import Positive
from weft.report.notebook import ImageList
from weft.text import printable


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
            files; none are written either if no image can be read.
        force: replace an existing file, or directory that holds nothing but the copies of its predictions.csv.
        quiet: print no progress and no notes.

    Returns:
        One prediction per image, in the order given; with `error` for a file that cannot be read. A notebook shows the
        list, and a slice of it, as a gallery.

    Raises:
        UsageError: a setting that is not supported, no threshold for `reject_at_error`, or `out` is taken.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    check_argument("top_k", top_k, Positive)
    options = InferenceOptions.of(locals())
    check_model(run)
    paths = image_files(images)[: options.limit]
    if out is not None:
        check_prediction_output(Path(out), images, paths, force=force)
    if not any(Path(path).exists() for path in paths):  # nothing to load the model for, which can take seconds
        missing = (BadImage(path, "missing") for path in paths)
        predictions = ImageList(FilePrediction(printable(bad.name), [], str(bad), bad.reason) for bad in missing)
        if out is not None:
            write_predictions(Path(out), paths, predictions, force=force)
        return predictions
    predictor = Predictor.load(run, mirror=tta, **options.of_model)
    threshold = None
    if reject_at_error is not None:
        rejection = predictor.reject_at(reject_at_error)
        threshold = rejection.threshold
        say(str(rejection))
    predictions = ImageList[FilePrediction]()
    note_values(paths, predictor.preprocessing.value_range, predictor.max_pixels)
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
