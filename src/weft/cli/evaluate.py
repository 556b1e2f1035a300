"""`weft evaluate`: measure a model on labelled images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from weft.cli import options as opt
from weft.cli.options import given, in_group, one_format, print_csv, print_json, table

if TYPE_CHECKING:
    from weft.inference.metrics import Evaluation
    from weft.models.papers import Printed

MAX_CLASSES = 20  # of a confusion matrix that is printed, and of a table of more than MAX_MATRIX classes


def evaluate(
    run: opt.Run,
    data: str,
    /,
    *,
    split: Annotated[Literal["auto", "train", "val", "test", "all"], in_group("Data", metavar="SPLIT")] = "auto",
    unknown_images: Annotated[str | None, in_group("Data", metavar="FOLDER")] = None,
    real_labels: Annotated[str | None, in_group("Data", metavar="FILE")] = None,
    tta: opt.Tta = False,
    reject_at_error: opt.Percent = None,
    out: opt.Out = None,
    csv: Annotated[bool, opt.as_csv("one line per class, with its scores")] = False,
    dataset: opt.Dataset = opt.Dataset(),
    inference: opt.Inference = opt.Inference(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Measure a model on labelled images: top-1, top-5, per class, confusion matrix.

    Args:
        data: folder of images, or `digits`
        split: images of DATA to use: auto, train, val, test or all
        unknown_images: also measure how well images that show none of the classes are detected
        real_labels: also score with ReaL labels (real.json), several or none per image
        out: output directory: report.html, evaluation.json

    Example:
        weft evaluate runs/photos more_photos/ --out runs/photos-check

        more_photos/ holds one folder per class; folders are matched with the model's classes by name.
        By default, images that the run was trained on are left out; change it with --split.
        For weights without class names, folders named by numbers (as in ImageNet-V2) are matched by value. For a public
        model (weft evaluate levit_256 photos/), folders are WordNet ids, ImageNet names or numbers; if there are some
        of the classes, results are over these alone, and the top-1 among all classes is added. On all 1,000 classes,
        the accuracy that the paper reports is printed next to the measured one.
    """
    import weft.inference as library

    one_format(json=output.json, csv=csv)
    result = library.evaluate(
        run,
        data,
        split=split,
        tta=tta,
        reject_at_error=reject_at_error,
        unknown_images=unknown_images,
        real_labels=real_labels,
        out=out,
        force=output.force,
        **given(inference, dataset),
    )
    if output.json:
        print_json(result.as_dict())
    elif csv:
        print_csv(("class", "images", "precision", "recall", "f1"), result.per_class)
    else:
        from weft.checkpoints.hub import printed_row
        from weft.checkpoints.resolve import is_path

        is_as_reported = not (is_path(run) or tta or inference.limit or inference.img_size)
        print(_text(result, printed_row(run) if is_as_reported else None))
    return 0


def _text(result: Evaluation, printed: Printed | None) -> str:
    from weft.inference.metrics import MAX_MATRIX
    from weft.inference.scores import percent_text

    lines = result.summary()
    if printed is not None and printed.top1 is not None and len(result.classes) == 1000:
        difference = f"{result.top1 - printed.top1:+.2f} percentage points"
        reported = f"{printed.top1:g} % on ImageNet's validation set ({printed.source})"
        lines.append(("reported top-1", f"{reported}; measured here: {difference}"))
    parts = ["\n".join(f"{name}: {value}" for name, value in lines), *result.warnings()]
    if result.excluded:
        parts.append(
            f"{len(result.excluded)} excluded from all results:\n"
            + "\n".join(f"  {key}: {reason}" for key, reason in result.excluded)
        )
    scores = result.per_class
    if len(scores) > MAX_MATRIX:
        scores = [scores[place] for place in result.weakest(MAX_CLASSES)]
        parts.append(f"The {MAX_CLASSES} of {len(result.classes):,} classes with the lowest recall; --csv lists all:")
    rows = [
        (score.name, score.images, *map(percent_text, (score.precision, score.recall, score.f1))) for score in scores
    ]
    parts.append(table(("class", "images", "precision %", "recall %", "F1 %"), rows))
    if len(result.classes) <= MAX_CLASSES:
        cells = [(name, *counts) for name, counts in zip(result.classes, result.confusion.tolist(), strict=True)]
        parts.append("confusion matrix (rows: true class, columns: predicted class)")
        parts.append(table(("", *result.classes), cells))
    return "\n\n".join(parts)
