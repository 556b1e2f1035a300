"""Options, checks and output that `weft compare` and `weft study` share."""

from __future__ import annotations

import argparse
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


def experiment_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `compare` and `run_study` of these options."""
    threads = None if args.threads is None else whole("--threads", args.threads, MAX_THREADS)
    where = {"engine": args.engine, "jobs": whole("--jobs", args.jobs), "threads": threads}
    return {"settings": run_settings(args), "out": args.out, "force": args.force, **where}


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
