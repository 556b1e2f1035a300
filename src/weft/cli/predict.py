"""`weft predict`: classify images."""

from __future__ import annotations

import argparse
import sys

from weft.cli.options import (
    NO_FORMULA,
    RUN,
    add_common,
    example,
    note,
    one_format,
    percentage,
    print_csv,
    print_json,
    table,
    use_threads,
)
from weft.errors import DataError
from weft.text import first_few

HELP = "classify images: the most probable classes of each"

EXAMPLE = """
weft predict runs/photos holiday/ "shots/*.jpg" portrait.png --top-k 2 --csv > predictions.csv
weft predict levit_256 cat.jpg

The second line uses public weights, from the hub or its cache, with ImageNet's classes; names: weft models, or of timm,
with or without a tag. A directory of the same name comes first.
A folder means all images below it. Unreadable images are listed on stderr with the reason; the others are
classified, and the exit code is then 3.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help="image files, folders, or quoted patterns such as 'x/*.png'"
    )
    parser.add_argument("--top-k", metavar="N", type=int, default=5, help="number of classes per image (default: 5)")
    add_common(parser, "--batch-size", "--img-size", "--device", "--precision", "--threads", "--json")
    add_common(parser, "--max-pixels")
    parser.add_argument("--limit", metavar="N", help="use at most N images")
    add_common(parser, "--tta", "--reject-at-error")
    parser.add_argument("--csv", action="store_true", help=f"print CSV, one line per image and class; {NO_FORMULA}")
    add_common(parser, "--out", "--force", "--quiet", out="or a file .csv; copies of the images, by class")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Classify images, and print the predictions as text, JSON or CSV."""
    one_format(args)
    reject_at_error = percentage("--reject-at-error", args.reject_at_error)
    use_threads(args.threads)
    from weft.inference import predict
    from weft.inference.prediction_files import table_of
    from weft.progress import say

    predictions = predict(
        args.run,
        args.images,
        top_k=args.top_k,
        batch_size=args.batch_size,
        img_size=args.img_size,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        limit=args.limit,
        max_pixels=args.max_pixels,
        tta=args.tta,
        reject_at_error=reject_at_error,
        out=args.out,
        force=args.force,
    )
    good = [prediction for prediction in predictions if prediction.error is None]
    header, lines = table_of(predictions)
    if args.json:
        print_json([prediction.as_dict() for prediction in predictions])
    elif args.csv:
        print_csv(header, lines)
    elif lines:
        print(table(header, lines))
    sys.stdout.flush()
    unknown = [prediction.image for prediction in good if prediction.unknown]
    if unknown and not args.json:
        say(
            f"weft: {len(unknown)} of {len(good)} images resemble no training image; perhaps they show none of the"
            f" classes: {first_few(unknown)}."
        )
    bad = [prediction for prediction in predictions if prediction.error is not None]
    for prediction in bad:
        note(f"weft: {prediction.error}")
    if bad:
        say(f"weft: {len(bad)} of {len(predictions)} images could not be read.")
    return DataError.exit_code if bad else 0
