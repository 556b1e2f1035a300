"""`weft similar`: the images that are most similar to a query image."""

from __future__ import annotations

import argparse

from weft.cli.embed import note_unreadable
from weft.cli.options import (
    MODEL,
    NO_FORMULA,
    add_common,
    example,
    one_format,
    print_csv,
    print_json,
    table,
    use_threads,
)
from weft.text import printable

HELP = "find the images that are most similar to one image"

EXAMPLE = """
weft similar runs/photos query.jpg holiday/ --top-k 5
weft similar tf_efficientnet_lite0 query.jpg holiday/ --json

Similarity is the cosine of the features, from -1 to 1.
Features are cached: a second query is fast. Unreadable images are listed on stderr, and the exit code is then 3.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("run", metavar="RUN", help=MODEL)
    parser.add_argument("query", metavar="QUERY", help="image file")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help="image files, folders, or quoted patterns such as 'x/*.png'"
    )
    parser.add_argument("--top-k", metavar="N", type=int, default=10, help="number of images to find (default: 10)")
    add_common(parser, "--batch-size", "--img-size", "--device", "--precision", "--threads")
    add_common(parser, "--max-pixels")
    parser.add_argument("--limit", metavar="N", help="search at most N images")
    add_common(parser, "--json")
    parser.add_argument("--csv", action="store_true", help=f"print CSV; {NO_FORMULA}")
    add_common(parser, "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Find similar images, and print them as text, JSON or CSV."""
    one_format(args)
    use_threads(args.threads)
    from weft.inference import similar

    result, errors = similar(
        args.run,
        args.query,
        args.images,
        top_k=args.top_k,
        batch_size=args.batch_size,
        img_size=args.img_size,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        limit=args.limit,
        max_pixels=args.max_pixels,
    )
    rows = [(rank, printable(row.image), f"{row.similarity:.4f}") for rank, row in enumerate(result, start=1)]
    if args.json:
        print_json([row.as_dict() for row in result])
    elif args.csv:
        print_csv(("rank", "image", "similarity"), rows)
    else:
        print(table(("rank", "image", "similarity"), rows))
    return note_unreadable(errors)
