"""`weft compare`: compare models by accuracy and speed on your images and your machine."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from weft.cli.options import RUN_OPTIONS, add_common, example, print_json, run_settings, table, whole
from weft.errors import UsageError
from weft.processor import MAX_THREADS

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
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where training runs (default: local)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="concurrent training runs (default: 1)")
    parser.add_argument(
        "--threads", metavar="N", help="CPU threads per training run (default: the cores shared among --jobs)"
    )
    add_common(parser, "--recipe", *RUN_OPTIONS)
    add_common(parser, "--out", out="default: runs/compare-DATA")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Compare models; print the tables and the recommendation."""
    latency = None if args.max_latency is None else milliseconds("--max-latency", args.max_latency)
    size = None if args.max_size is None else megabytes("--max-size", args.max_size)
    threads = None if args.threads is None else whole("--threads", args.threads, MAX_THREADS)
    from weft.data.folder import check_outside
    from weft.data.open import check_exists
    from weft.devices import check_device
    from weft.files import refuse_taken
    from weft.models.families import check_name
    from weft.recipes import load_recipe
    from weft.train.stop import seconds_of

    seeds, jobs, settings = whole("--seeds", args.seeds), whole("--jobs", args.jobs), run_settings(args)
    budget = None if args.budget is None else seconds_of(args.budget, "--budget")
    check_device(load_recipe(args.recipe, list(settings.items())).device)
    check_exists(args.data)
    if args.out is not None:
        check_outside(args.out, args.data)
    if args.out is not None and not args.force and not (Path(args.out) / "compare.json").exists():
        refuse_taken(Path(args.out), (), force=False)
    from weft.progress import loading

    with loading():
        from weft.study import compare

        for name in args.models:
            check_name(name)
    result = compare(
        args.data,
        models=args.models,
        budget=budget,
        seeds=seeds,
        recipe=args.recipe,
        settings=settings,
        max_latency_ms=latency,
        max_megabytes=size,
        out=args.out,
        engine=args.engine,
        jobs=jobs,
        threads=threads,
        force=args.force,
    )
    if args.json:
        print_json(result.as_dict())
        return 0
    from weft.study.outcome import DEPLOYED, TRAINED, deployed_rows, trained_cells

    print(table(TRAINED, [trained_cells(entry) for entry in result.entries if entry.error is None]))
    print()
    print(table(DEPLOYED, deployed_rows(result)))
    for entry in result.entries:
        if entry.error is not None:
            print(f"failed: {entry.name}: {entry.error}")
    print(f"\n{result.advice}\n\nreport: {result.out / 'report.html'}")
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
