"""Options, checks and output that `weft compare` and `weft study` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.options import RUN_OPTIONS, add_common, print_json, run_settings, table, whole
from weft.processor import MAX_THREADS

if TYPE_CHECKING:
    from weft.study.result import ExperimentResult


def add_experiment_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options; `out` is the default output directory."""
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where training runs (default: local)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="concurrent training runs (default: 1)")
    parser.add_argument(
        "--threads", metavar="N", help="CPU threads per training run (default: the cores shared among --jobs)"
    )
    add_common(parser, *RUN_OPTIONS)
    add_common(parser, "--out", "--force", "--json", "--quiet", out=f"default: {out}")


def checked_arguments(args: argparse.Namespace, places: Iterable[str], recipe: str | None = None) -> dict[str, Any]:
    """Return the arguments of `compare` and `run_study` of these options, checked as far as that needs no torch.

    Args:
        args: parsed arguments.
        places: of the datasets.
        recipe: base recipe.
    """
    from weft.data.folder import check_outside
    from weft.data.open import check_exists
    from weft.files import refuse_taken
    from weft.recipes import load_recipe
    from weft.study.directory import can_continue

    threads = None if args.threads is None else whole("--threads", args.threads, MAX_THREADS)
    jobs, settings = whole("--jobs", args.jobs), run_settings(args)
    load_recipe(recipe, list(settings.items()))
    for place in places:
        check_exists(place)
        if args.out is not None:
            check_outside(args.out, place)
    if args.out is not None and not args.force and not can_continue(Path(args.out)):
        refuse_taken(Path(args.out), (), force=False)
    where = {"engine": args.engine, "jobs": jobs, "threads": threads}
    return {"settings": settings, "out": args.out, "force": args.force, **where}


def show(result: ExperimentResult, *, as_json: bool) -> None:
    """Print the tables, the failed runs, the recommendation, and the place of the report."""
    from weft.study.result import FAILED

    if as_json:
        print_json(result.as_dict())
        return
    print("\n\n".join(table(*each) for heading, each in result.tables().items() if heading != FAILED))
    for name, seed, reason in result.failed:
        print(f"failed: {name}, seed {seed}: {reason}")
    if result.advice:
        print(f"\n{result.advice}\n")
    print(f"report: {result.out / 'report.html'}")
