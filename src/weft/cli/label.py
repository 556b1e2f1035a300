"""`weft label`: images to label next, and proposed labels."""

from __future__ import annotations

import argparse

from weft.cli.embed import note_unreadable
from weft.cli.options import MODEL, add_common, example, print_json, table, use_threads
from weft.text import printable

HELP = "choose the images to label next, and propose labels for the certain ones"

EXAMPLE = """
weft label runs/photos unlabelled/ --num 20 --out to-label
weft train to-label/next.csv --recipe probe --out runs/photos-2     # after writing the labels into next.csv

to-label/next.csv lists the images that a label helps most: uncertain and different from each other. Its labels are
empty, for you to write. proposed.csv lists images with a probability of at least 0.95 and their labels. Both are tables
that weft train reads. They also list the labelled images of the run, so that training uses all images; features are
cached. report.html has the images to label. Your files are only read.
Unreadable images are listed on stderr with the reason, and the exit code is then 3.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("run", metavar="RUN", help=MODEL)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help="image files, folders, or quoted patterns such as 'x/*.png'"
    )
    parser.add_argument("--num", metavar="N", type=int, default=20, help="number of images to label next (default: 20)")
    parser.add_argument(
        "--min-probability",
        metavar="P",
        type=float,
        default=0.95,
        help="smallest probability of a proposed label (default: 0.95)",
    )
    default = "default: that of the run; fp32 on a processor that emulates bf16"
    add_common(parser, "--batch-size", "--device", "--precision", "--threads", precision=default)
    add_common(parser, "--max-pixels")
    parser.add_argument("--limit", metavar="N", help="use at most N images")
    add_common(parser, "--out", out="next.csv, proposed.csv, report.html")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Choose images to label, and print them as text or JSON."""
    use_threads(args.threads)
    from weft.train import label

    result = label(
        args.run,
        args.images,
        num=args.num,
        min_probability=args.min_probability,
        out=args.out,
        batch_size=args.batch_size,
        device=args.device or "auto",
        precision=args.precision,
        limit=args.limit,
        max_pixels=args.max_pixels,
        force=args.force,
    )
    if args.json:
        print_json(result.as_dict())
    else:
        rows = [
            (rank, printable(row.image), row.label, f"{row.probability:.3f}")
            for rank, row in enumerate(result.next, start=1)
        ]
        print(table(("label next", "image", "most probable class", "probability"), rows))
        print(
            f"proposed labels: {len(result.proposed):,} images with a probability of at least {args.min_probability:g};"
            f" others: {len(result.rest):,}"
        )
        if result.labelled:
            print(f"left out: {result.labelled:,} images of the run")
        if result.check:
            print(result.check)
        if args.out is not None:
            print(f"tables: {args.out}/next.csv, {args.out}/proposed.csv; images: {args.out}/report.html")
    return note_unreadable(result.errors)
