"""`weft label`: images to label next, and proposed labels for those that a model is certain of."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from scipy.special import softmax

from weft.checkpoints.resolve import check_model
from weft.checkpoints.unknown import unit_length
from weft.data import Source
from weft.data.decode import BadImage, read_regular
from weft.data.folder import paths_of
from weft.data.inventory import digest_of
from weft.data.split import stratified_subset
from weft.errors import CheckpointError, DataError, UsageError
from weft.files import check_output, new_directory, write_table
from weft.inference.arguments import InferenceOptions, check_images, check_outside_images, image_files, recipe_of
from weft.inference.embedding import feature_predictor, none_readable, read_files
from weft.inference.image_card import image_gallery
from weft.inference.inputs import SourcePart, images_of, series_of
from weft.inference.predictor import Predictor
from weft.machine.processor import bf16_note
from weft.progress import Work, loading, obeys_quiet, quietly, say
from weft.recipes.checks import check_argument
from weft.recipes.fields import Within
from weft.recipes.schema import Positive, Precision
from weft.report.intervals import accuracy_text
from weft.report.pages import Lead, Section, Table, write_page
from weft.text import printable

NUM = 20
MIN_PROBABILITY = 0.95
UNCERTAIN_SHARE = 0.5  # of the images, by margin: the candidates (benchmarks/few-images/label.csv)
MAX_LABELLED = 2_000  # training images, and held-out images, of the run whose features are computed
MAX_VALUES = 10_000_000  # in memory: similarities of images without labels to labelled ones, probabilities
NEXT, PROPOSED = "next.csv", "proposed.csv"
CONTENTS = (NEXT, PROPOSED, "report.html")
SHOWN = 50  # images in the report


@dataclass(frozen=True)
class LabelProposal:
    """An image without a label.

    Attributes:
        image: absolute path.
        label: the most probable class.
        probability: of this class.
        action: `label` (by a person, next), `accept` (the model is certain), or empty.
    """

    image: str
    label: str
    probability: float
    action: str

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {**vars(self), "image": printable(self.image)}


@dataclass(frozen=True)
class Labelling:
    """Result of `label`.

    Attributes:
        next: images to label, most useful first.
        proposed: images that the model is certain of, most certain first.
        rest: all other images.
        errors: (path, message) of each file that cannot be read.
        check: accuracy on the held-out images that the model is as certain of, as a sentence; empty if the images of
            the run cannot be read.
        labelled: number of images left out, whose files are images of the run, by its `images.tsv.gz`.
    """

    next: list[LabelProposal]
    proposed: list[LabelProposal]
    rest: list[LabelProposal]
    errors: list[tuple[str, str]]
    check: str
    labelled: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {
            **{name: [row.as_dict() for row in getattr(self, name)] for name in ("next", "proposed", "rest")},
            "errors": [{"image": printable(path), "error": message} for path, message in self.errors],
            "check": self.check,
            "labelled": self.labelled,
        }


@obeys_quiet
def label(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    num: int = NUM,
    min_probability: float = MIN_PROBABILITY,
    out: str | Path | None = None,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Labelling:
    """Choose the images to label next, and propose labels for those that the model is certain of.

    Next are images that the model is uncertain of and that differ from each other and from the labelled images: of the
    half with the smallest margin between the two most probable classes, each time the one with the least cosine
    similarity to all labelled and chosen images (greedy k-center, arXiv 1708.00489), if the labelled images of the run
    still exist. Labelled images themselves are left out.

    Args:
        run: a run directory, or a model directory with class names.
        images: files, folders (with all images below them) or patterns such as 'x/*.png'. They are only read.
        num: number of images to label next.
        min_probability: smallest probability of a proposed label, above 0 and at most 1.
        out: directory for `next.csv`, `proposed.csv` and a report with the images; None to write no files. Both tables
            are data for `weft train`: they also list the labelled images of the run, if these are files. In `next.csv`
            the labels of the other images are empty, for a person to write.
        batch_size, img_size, device, precision, limit, max_pixels: as in `train`. If None, the precision is that of
            the run; fp32 on a processor that emulates it.
        force: replace existing files in `out`.
        quiet: print no progress.

    Raises:
        UsageError: a number out of its range, an export or a network without a linear classifier, or `out` is taken.
        DataError: no image can be read.
        CheckpointError: the model is missing, cannot be read, or has no class names.
    """
    check_argument("num", num, Positive)
    check_argument("min_probability", min_probability, Annotated[float, Within(0, 1, above=True)])
    options = InferenceOptions.of(locals())
    if out is not None:
        check_outside_images(out, images)
        check_output(Path(out), CONTENTS, force=force)
    check_model(run)
    check_images(images)
    if precision is None:
        options = replace(options, precision=_precision_of(Path(run), options.device))
    predictor = feature_predictor(run, options)
    if predictor.model.info.label_names is None:
        raise CheckpointError(f"Labels are class names; the model {printable(str(run))} has none. Pass a run.")
    files, num_labelled = _files_without_label(Path(run), images)
    unlabelled = read_files(predictor, files[: options.limit], options.batch_size)
    if not unlabelled.images:
        raise none_readable(unlabelled)
    of_run = _labelled_images(Path(run), predictor.classes)
    (known, _), held_out = (_features(predictor, source, options.batch_size) for source in of_run[:2])
    places, probabilities = _most_probable(predictor, unlabelled.features)
    chosen = choose(unlabelled.features, probabilities, known, num)
    rows = [
        LabelProposal(image, predictor.classes[place], first, "accept" if first >= min_probability else "")
        for image, place, (first, _) in zip(unlabelled.images, places, probabilities.tolist(), strict=True)
    ]
    not_chosen = [rows[i] for i in np.argsort(-probabilities[:, 0], kind="stable") if i not in chosen]
    result = Labelling(
        next=[replace(rows[i], action="label") for i in chosen],
        proposed=[row for row in not_chosen if row.action],
        rest=[row for row in not_chosen if not row.action],
        errors=unlabelled.errors,
        check=_check(predictor, *held_out, min_probability),
        labelled=num_labelled,
    )
    if out is not None:
        if of_run.train is not None and not of_run.rows:
            say(f"{NEXT} and {PROPOSED} list no image of the run, since these are not files. Add them before training.")
        with new_directory(Path(out), CONTENTS, force=force) as folder:
            _write_tables(folder, result, of_run.rows)
            _write_report(folder, str(run), result, min_probability)
    return result


def choose(features: np.ndarray, probabilities: np.ndarray, known: np.ndarray, num: int) -> list[int]:
    """Return the indices of the images to label next, in the order of choice.

    Args:
        features: (images features) of the images without labels.
        probabilities: (images classes) of the same images; the two most probable classes of each suffice.
        known: (labelled features) of the labelled images.
        num: number of images to choose; all if there are fewer.
    """
    number = min(num, len(features))
    second, first = np.sort(probabilities, axis=1)[:, -2:].T
    candidates = np.argsort(first - second, kind="stable")[: max(int(UNCERTAIN_SHARE * len(features)), number)]
    points = unit_length(features[candidates].astype(np.float64))
    nearest = np.full(len(points), -1.0)  # largest similarity to a labelled or chosen image
    if len(known):
        labelled = unit_length(known.astype(np.float64)).T
        step = max(MAX_VALUES // len(known), 1)
        blocks = (points[start : start + step] @ labelled for start in range(0, len(points), step))
        nearest = np.concatenate([block.max(axis=1) for block in blocks])
    chosen: list[int] = []
    for _ in range(number):
        place = int(nearest.argmin())  # of equal ones, such as without labelled images, the least certain
        chosen.append(int(candidates[place]))
        nearest = np.maximum(nearest, points @ points[place])
        nearest[place] = np.inf
    return chosen


def _files_without_label(run: Path, images: str | Path | Sequence[str | Path]) -> tuple[list[str], int]:
    """Return the image files that are not among the images of a run, and the number of those that are."""
    images_of_run = images_of(run)
    digests = set() if images_of_run is None else images_of_run.digests
    if not digests:
        say("Which images are already labelled is unknown: the run has no hashes in images.tsv.gz.")
    files = list(dict.fromkeys(str(Path(path).absolute()) for path in image_files(images)))

    def is_labelled(path: str) -> bool:
        try:
            return bool(digests) and digest_of(read_regular(path)) in digests
        except (BadImage, OSError):  # the file is named where its features are read
            return False

    new = [path for path in files if not is_labelled(path)]
    if files and not new:
        raise DataError(
            f"An image without a label is needed; all {len(files):,} are among the images of the run. Pass others."
        )
    return new, len(files) - len(new)


def _precision_of(run: Path, device: str) -> Precision:
    """Return bf16 if a run was trained in bf16, and this device does not emulate it; else fp32."""
    recipe = recipe_of(run)
    if recipe is None or recipe.precision != "bf16":
        return "fp32"
    with loading():
        from weft.machine.runtime import Runtime

    kind = Runtime.of(device).device.type
    return "bf16" if kind != "mps" and bf16_note(kind, "bf16") is None else "fp32"


class _LabelledImages(NamedTuple):
    """Training and held-out images of a run, if they can still be read, and (path, label, split) of each, if files."""

    train: Source | None = None
    held_out: Source | None = None
    rows: Sequence[tuple[str, str, str]] = ()


def _labelled_images(run: Path, classes: Sequence[str]) -> _LabelledImages:
    """Return the labelled images of a run, with a note if they cannot be used."""
    recipe, images = recipe_of(run), images_of(run)
    if recipe is None or images is None:
        return _LabelledImages()
    from weft.train.plan import open_splits

    try:
        with quietly():
            splits = open_splits(recipe, series_of(run))
        if list(splits.classes) != list(classes):
            raise DataError(f"The classes of {printable(str(recipe.data.source))} have changed.")
        sides = [*images.sides_of(splits.train), *images.sides_of(splits.val)]
    except DataError as error:
        say(f"The images of the run are not used: {error}")
        return _LabelledImages()
    train, held_out = (
        SourcePart(splits.train, splits.val, places=[place for place, side in enumerate(sides) if side == name])
        for name in ("train", "val")
    )
    rows = []
    with contextlib.suppress(UsageError):  # they are not files
        paths = [*paths_of(splits.train), *paths_of(splits.val)]
        names = [splits.classes[label] for label in (*splits.train.labels, *splits.val.labels)]
        rows = [row for row in zip(paths, names, sides, strict=True) if row[2]]
    return _LabelledImages(train, held_out, rows)


def _features(predictor: Predictor, source: Source | None, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (images features) and the labels of at most MAX_LABELLED images, with the cache."""
    if not source:
        return np.empty((0, 0)), np.empty(0, int)
    from weft.inference.features import read_features
    from weft.inference.measurement import evaluation_batches
    from weft.inference.torch_model import torch_model

    part = SourcePart(source, places=stratified_subset(source.keys, source.labels, MAX_LABELLED, seed=0))
    model = torch_model(predictor.model)
    batches = evaluation_batches(part, model.info, batch_size, 0)
    with Work("features of labelled images", len(part)) as work:
        features, labels = read_features(model.running, batches, model.runtime, work.advance, is_mirrored=False)
    return np.concatenate([own[:, 0] for own in features], axis=1), labels


def _most_probable(predictor: Predictor, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable class (images), and the calibrated probabilities of it and the second (images 2)."""
    from weft.inference.features import logits_of
    from weft.inference.torch_model import torch_model

    step = max(MAX_VALUES // len(predictor.classes), 1)
    places, highest = [], []
    for start in range(0, len(features), step):
        logits = logits_of(torch_model(predictor.model).network, features[start : start + step]).astype(np.float64)
        probabilities = softmax(logits / predictor.temperature, axis=1)
        places.append(probabilities.argmax(axis=1))
        highest.append(np.sort(probabilities, axis=1)[:, :-3:-1])
    return np.concatenate(places), np.concatenate(highest)


def _check(predictor: Predictor, features: np.ndarray, labels: np.ndarray, min_probability: float) -> str:
    """Return the accuracy of the labels that would be proposed for the held-out images, as a sentence."""
    if not len(labels):
        return ""
    places, probabilities = _most_probable(predictor, features)
    is_certain = probabilities[:, 0] >= min_probability
    if not is_certain.any():
        return f"None of {len(labels):,} held-out images has a probability of at least {min_probability:g}."
    right = places[is_certain] == labels[is_certain]
    accuracy = accuracy_text(100 * float(right.mean()), len(right), f"of {len(labels):,} held-out images")
    return f"Labels with a probability of at least {min_probability:g} are right for {accuracy}."


def _write_tables(folder: Path, result: Labelling, labelled: Sequence[tuple[str, str, str]]) -> None:
    """Write the tables; `labelled` has (path, label, split) of the images of the run, which both list."""
    guesses = [(row.image, "", f"{row.probability:.4f}", row.action, row.label) for row in result.next]
    guesses += [(path, name, "", "", "") for path, name, _ in labelled]
    # split: images with proposed labels are for training only, since an accuracy on them would mean nothing
    proposed = [(row.image, row.label, f"{row.probability:.4f}", row.action, "train") for row in result.proposed]
    proposed += [(path, name, "", "", split) for path, name, split in labelled]
    write_table(folder / NEXT, ("path", "label", "probability", "action", "guess"), guesses)
    write_table(folder / PROPOSED, ("path", "label", "probability", "action", "split"), proposed)


def _write_report(folder: Path, run: str, result: Labelling, min_probability: float) -> None:
    def table(rows: Sequence[LabelProposal]) -> Table:
        cells = [(printable(row.image), row.label, f"{row.probability:.3f}") for row in rows]
        return ("image", "most probable class", "probability"), cells

    shown, num_next, num_proposed = result.next[:SHOWN], len(result.next), len(result.proposed)
    titles = [f"{rank}: {row.label}, {100 * row.probability:.0f} %" for rank, row in enumerate(shown, 1)]
    images = image_gallery([row.image for row in shown], titles)
    text = f"Uncertain images that differ from each other, most useful first. Write their labels into {NEXT}."
    sections = [Section("To label next", text, html=images, table=table(result.next))]
    if result.proposed:
        sections.append(Section("Proposed labels", table=table(result.proposed)))
    summary = [
        ("model", run),
        ("to label next", f"{num_next:,} images, in {NEXT}"),
        (
            "proposed labels",
            f"{num_proposed:,} images with a probability of at least {min_probability:g}, in {PROPOSED}",
        ),
        ("other images", f"{len(result.rest):,}"),
        *([("check", result.check)] if result.check else []),
    ]
    lead = Lead([f"{num_next:,} images to label next, and {num_proposed:,} with a proposed label."])
    write_page(folder, "Images to label", lead, summary, sections)
