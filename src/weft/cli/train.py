"""`weft train`: train an image classifier."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from weft.cli.options import COMMON, add_common, example, note, print_json, setting, table, use_threads
from weft.errors import UsageError
from weft.progress import is_first_process
from weft.recipes.describe import options

if TYPE_CHECKING:
    from weft.train import RunResult
    from weft.train.lr_finder import LrFinding

HELP = "train a classifier on a folder of images"

EXAMPLE = """
weft train photos/ --out runs/photos

photos/ holds one folder of images per class; with train/ and val/ inside, that split is used.
Writes to runs/photos: best/ and last/ (model directories), metrics.csv, recipe.yaml, report/report.html.
Resume after a stop or kill, with the same result: weft train --resume runs/photos
Choose the network and settings: weft train photos/ --model levit_128s --epochs 30 --set optim.lr=5e-4
Fine-tune on other classes: weft train birds/ --from runs/photos
Repeat a run: weft train --config runs/photos/recipe.yaml --out runs/again
Two processes: torchrun --nproc-per-node 2 -m weft train photos/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft train DATA [options]"
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="folder of images, or `digits`; not needed if the recipe has it"
    )
    parser.add_argument("--recipe", "--config", **COMMON["--recipe"])
    add_common(parser, *(option.flag for option in options().values()))
    add_common(parser, "--set")
    add_common(parser, "--out", out="default: runs/MODEL-DATA, or with a number, such as runs/MODEL-DATA-2")
    parser.add_argument(
        "--from-scratch", action="store_true", help="start from random weights also where weft would use public ones"
    )
    add_common(parser, "--threads")
    parser.add_argument("--resume", metavar="RUN", help="resume a stopped run (bit-exact)")
    parser.add_argument("--override", action="store_true", help="with --resume: allow changed settings")
    parser.add_argument("--max-time", metavar="TIME", help="save and stop after 90s, 45m or 1h30m (exit code 143)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--find-lr", action="store_true", help="try learning rates and suggest one; writes no files")
    instead.add_argument("--preview", metavar="FILE", help="write a preview of augmented training images, and exit")
    parser.add_argument("--track", metavar="NAMES", help="log to tensorboard, wandb, or tensorboard,wandb")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Train, and print the result and its files."""
    if args.threads is not None and args.resume is not None:
        raise UsageError(
            f"--resume uses the number of threads of the run, which its last bits depend on; got --threads"
            f" {args.threads}. Omit it."
        )
    common: dict[str, Any] = {
        "recipe": args.recipe,
        "settings": dict(setting(text) for text in args.set),
        "from_scratch": args.from_scratch,
        **{name: getattr(args, name) for name in options()},
    }
    use_threads(args.threads)
    option = "--find-lr" if args.find_lr else "--preview" if args.preview is not None else ""
    if option and args.resume is not None:
        raise UsageError(f"{option} prepares a new run, and --resume continues one. Omit one of them.")
    from weft.train import find_lr, preview, train

    if args.find_lr:
        finding = find_lr(args.data, **common)
        if is_first_process():
            print_json(finding.as_dict()) if args.json else _print_sweep(finding)
        return 0
    if args.preview is not None:
        out = preview(args.data, out=args.preview, force=args.force, **common)
        if is_first_process():
            print_json({"preview": str(out)}) if args.json else print(out)
        return 0
    result = train(
        args.data,
        resume=args.resume,
        override=args.override,
        out=args.out,
        max_time=args.max_time,
        track=args.track.split(",") if args.track else (),
        force=args.force,
        **common,
    )
    if is_first_process():
        print_json(result.as_dict()) if args.json else _print_result(result)
    return 0


def _print_result(result: RunResult) -> None:
    """Print the accuracy and the files of a run, and of its folds."""
    from weft.inference.metrics import class_lines
    from weft.intervals import accuracy_text, too_few_text

    print(
        f"{result.model} on {result.data}: held-out top-1 {accuracy_text(result.top1, result.count)}, epoch"
        f" {result.best_epoch} of {result.epochs} (the best)"
    )
    for line in result.notes:
        print(line)
    print(f"model:  {result.out / 'best'}\nreport: {result.out / 'report' / 'report.html'}")
    folds = result.cross_validation
    if folds is not None:
        print("\n".join((str(folds), *class_lines(folds.evaluation))))
        print(f"report: {result.out / 'folds' / 'report' / 'report.html'}")
    evaluation = result if folds is None else folds.evaluation
    if warning := too_few_text(evaluation.top1, evaluation.count):
        note(warning)


def _print_sweep(finding: LrFinding) -> None:
    """Print a sweep over learning rates and the suggested one."""
    rows = [(f"{point.lr:.1e}", f"{point.loss:.3f}", f"{point.smoothed:.3f}") for point in finding.points[::5]]
    print(table(("lr", "loss", "smoothed"), rows))
    print(f"suggested: --set optim.lr={finding.lr:.1e}")
