"""`weft evaluate`: measure a model on labelled images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoints.unknown import Threshold
from weft.data import Source, Splits
from weft.data.bit_depth import range_note
from weft.data.fingerprint import Fingerprint
from weft.data.folder import check_outside
from weft.data.open import check_exists
from weft.errors import DataError, UsageError
from weft.files import check_output, new_directory, write_file
from weft.inference.arguments import (
    InferenceOptions,
    check_outside_images,
    check_unknown_images,
    image_files,
    range_advice,
    recipe_of,
)
from weft.inference.inputs import Selected, images_of, name_of, open_labelled, select_split, series_of
from weft.inference.metrics import Evaluation
from weft.inference.predictor import NO_DETECTOR, Predictor
from weft.inference.real_labels import RealLabels
from weft.inference.unknown import compare_scores, scores_of_files
from weft.models.imagenet import recognized
from weft.progress import Work, loading, obeys_quiet, say
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
    workers: int | str | None = None,
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
    `top1_of_all` is the top-1 among all outputs.

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
            `all`, or `new` (images that the model was not trained on, some of which its training did not have); the
            other keys are those of `Evaluation.as_dict`. None to write no files.
        force: replace an existing evaluation.
        quiet: print no progress and no notes.

    Raises:
        UsageError: a setting that is not supported, or `out` is taken.
        DataError: the data cannot be read, or has classes that the model does not know.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    if split not in SPLITS:
        raise UsageError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    options = InferenceOptions.of(locals())
    if out is not None:
        check_outside(out, data)
        check_outside_images(out, unknown_images or ())
        check_output(Path(out), CONTENTS, force=force)
    if unknown_images is not None:
        check_unknown_images(unknown_images, options.max_pixels)
    labels = None if real_labels is None else RealLabels(real_labels)
    check_exists(str(data))
    predictor = Predictor.load(run, fold=False, mirror=tta, **options.of_model)
    if unknown_images is not None and predictor.model.info.detector is None:
        raise UsageError(NO_DETECTOR)
    threshold = None if reject_at_error is None else predictor.reject_at(reject_at_error).threshold
    with loading():  # for an export, which has not needed it so far
        from weft.inference.measurement import measured

    trained_with, num_classes = recipe_of(Path(run)), len(predictor.classes)
    names = predictor.model.info.label_names
    images = images_of(Path(run))
    series = series_of(Path(run))
    splits = open_labelled(data, names, num_classes, options, trained_with, split=split, images=images, series=series)
    selected = select_split(splits, split, data, trained_with, images)
    source = selected.source
    if labels is not None:
        labels.check([name_of(source, place) for place in range(len(source))], num_classes)
    among = _classes_there(source, names)
    for text in filter(None, _notes(predictor, splits, selected, among, trained_with, images)):
        say(text)

    result, features = measured(predictor, source, splits.classes, options, among, with_features=out is not None)
    outputs = result.predicted if among is None else np.asarray(among)[result.predicted]
    result = replace(
        result,
        excluded=selected.excluded,
        groups=_groups(splits, source, result),
        threshold=threshold,
        unknown=None if unknown_images is None else _unknown(predictor, source, unknown_images, options),
        real=None if labels is None else labels.score(result.keys, outputs),
    )
    if out is not None:
        arguments = {"model": str(run), "data": str(data), "split": selected.split, "tta": tta}
        with new_directory(Path(out), CONTENTS, force=force) as folder:
            _write_report(folder, arguments, selected, result, predictor, features)
            write_file(folder / "evaluation.json", json.dumps(arguments | result.as_dict(), indent=2) + "\n")
    return result


def _notes(
    predictor: Predictor,
    splits: Splits,
    selected: Selected,
    among: Sequence[int] | None,
    trained_with: Recipe | None,
    images: Fingerprint | None,
) -> Iterator[str]:
    """Yield what a user must know about the images that are evaluated."""
    split, source, _, trained_on = selected
    if among is not None:
        yield (
            f"The data have {len(among):,} of the model's {len(predictor.classes):,} classes; results are over these"
            " alone, except the top-1 among all classes."
        )
    yield f"Evaluating {SPLIT_NAMES[split]}: {len(source):,} images."
    value_range = predictor.preprocessing.value_range
    yield range_note(splits.values, value_range, range_advice(value_range))
    yield predictor.preprocessing.note(splits.sizes)
    if trained_on and split != "train":
        yield f"The model was trained on {trained_on:,} of these images, so the accuracy is too high."
    if images is not None and not images.has_hashes and split != "train":
        yield (
            "The run read only the headers of its images, so those that the model was trained on are found by name and"
            " size; renamed ones are not."
        )
    is_unknown = trained_on is None and trained_with is None and recognized(predictor.model.info.label_names) is None
    if is_unknown and split == "all":
        yield (
            "This model is not in its run directory, so which images it was trained on is not known. If it was"
            " trained on some of these, the accuracy is too high: pass the run, or --split val."
        )


def _write_report(
    out: Path,
    arguments: Mapping[str, Any],
    selected: Selected,
    result: Evaluation,
    predictor: Predictor,
    features: np.ndarray,
) -> None:
    """Write report.html, with the features of the images on the feature map."""
    from weft.inference.error_gallery import explained_errors
    from weft.inference.feature_map import drawn_of, feature_map
    from weft.inference.report import write_report

    run, data = arguments["model"], arguments["data"]
    summary = [
        ("model", run),
        ("data", f"{data}, {SPLIT_NAMES[selected.split]}"),
        ("images", f"{result.count}, {len(result.excluded)} excluded"),
        *result.summary(),
    ]
    if arguments["tta"]:
        summary.append(("test-time augmentation", "logits averaged with those of mirror images"))
    errors = explained_errors(predictor, selected.source, result.mistakes)
    drawn = feature_map(features, result, drawn_of(result.count))
    write_report(out, f"{Path(run).resolve().name} on {data}", summary, result, errors=errors, features=drawn)


def _groups(splits: Splits, source: Source, result: Evaluation) -> list[str] | None:
    """Return the group of every evaluated image; None if the images are not grouped."""
    if splits.groups is None or splits.val_groups is None:
        return None
    group_of = dict(zip((*splits.train.keys, *splits.val.keys), (*splits.groups, *splits.val_groups), strict=True))
    return [group_of[source.keys[place]] for place in result.places]


def _unknown(predictor: Predictor, source: Source, images: str | Path, options: InferenceOptions) -> Threshold:
    """Compare the scores of the evaluated images with those of images that show none of the classes."""
    from weft.inference.measurement import evaluation_batches
    from weft.inference.torch_model import TorchModel

    model = predictor.model
    if isinstance(model, TorchModel):
        model = TorchModel(model.network, runtime=model.runtime)  # folded
    folded = Predictor(model, max_pixels=predictor.max_pixels)
    detector = folded.detector
    assert detector is not None
    assert detector.threshold is not None
    batches = evaluation_batches(source, model.info, options.batch_size, options.workers)
    with Work("other images", len(image_files(images))) as work:
        others = scores_of_files(folded, images, options.batch_size, work.advance)
    known = np.concatenate([folded.scores(batch.numpy()) for batch, _ in batches])
    return compare_scores(known, others, detector.threshold.value)


def _classes_there(source: Source, classes: Sequence[str] | None) -> list[int] | None:
    """Return the outputs of a public model whose classes have images, ascending; None: all, or another model."""
    there = sorted(set(source.labels))
    if classes is None or recognized(classes) is None or len(there) in (0, len(classes)):
        return None
    if len(there) == 1:
        raise DataError(
            "Accuracy over the ImageNet classes of the data needs images of at least two classes; all are of"
            f" '{printable(classes[there[0]])}'. Add a folder of images of another class."
        )
    return there
