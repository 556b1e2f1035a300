"""`weft explain`: attention maps and Grad-CAM of images."""

from __future__ import annotations

import argparse

from weft.cli.options import RUN, add_common, example, note, print_json, table, use_threads
from weft.errors import DataError, UsageError

HELP = "explain predictions: attention maps, rollout, Grad-CAM"

EXAMPLE = """
weft explain runs/photos holiday/ portrait.png --out explained
weft explain runs/photos portrait.png --out explained --label cat

Writes a .png figure and a .npz with the arrays for each image: attention of each level, attention rollout, the share of
each layer (CeiT), Grad-CAM. CeiT, CvT and LeViT have attention maps; other networks have Grad-CAM alone.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft explain RUN IMAGES [IMAGES ...] --out DIR [options]"
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "images", nargs="+", metavar="IMAGES", help="image files, folders, or quoted patterns such as 'x/*.png'"
    )
    parser.add_argument(
        "--label", metavar="CLASS", help="class to explain (default: the predicted class of each image)"
    )
    parser.add_argument("--no-grad-cam", action="store_true", help="attention maps only; faster")
    add_common(parser, "--out", out="required")
    add_common(parser, "--img-size", "--device", "--threads")
    add_common(parser, "--max-pixels")
    parser.add_argument("--limit", metavar="N", help="use at most N images")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Explain predictions, and print the files."""
    if args.out is None:
        raise UsageError("weft explain needs an output directory; pass --out DIR.")
    use_threads(args.threads)
    from weft.inference.explain_files import explain_run

    results = explain_run(
        args.run,
        args.images,
        args.out,
        label=args.label,
        img_size=args.img_size,
        device=args.device or "auto",
        grad_cam=not args.no_grad_cam,
        limit=args.limit,
        max_pixels=args.max_pixels,
        force=args.force,
    )
    explained = [row for row in results if row.error is None]
    if args.json:
        print_json([row.as_dict() for row in results])
    elif explained:
        lines = [(row.image, row.label, f"{row.probability:.4f}", f"{args.out}/{row.panel}") for row in explained]
        print(table(("image", "class", "probability", "figure"), lines))
    bad = [row for row in results if row.error is not None]
    for row in bad:
        note(f"weft: {row.error}")
    return DataError.exit_code if bad else 0
