"""`weft evaluate`: measure a model on labelled images."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from weft.cli.options import (
    NO_FORMULA,
    RUN,
    add_common,
    example,
    one_format,
    percentage,
    print_csv,
    print_json,
    table,
    use_threads,
)

if TYPE_CHECKING:
    from weft.inference.metrics import Evaluation
    from weft.models.papers import Printed

HELP = "measure a model on labelled images: top-1, top-5, per class, confusion matrix"

EXAMPLE = """
weft evaluate runs/photos more_photos/ --out runs/photos-check

more_photos/ holds one folder per class; folders are matched with the model's classes by name.
By default, images that the run was trained on are left out; change it with --split.
For weights without class names, folders named by numbers (as in ImageNet-V2) are matched by value. For a public model
(weft evaluate levit_256 photos/), folders are WordNet ids, ImageNet names or numbers; if there are some of the classes,
results are over these alone, and the top-1 among all classes is added. On all 1,000 classes, the accuracy that the
paper reports is printed next to the measured one.
"""

MAX_CLASSES = 20  # of a confusion matrix that is printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument("data", metavar="DATA", help="folder of images, or `digits`")
    parser.add_argument(
        "--split", choices=("auto", "train", "val", "test", "all"), default="auto", help="images of DATA to use"
    )
    add_common(parser, "--batch-size", "--img-size", "--device", "--precision", "--threads")
    add_common(parser, "--workers", "--limit", "--max-pixels", "--follow-links", "--tta", "--reject-at-error")
    parser.add_argument(
        "--real-labels", metavar="FILE", help="also score with ReaL labels (real.json), several or none per image"
    )
    parser.add_argument(
        "--unknown-images",
        metavar="FOLDER",
        help="also measure how well images that show none of the classes are detected",
    )
    add_common(parser, "--out", out="report.html, evaluation.json")
    add_common(parser, "--force", "--json")
    parser.add_argument("--csv", action="store_true", help=f"print the scores of each class as CSV; {NO_FORMULA}")
    add_common(parser, "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Evaluate a model, and print the result as text, JSON or CSV."""
    one_format(args)
    use_threads(args.threads)
    from weft.inference import evaluate

    result = evaluate(
        args.run,
        args.data,
        split=args.split,
        batch_size=args.batch_size,
        img_size=args.img_size,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        workers=args.workers,
        limit=args.limit,
        max_pixels=args.max_pixels,
        follow_links=args.follow_links,
        tta=args.tta,
        reject_at_error=percentage("--reject-at-error", args.reject_at_error),
        unknown_images=args.unknown_images,
        real_labels=args.real_labels,
        out=args.out,
        force=args.force,
    )
    if args.json:
        print_json(result.as_dict())
    elif args.csv:
        print_csv(("class", "images", "precision", "recall", "f1"), result.per_class)
    else:
        from weft.checkpoints.hub import printed_row
        from weft.checkpoints.resolve import is_path

        is_as_reported = not (is_path(args.run) or args.tta or args.limit or args.img_size)
        print(_text(result, printed_row(args.run) if is_as_reported else None))
    return 0


def _text(result: Evaluation, printed: Printed | None) -> str:
    from weft.inference.metrics import percent_text

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
    rows = [
        (score.name, score.images, *map(percent_text, (score.precision, score.recall, score.f1)))
        for score in result.per_class
    ]
    parts.append(table(("class", "images", "precision %", "recall %", "F1 %"), rows))
    if len(result.classes) <= MAX_CLASSES:
        cells = [(name, *counts) for name, counts in zip(result.classes, result.confusion.tolist(), strict=True)]
        parts.append("confusion matrix (rows: true class, columns: predicted class)")
        parts.append(table(("", *result.classes), cells))
    return "\n\n".join(parts)
