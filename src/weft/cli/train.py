"""`weft train`: train an image classifier."""

from __future__ import annotations

import argparse
import os
from typing import Any

from weft.cli.options import add_common, example, print_json, setting, table

HELP = "train a classifier on a folder of images"

EXAMPLE = """
weft train photos/ --model levit_128s --epochs 30 --set optim.lr=5e-4 --out runs/photos

photos/ holds one folder of images per class; with train/ and val/ inside, that split is used.
Writes to runs/photos: best/ and last/ (model directories), metrics.csv, recipe.yaml, report/report.html.
Resume after a stop or kill, with the same result: weft train --resume runs/photos
Fine-tune on other classes: weft train birds/ --from runs/photos
Repeat a run: weft train --config runs/photos/recipe.yaml --out runs/again
Two processes: torchrun --nproc-per-node 2 -m weft train photos/
"""

SETTINGS = (
    "model", "epochs", "batch_size", "img_size", "seed", "device", "precision", "workers", "limit", "skip_nonfinite",
    "start_from",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft train DATA [options]"
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="folder of images, or `digits`; not needed if the recipe has it"
    )
    add_common(parser, "--model", model="default: by the size and number of the images")
    parser.add_argument(
        "--recipe", "--config", metavar="NAME|FILE", help="recipe name (see `weft recipes`) or YAML file"
    )
    parser.add_argument(
        "--from",
        dest="start_from",
        metavar="CKPT",
        help="start from the weights of a run, model directory or checkpoint",
    )
    parser.add_argument("--resume", metavar="RUN", help="resume a stopped run (bit-exact)")
    parser.add_argument("--override", action="store_true", help="with --resume: allow changed settings")
    add_common(parser, "--set", "--epochs", "--batch-size", "--img-size")
    add_common(parser, "--out", out="default: runs/MODEL-DATA")
    add_common(parser, "--seed", "--device", "--precision", "--workers", "--limit")
    parser.add_argument("--max-time", metavar="TIME", help="save and stop after 90s, 45m or 1h30m (exit code 143)")
    parser.add_argument("--skip-nonfinite", metavar="N", help="tolerate N steps whose loss or gradient is not finite")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--find-lr", action="store_true", help="try learning rates and suggest one; writes no files")
    instead.add_argument("--preview", metavar="FILE", help="write a preview of augmented training images, and exit")
    parser.add_argument("--track", metavar="NAMES", help="log to tensorboard, wandb, or tensorboard,wandb")
    instead.add_argument("--print-config", action="store_true", help="print the resolved recipe, and exit")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Trains, and says where everything is."""
    settings = dict(setting(text) for text in args.set)
    given = {name: getattr(args, name) for name in SETTINGS}
    if args.print_config:
        from weft.recipes import dump, load_recipe
        from weft.train.defaults import default_recipe, overrides_of

        recipe = load_recipe(args.recipe or default_recipe(args.data), overrides_of(args.data, settings, given))
        print(dump(recipe), end="")
        return 0
    if args.find_lr:
        return _find_lr(args, settings, given)
    if args.preview is not None:
        return _preview(args, settings, given)
    from weft.train import train

    result = train(
        args.data,
        recipe=args.recipe,
        settings=settings,
        resume=args.resume,
        override=args.override,
        out=args.out,
        max_time=args.max_time,
        track=args.track.split(",") if args.track else (),
        force=args.force,
        quiet=args.quiet,
        **given,
    )
    if os.environ.get("RANK", "0") != "0":  # one of several processes speaks
        return 0
    if args.json:
        print_json(result.as_dict())
    else:
        print(
            f"{result.model} on {result.data}: held-out top-1 {result.top1:.2f} % of {result.count} images"
            f" (epoch {result.best_epoch} of {result.epochs}, the best)\n"
            f"model:  {result.out / 'best'}\nreport: {result.out / 'report' / 'report.html'}"
        )
    return 0


def _find_lr(args: argparse.Namespace, settings: dict[str, Any], given: dict[str, Any]) -> int:
    """Prints a sweep over learning rates, and what it suggests."""
    from weft.train import find_lr

    found = find_lr(args.data, recipe=args.recipe, settings=settings, quiet=args.quiet, **given)
    if args.json:
        print_json(found.as_dict())
        return 0
    rows = [(f"{point.lr:.1e}", f"{point.loss:.3f}", f"{point.smoothed:.3f}") for point in found.points[::5]]
    print(table(("lr", "loss", "smoothed"), rows))
    print(f"suggested: --set optim.lr={found.lr:.1e}")
    return 0


def _preview(args: argparse.Namespace, settings: dict[str, Any], given: dict[str, Any]) -> int:
    """Draws training images, and says where."""
    from weft.train import preview

    words = dict(recipe=args.recipe, settings=settings, force=args.force, quiet=args.quiet, **given)
    out = preview(args.data, out=args.preview, **words)
    if args.json:
        print_json({"preview": str(out)})
    else:
        print(out)
    return 0
