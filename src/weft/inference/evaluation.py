"""`weft evaluate`: measure a model on labelled images."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.checkpoints.unknown import detector_of
from weft.data import Source
from weft.data.bit_depth import range_note
from weft.data.folder import check_outside
from weft.errors import DataError, UsageError
from weft.files import check_output, new_directory, write_file
from weft.inference.arguments import check_outside_images, check_unknown_images, image_files, range_advice
from weft.inference.error_gallery import explained_errors
from weft.inference.feature_map import drawn_of, feature_map
from weft.inference.features import classifier_inputs
from weft.inference.inputs import (
    evaluation_batches,
    images_of,
    name_of,
    open_labelled,
    recipe_of,
    select_split,
    settings_of,
)
from weft.inference.metrics import Evaluation, UnknownResult, accuracy_lines, confidence_lines, measure
from weft.inference.predictor import NO_DETECTOR, NonFiniteError, Predictor
from weft.inference.real_labels import check_listed, read_real_labels, real_score
from weft.inference.report import write_report
from weft.inference.torch_backend import Mirrored
from weft.inference.unknown import compare_scores, scores_of_files
from weft.intervals import accuracy_text
from weft.models.imagenet import recognized
from weft.progress import Work, obeys_quiet, say
from weft.recipes import Recipe
from weft.text import printable

SPLITS = ("auto", "train", "val", "test", "all")
SPLIT_NAMES = {
    "train": "the training images",
    "val": "the held-out images",
    "test": "the images of the test split",
    "all": "all images",
    "new": "the images that the model was not trained on",
}
CONTENTS = ("report.html", "evaluation.json")  # files that `evaluate` writes


@obeys_quiet
def evaluate(
    run: str | Path,
    data: str | Path,
    *,
    split: str = "auto",
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    follow_links: bool | None = None,
    tta: bool = False,
    real_labels: str | Path | None = None,
    reject_at_error: float | None = None,
    unknown_images: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Evaluation:
    """Measure a model on labelled images. Classes of data and model are matched by name.

    The classes of a public model are those of ImageNet: class folders may be WordNet ids, ImageNet names or numbers. If
    the data have some of these classes, the results are over them alone, as for ImageNet-R (arXiv 2006.16241), and
    `all_classes` is the accuracy among all outputs.

    Args:
        run: a run directory, whose best model is loaded, a model directory, an export, or the name of a public model.
        data: a folder of images, any other source that `weft.data.open_data` reads, or 'digits'.
        split: `train`, `val`, `test`, `all` or `auto`: the validation set if the dataset defines one, else the images
            that the model was not trained on, which its run directory lists.
        batch_size, img_size, device, precision, workers, limit, max_pixels, follow_links: as in `train`.
        tta: test-time augmentation: average the logits of each image and of its mirror image.
        real_labels: also score by ReaL labels (arXiv 2006.07159), of which an image has several or none: `real.json`
            for ImageNet's validation images, or a JSON object from image names to lists of class numbers.
        reject_at_error: also score the images above the confidence at which this share of the held-out images of the
            training was classified wrongly, from 0 to 1.
        unknown_images: a folder of images that show none of the classes: also measure how well the detector of
            unknown images separates them from the evaluated ones.
        out: directory for the report and evaluation.json, whose `split` says what was measured: `train`, `val`, `test`,
            `all`, or `new` (images that the model was not trained on, some of which its training did not have). None
            to write no files.
        force: replace an existing evaluation.
        quiet: print no progress and no notes.

    Raises:
        UsageError: a setting that is not supported, or `out` is taken.
        DataError: the data cannot be read, or has classes that the model does not know.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    if split not in SPLITS:
        raise UsageError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    settings = settings_of(batch_size, img_size, device, precision, workers, limit, follow_links, max_pixels)
    if unknown_images is not None:
        check_unknown_images(unknown_images, settings.data.max_pixels)
    if out is not None:
        check_outside(out, data)
        check_outside_images(out, unknown_images or ())
        check_output(Path(out), CONTENTS, force=force)
    predictor = Predictor.load(
        run,
        img_size=settings.img_size,
        device=settings.device,
        precision=settings.precision,
        fold=False,
        mirror=tta,
        max_pixels=settings.data.max_pixels,
    )
    if unknown_images is not None and detector_of(predictor.source_model) is None:
        raise UsageError(NO_DETECTOR)
    rejection = None if reject_at_error is None else predictor.reject_at(reject_at_error)
    trained_with = recipe_of(Path(run))
    num_classes = len(predictor.classes)
    labels = None if real_labels is None else read_real_labels(real_labels, num_classes)
    splits = open_labelled(data, predictor.label_names, num_classes, settings, trained_with, test=split == "test")
    images = images_of(Path(run))
    split, source, excluded, trained_on = select_split(splits, split, data, trained_with, images)
    if labels is not None:
        check_listed(labels, [name_of(source, place) for place in range(len(source))])
    among = _classes_there(source, predictor.label_names)
    if among is not None:
        say(
            f"The data have {len(among):,} of the model's {num_classes:,} classes; results are over these alone,"
            " except the top-1 among all classes."
        )
    say(f"Evaluating {SPLIT_NAMES[split]}: {len(source):,} images.")
    value_range = predictor.preprocessing.value_range
    range_text = range_note(splits.values, value_range, range_advice(value_range))
    for note in filter(None, (range_text, predictor.preprocessing.note(splits.sizes))):
        say(note)
    if trained_on and split != "train":
        say(f"The model was trained on {trained_on:,} of these images, so the accuracy is too high.")
    is_unknown = trained_on is None and trained_with is None and recognized(predictor.label_names) is None
    if is_unknown and split == "all":
        say(
            "This model is not in its run directory, so which images it was trained on is not known. If it was"
            " trained on some of these, the accuracy is too high: pass the run, or --split val."
        )

    drawn = drawn_of(0 if out is None else len(source))
    result, features = _measured(predictor, splits.classes, source, settings, among, excluded, drawn)
    if rejection is not None:
        result = dataclasses.replace(result, accepted=result.above(rejection.threshold))
    if unknown_images is not None:
        result = dataclasses.replace(result, unknown=_unknown(predictor, source, unknown_images, settings))
    if labels is not None:
        predicted = result.predicted if among is None else np.asarray(among)[result.predicted]
        result = dataclasses.replace(result, real=real_score(labels, result.keys, predicted))
    if out is not None:
        arguments: dict[str, object] = {"model": str(run), "data": str(data), "split": split, "tta": tta}
        _write(Path(out), arguments, result, predictor, source, features, force=force)
    return result


def _measured(
    predictor: Predictor,
    classes: list[str],
    source: Source,
    settings: Recipe,
    among: list[int] | None,
    excluded: Sequence[tuple[str, str]],
    drawn: np.ndarray,
) -> tuple[Evaluation, np.ndarray]:
    """Measure the model on the images of `source`; also return the features (drawn features) of those in `drawn`.

    Raises:
        NonFiniteError: an output is not finite.
    """
    batches = evaluation_batches(source, predictor.source_model, int(settings.batch_size), settings.workers)
    is_drawn = np.isin(np.arange(len(source)), drawn)
    network = predictor.source_model
    passes = 2 if isinstance(predictor.model, Mirrored) else 1
    features: list[np.ndarray] = []
    with (
        classifier_inputs(network) if len(drawn) else contextlib.nullcontext([]) as inputs,
        Work("evaluating", len(source)) as work,
    ):

        def on_batch(count: int) -> None:
            nonlocal is_drawn
            if inputs:
                of_images = inputs[: len(inputs) // passes]  # without those of mirror images
                features.append(np.concatenate([part.numpy() for part in of_images], axis=1)[is_drawn[:count]])
            is_drawn = is_drawn[count:]
            inputs.clear()
            work.advance(count)

        result = measure(
            predictor.model,
            batches,
            classes,
            predictor.runtime,
            among=among,
            temperature=predictor.temperature,
            key_of=lambda place: name_of(source, place),
            excluded=excluded,
            on_batch=on_batch,
        )
    if not math.isfinite(result.loss):
        raise NonFiniteError
    return result, np.concatenate(features) if features else np.empty((0, 0), np.float32)


def _write(
    out: Path,
    arguments: dict[str, object],
    result: Evaluation,
    predictor: Predictor,
    source: Source,
    features: np.ndarray,
    *,
    force: bool,
) -> None:
    """Write the report, its figures and evaluation.json.

    Args:
        out: directory.
        arguments: of `evaluate`, as in evaluation.json: model, data, split and tta.
        result: of the evaluation.
        predictor, source: model and evaluated images.
        features: of the images of the feature map.
        force: replace an existing evaluation.
    """
    model, data, split = (str(arguments[key]) for key in ("model", "data", "split"))
    summary = [
        ("model", model),
        ("data", f"{data}, {SPLIT_NAMES[split]}"),
        ("images", f"{result.count}, {len(result.excluded)} excluded"),
        *accuracy_lines(result),
        *confidence_lines(result),
    ]
    if arguments["tta"]:
        summary.append(("test-time augmentation", "logits averaged with those of mirror images"))
    if result.real is not None:
        summary.append(("ReaL top-1", accuracy_text(result.real.top1, result.real.images, "images with a ReaL label")))
    title = f"{Path(model).resolve().name} on {data}"
    errors = explained_errors(predictor.source_model, source, result.mistakes)
    features_drawn = feature_map(features, result, drawn_of(result.count))
    with new_directory(out, CONTENTS, force=force) as folder:
        write_report(folder, title, summary, result, errors=errors, features=features_drawn)
        write_file(folder / "evaluation.json", json.dumps(arguments | result.as_dict(), indent=2) + "\n")


def _unknown(predictor: Predictor, source: Source, unknown_images: str | Path, settings: Recipe) -> UnknownResult:
    """Compare the scores of the evaluated images with those of images that show none of the classes."""
    folded = Predictor(predictor.source_model, runtime=predictor.runtime, max_pixels=predictor.max_pixels)
    detector = folded.detector
    assert detector is not None
    assert detector.threshold is not None
    batch_size = int(settings.batch_size)
    batches = evaluation_batches(source, predictor.source_model, batch_size, settings.workers)
    with Work("other images", len(image_files(unknown_images))) as work:
        others = scores_of_files(folded, unknown_images, batch_size, work.advance)
    known = np.concatenate([folded.scores(images) for images, _ in batches])
    return compare_scores(known, others, detector.threshold.value)


def _classes_there(source: Source, classes: Sequence[str] | None) -> list[int] | None:
    """Return the outputs of a public model whose classes have images, ascending; None: all, or another model.

    Raises:
        DataError: all images are of one class.
    """
    there = sorted(set(source.labels))
    if classes is None or recognized(classes) is None or len(there) in (0, len(classes)):
        return None
    if len(there) == 1:
        raise DataError(
            "Accuracy over the ImageNet classes of the data needs images of at least two classes; all are of"
            f" '{printable(classes[there[0]])}'. Add a folder of images of another class."
        )
    return there
