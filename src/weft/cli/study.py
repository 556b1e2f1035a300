"""`weft study`: repeat the papers' experiments, and compare with the papers' numbers."""

from __future__ import annotations

import argparse
from typing import Any

from weft.cli.options import RUN_OPTIONS, add_common, example, print_json, run_settings, table, whole

HELP = "repeat an experiment of the papers, and compare with the paper's numbers"

EXAMPLE = """
weft study                                         # list the studies
weft study ceit-leff --plan                        # its variants and number of runs
weft study ceit-leff cifar10 --seeds 3 --out studies/leff
weft study mine.yaml photos/ --jobs 2

Repeat the command to resume after a stop; finished runs are kept. Report: studies/leff/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft study [NAME [DATA]] [options]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="study name or YAML file (default: list all studies)")
    parser.add_argument("data", nargs="?", metavar="DATA", help="training data (default: that of the study)")
    parser.add_argument(
        "--scale", choices=("small", "paper"), default="small", help="size of the runs (default: small)"
    )
    parser.add_argument("--seeds", metavar="N", help="runs per variant (default: that of the study)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        default=[],
        help="run only these variants, and those that they are compared with",
    )
    parser.add_argument("--plan", action="store_true", help="print the plan, and exit")
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where training runs (default: local)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="concurrent training runs (default: 1)")
    add_common(parser, *RUN_OPTIONS)
    add_common(parser, "--out", out="default: runs/study-NAME-SCALE")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Lists, plans or runs."""
    if args.name is None:
        return _list(args.json)
    settings = run_settings(args)
    if args.plan:
        return _plan(args, settings)
    from weft.study import run_study

    result = run_study(
        args.name,
        args.data,
        scale=args.scale,
        seeds=None if args.seeds is None else whole("--seeds", args.seeds),
        only=args.only,
        settings=settings,
        out=args.out,
        engine=args.engine,
        jobs=whole("--jobs", args.jobs),
        force=args.force,
        quiet=args.quiet,
    )
    if args.json:
        print_json(result.as_dict())
    else:
        from weft.study.report import HEADER, cells

        print(table(HEADER, [cells(row) for row in result.rows]))
        for row in result.rows:
            for seed, reason in row.errors:
                print(f"failed: {row.variant}, seed {seed}: {reason}")
        print(f"report: {result.out / 'report.html'}")
    return 0


def _list(as_json: bool) -> int:
    from weft.study import load_study, study_names

    studies = [load_study(name) for name in study_names()]
    if as_json:
        print_json(
            [{"name": s.name, "title": s.title, "source": s.source, "variants": len(s.variants)} for s in studies]
        )
    else:
        print(table(("study", "variants", "title"), [(s.name, len(s.variants), s.title) for s in studies]))
    return 0


def _plan(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from weft.study import load_study
    from weft.study.run import planned_runs

    study = load_study(args.name)
    seeds = None if args.seeds is None else whole("--seeds", args.seeds)
    rows = planned_runs(study, args.scale, seeds=seeds, only=args.only, settings=settings)
    if args.json:
        print_json([row._asdict() for row in rows])
    else:
        size = study.scales[args.scale]
        print(f"{study.title}\n{study.claim} ({study.source})\n")
        shown = [(r.variant, f"{r.paper:g}" if r.paper else "", r.model, r.epochs or "-", r.runs, r.set) for r in rows]
        print(table(("variant", "paper %", "model", "epochs", "runs", "set"), shown))
        print(f"\n{args.scale}: recipe {size.recipe}, data {args.data or size.data}")
    return 0
