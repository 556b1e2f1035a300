"""`weft embed`: features of images."""

from __future__ import annotations

import argparse

from weft.cli.options import MODEL, add_common, example, note, print_json, use_threads
from weft.errors import DataError

HELP = "write the features of images (inputs of the classifier) to a file"

EXAMPLE = """
weft embed runs/photos holiday/ --out features.npy
weft embed tf_efficientnet_lite0 holiday/ "shots/*.jpg" --out features.parquet --normalize

features.npy has one row of float32 numbers per image; features.csv next to it has the paths in the same order.
features.parquet has both, in the columns image and features. The second line uses public weights.
Features are cached (docs/few-images.md). Unreadable images have no row; they are listed on stderr with the reason, and
the exit code is then 3.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("run", metavar="RUN", help=MODEL)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help="image files, folders, or quoted patterns such as 'x/*.png'"
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="file to write: .npy, or .parquet with pyarrow")
    parser.add_argument("--normalize", action="store_true", help="scale the features of each image to unit L2 norm")
    add_common(parser, "--batch-size", "--img-size", "--device", "--precision", "--threads")
    add_common(parser, "--max-pixels")
    parser.add_argument("--limit", metavar="N", help="use at most N images")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Compute features, write them, and print their number."""
    use_threads(args.threads)
    from weft.inference import embed

    result = embed(
        args.run,
        args.images,
        out=args.out,
        normalize=args.normalize,
        batch_size=args.batch_size,
        img_size=args.img_size,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        limit=args.limit,
        max_pixels=args.max_pixels,
        force=args.force,
    )
    if args.json:
        print_json({"out": args.out, **result.as_dict()})
    else:
        print(f"{args.out}: {result.features.shape[1]:,} features of {len(result.images):,} images")
    return note_unreadable(result.errors)


def note_unreadable(errors: list[tuple[str, str]]) -> int:
    """Print the files that could not be read to stderr, and return the exit code."""
    from weft.progress import say

    for _, message in errors:
        note(f"weft: {message}")
    if errors:
        say(f"weft: {len(errors)} images could not be read.")
    return DataError.exit_code if errors else 0
