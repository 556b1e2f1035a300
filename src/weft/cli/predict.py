"""`weft predict`: classify images."""

from __future__ import annotations

import argparse
import sys

from weft.cli.options import add_common, example, note, print_csv, print_json, table, use_threads
from weft.errors import DataError

HELP = "classify images: the most probable classes of each"

EXAMPLE = """
weft predict runs/photos holiday/ "shots/*.jpg" portrait.png --top-k 2 --csv > predictions.csv

A folder means all images below it. Unreadable images are listed on stderr with the reason; the others are
classified, and the exit code is then 3.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("run", metavar="RUN", help="run directory (its best model is used) or model directory")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help="image files, folders, or quoted patterns such as 'x/*.png'"
    )
    parser.add_argument("--top-k", metavar="N", type=int, default=5, help="number of classes per image (default: 5)")
    add_common(parser, "--batch-size", "--img-size", "--device", "--precision", "--threads", "--json")
    parser.add_argument("--limit", metavar="N", help="use at most N images")
    add_common(parser, "--tta")
    parser.add_argument("--csv", action="store_true", help="print CSV, one line per image and class")
    add_common(parser, "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Predicts, and prints in the form asked for."""
    from weft.train import predict

    use_threads(args.threads)
    answers = predict(
        args.run,
        args.images,
        top_k=args.top_k,
        batch_size=args.batch_size,
        img_size=args.img_size,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        limit=args.limit,
        tta=args.tta,
    )
    good = [answer for answer in answers if answer.error is None]
    lines = [(a.image, rank, name, f"{p:.4f}") for a in good for rank, (name, p) in enumerate(a.top, start=1)]
    if args.json:
        print_json([answer.as_dict() for answer in answers])
    elif args.csv:
        print_csv(("image", "rank", "class", "probability"), lines)
    elif lines:
        print(table(("image", "rank", "class", "probability"), lines))
    sys.stdout.flush()
    bad = [answer for answer in answers if answer.error is not None]
    for answer in bad:
        note(f"weft: {answer.error}")
    if bad and not args.quiet:
        note(f"weft: {len(bad)} of {len(answers)} images could not be read.")
    return DataError.exit_code if bad else 0
