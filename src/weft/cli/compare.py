"""`weft compare`: compare models by accuracy and speed on your images and your machine."""

from __future__ import annotations

import argparse
import re

from weft.cli.experiment import add_experiment_options, experiment_arguments, show
from weft.cli.options import add_common, example, whole
from weft.errors import UsageError

HELP = "train several models under one protocol, and recommend one"

EXAMPLE = """
weft compare photos/                                   # one model per family, DeiT and ResNet
weft compare photos/ --budget 2h --max-latency 10ms --max-size 20MB
weft compare photos/ --models levit_256 cvt_13 resnet50 --seeds 3 --out runs/compare

Repeat the command to resume after a stop; finished runs are kept. Report: runs/compare-photos/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("data", metavar="DATA", help="folder of images, or any other source that `weft train` accepts")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=[], help="models to compare (default: five of similar cost)"
    )
    parser.add_argument("--budget", metavar="TIME", help="time limit for everything (approximate), for example 2h")
    parser.add_argument("--seeds", metavar="N", default="1", help="training runs per model (default: 1)")
    parser.add_argument("--max-latency", metavar="TIME", help="limit on the latency of one image, for example 10ms")
    parser.add_argument("--max-size", metavar="SIZE", help="limit on the file size, for example 20MB")
    add_common(parser, "--recipe")
    add_experiment_options(parser, "runs/compare-DATA")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Compare models; print the tables and the recommendation."""
    latency = None if args.max_latency is None else milliseconds("--max-latency", args.max_latency)
    size = None if args.max_size is None else megabytes("--max-size", args.max_size)
    from weft.study import compare
    from weft.train.stop import seconds_of

    seeds, budget = whole("--seeds", args.seeds), None if args.budget is None else seconds_of(args.budget, "--budget")
    limits = {"max_latency_ms": latency, "max_megabytes": size}
    result = compare(
        args.data,
        models=args.models,
        budget=budget,
        seeds=seeds,
        recipe=args.recipe,
        **limits,
        **experiment_arguments(args),
    )
    show(result, as_json=args.json)
    return 0


def milliseconds(option: str, text: str) -> float:
    """Parse a duration such as 10ms or 0.5s; return milliseconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} must be a time such as 10ms or 0.5s; got '{text}'.")
    return float(match[1]) * (1000 if match[2] == "s" else 1)


def megabytes(option: str, text: str) -> float:
    """Parse a size such as 20MB or 800kB; return megabytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMG])B", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} must be a size such as 20MB; got '{text}'.")
    return float(match[1]) * {"k": 1e-3, "K": 1e-3, "M": 1.0, "G": 1e3}[match[2]]
