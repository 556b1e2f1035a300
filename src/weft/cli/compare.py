"""`weft compare`: which model, at which speed, on one's own pictures and one's own machine."""

from __future__ import annotations

import argparse
import re

from weft.cli.options import RUN_OPTIONS, add_common, example, print_json, run_settings, table, whole
from weft.errors import UsageError

HELP = "train several models alike, and say which to take"

EXAMPLE = """
weft compare photos/                                   # one of each family, a DeiT and a ResNet
weft compare photos/ --budget 2h --max-latency 10ms --max-size 20MB
weft compare photos/ --models levit_256 cvt_13 resnet50 --seeds 3 --out runs/compare

Stopped, the same command goes on; what is done is not run again. The report: runs/compare-photos/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("data", metavar="DATA", help="a folder of images, or any other source that `weft train` takes")
    parser.add_argument("--models", nargs="+", metavar="NAME", default=[], help="default: five of like cost")
    parser.add_argument("--budget", metavar="TIME", help="of all trainings together, such as 45m or 2h")
    parser.add_argument("--seeds", metavar="N", default="1", help="trainings of each (default: 1)")
    parser.add_argument("--max-latency", metavar="TIME", help="what one image may take where it is used, such as 10ms")
    parser.add_argument("--max-size", metavar="SIZE", help="what the file may take, such as 20MB")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="default: local")
    parser.add_argument("--jobs", metavar="N", default="1", help="trainings side by side (default: 1)")
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
