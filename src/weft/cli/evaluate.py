"""`weft evaluate`: measure a model on labelled images."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from weft.cli.options import add_common, example, print_csv, print_json, table, use_threads

if TYPE_CHECKING:
    from weft.train.metrics import Evaluation

HELP = "measure a model on labelled images: top-1, top-5, per class, confusion matrix"

EXAMPLE = """
weft evaluate runs/photos more_photos/ --out runs/photos-check

more_photos/ holds one folder per class; folders are matched with the model's classes by name.
On the data that the run was trained on, the default is its held-out images; change it with --split.
For weights without class names, folders named by numbers (as in ImageNet-V2) are matched by value.
"""

MOST_CELLS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("run", metavar="RUN", help="run directory (its best model is used) or model directory")
    parser.add_argument("data", metavar="DATA", help="folder of images, or `digits`")
    parser.add_argument(
        "--split", choices=("auto", "train", "val", "all"), default="auto", help="images of DATA to use"
    )
    add_common(parser, "--batch-size", "--img-size", "--device", "--precision", "--threads")
    add_common(parser, "--workers", "--limit", "--tta")
    parser.add_argument(
        "--real-labels", metavar="FILE", help="also score with ReaL labels (real.json), several or none per image"
    )
    add_common(parser, "--out", out="report.html, report.md, figures, evaluation.json")
    add_common(parser, "--force", "--json")
    parser.add_argument("--csv", action="store_true", help="print the scores of each class as CSV")
    add_common(parser, "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Evaluates, and prints in the form asked for."""
    from weft.train import evaluate

    use_threads(args.threads)
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
        tta=args.tta,
        real_labels=args.real_labels,
        out=args.out,
        force=args.force,
        quiet=args.quiet,
    )
    if args.json:
        print_json(result.as_dict())
    elif args.csv:
        print_csv(("class", "images", "precision", "recall", "f1"), result.per_class)
    else:
        print(_text(result))
    return 0


def _text(result: Evaluation) -> str:
    parts = [
        f"top-1 {result.top1:.2f} %  top-5 {result.top5:.2f} %  loss {result.loss:.4f}"
        f"  calibration error {result.ece:.1f}  n = {result.count}"
    ]
    if result.real is not None:
        real = result.real
        parts.append(
            f"ReaL top-1 {real.top1:.2f} %  n = {real.images} ({real.unlabelled} without a ReaL label left out)"
        )
    if result.excluded:
        parts.append(
            f"{len(result.excluded)} excluded, in no number here:\n"
            + "\n".join(f"  {key}: {reason}" for key, reason in result.excluded)
        )
    rows = [(s.name, s.images, f"{s.precision:.1f}", f"{s.recall:.1f}", f"{s.f1:.1f}") for s in result.per_class]
    parts.append(table(("class", "images", "precision %", "recall %", "F1 %"), rows))
    if len(result.classes) <= MOST_CELLS:
        cells = [(name, *counts) for name, counts in zip(result.classes, result.confusion.tolist(), strict=True)]
        parts.append("confusion matrix (rows: true class, columns: predicted class)")
        parts.append(table(("", *result.classes), cells))
    return "\n\n".join(parts)
