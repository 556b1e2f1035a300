"""`weft compare`: compare models by accuracy and speed on your images and your machine."""

from __future__ import annotations

import argparse
import re

from weft.cli.options import RUN_OPTIONS, add_common, example, print_json, run_settings, table, whole
from weft.errors import UsageError

HELP = "train several models under one protocol, and recommend one"

EXAMPLE = """
weft compare photos/                                   # one model per family, DeiT and ResNet
weft compare photos/ --budget 2h --max-latency 10ms --max-size 20MB
weft compare photos/ --models levit_256 cvt_13 resnet50 --seeds 3 --out runs/compare

Repeat the command to resume after a stop; finished runs are kept. Report: runs/compare-photos/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("data", metavar="DATA", help="folder of images, or any other source that `weft train` accepts")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=[], help="models to compare (default: five of similar cost)"
    )
    parser.add_argument("--budget", metavar="TIME", help="time limit for all training runs together, for example 2h")
    parser.add_argument("--seeds", metavar="N", default="1", help="training runs per model (default: 1)")
    parser.add_argument("--max-latency", metavar="TIME", help="limit on the latency of one image, for example 10ms")
    parser.add_argument("--max-size", metavar="SIZE", help="limit on the file size, for example 20MB")
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where training runs (default: local)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="concurrent training runs (default: 1)")
    add_common(parser, "--recipe", *RUN_OPTIONS)
    add_common(parser, "--out", out="default: runs/compare-DATA")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Compares, and prints the tables and what to take."""
    latency = None if args.max_latency is None else milliseconds("--max-latency", args.max_latency)
    size = None if args.max_size is None else megabytes("--max-size", args.max_size)
    from weft.study import compare
    from weft.train.run import seconds_of

    found = compare(
        args.data,
        models=args.models,
        budget=None if args.budget is None else seconds_of(args.budget, "--budget"),
        seeds=whole("--seeds", args.seeds),
        recipe=args.recipe,
        settings=run_settings(args),
        max_latency_ms=latency,
        max_megabytes=size,
        out=args.out,
        engine=args.engine,
        jobs=whole("--jobs", args.jobs),
        force=args.force,
        quiet=args.quiet,
    )
    if args.json:
        print_json(found.as_dict())
        return 0
    from weft.study.frontier import TRAINED, USED, trained_cells, used_rows

    print(table(TRAINED, [trained_cells(entry) for entry in found.entries if entry.error is None]))
    print()
    print(table(USED, used_rows(found)))
    for entry in found.entries:
        if entry.error is not None:
            print(f"failed: {entry.name}: {entry.error}")
    print(f"\n{found.advice}\n\nreport: {found.out / 'report.html'}")
    return 0


def milliseconds(option: str, text: str) -> float:
    """A short time, such as 10ms or 0.5s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"{option} must be a time such as 10ms or 0.5s; got '{text}'.")
    return float(found[1]) * (1000 if found[2] == "s" else 1)


def megabytes(option: str, text: str) -> float:
    """A size, such as 20MB or 800kB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG])B", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"{option} must be a size such as 20MB; got '{text}'.")
    return float(found[1]) * {"k": 1e-3, "K": 1e-3, "M": 1.0, "G": 1e3}[found[2]]
