"""`weft study`: repeat the papers' experiments, and compare with the papers' numbers."""

from __future__ import annotations

import argparse
import re
from typing import Any

from weft.cli.experiment import add_experiment_options, experiment_arguments, show
from weft.cli.options import RUN_OPTIONS, example, print_json, refuse_options_of_others, table, whole
from weft.errors import UsageError

HELP = "repeat an experiment of the papers, and compare with the paper's numbers"

EXAMPLE = """
weft study                                         # list the studies
weft study ceit-leff --plan                        # its variants and number of runs
weft study ceit-leff cifar10 --seeds 3 --out studies/leff
weft study transfer cifar10=images/cifar10 cifar100=images/cifar100
weft study mine.yaml photos/ --jobs 2

Repeat the command to resume after a stop; finished runs are kept, also with more --seeds or other --only.
Report: studies/leff/report.html
"""

OF_ONE = ("--seeds", "--only", "--plan", "--threads", "--out", "--force", *RUN_OPTIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft study [NAME [DATA ...]] [options]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="study name or YAML file (default: list all studies)")
    parser.add_argument(
        "data",
        nargs="*",
        metavar="DATA",
        help="training data, or NAME=DATA for each dataset of the study (default: that of the study)",
    )
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
    add_experiment_options(parser, "runs/study-NAME-SCALE")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """List the studies, show the plan of one, or run it."""
    if args.name is None:
        refuse_options_of_others(args, "study", "list", {"list": (), "weft study NAME": OF_ONE})
        return _list(args.json)
    seeds, data = None if args.seeds is None else whole("--seeds", args.seeds), _data(args.data)
    arguments = experiment_arguments(args)
    if args.plan:
        return _plan(args, seeds, arguments["settings"])
    from weft.study import run_study

    result = run_study(args.name, data, scale=args.scale, seeds=seeds, only=args.only, **arguments)
    show(result, as_json=args.json)
    if not any(row.top1 for row in result.rows):
        raise UsageError(
            f"None of the runs of study {result.study.name} finished. The reasons are in {result.out / 'report.html'};"
            " repeat the command to train them again."
        )
    return 0


def _data(given: list[str]) -> str | dict[str, str] | None:
    """Return DATA: one place, or place by name."""
    if len(given) == 1 and not re.match(r"[\w-]+=", given[0]):
        return given[0]
    pairs = [text.partition("=") for text in given]
    for name, equals, place in pairs:
        if not (name and equals and place):
            raise UsageError(f"Several DATA must be NAME=DATA, such as cifar10=images/cifar10; got '{name}{equals}'.")
    places = {name: place for name, _, place in pairs}
    if len(places) < len(pairs):
        raise UsageError(f"Every dataset must be given once; got {' '.join(given)}. Leave out the other place.")
    return places or None


def _list(as_json: bool) -> int:
    from weft.study.plan import read_study, study_names

    studies = [read_study(name) for name in study_names()]
    if as_json:
        print_json(
            [{"name": s.name, "title": s.title, "source": s.source, "variants": len(s.variants)} for s in studies]
        )
    else:
        print(table(("study", "variants", "title"), [(s.name, len(s.variants), s.title) for s in studies]))
    return 0


def _plan(args: argparse.Namespace, seeds: int | None, settings: dict[str, Any]) -> int:
    from weft.progress import loading

    with loading():
        from weft.study import load_study
        from weft.study.run import planned_runs

    study = load_study(args.name)
    rows = planned_runs(study, args.scale, seeds=seeds, only=args.only, settings=settings, data=_data(args.data))
    if args.json:
        print_json(rows)
        return 0
    size = study.scales[args.scale]
    print(f"{study.title}\n{study.claim} ({study.source})\n")
    for row in rows:
        row |= {"paper": f"{row['paper']:g}" if row["paper"] else "", "epochs": row["epochs"] or "-"}
    print(table(("variant", "paper %", "model", "epochs", "runs", "settings"), [tuple(row.values()) for row in rows]))
    print(f"\n{args.scale}: recipe {size.recipe}, data {' '.join(args.data) or size.data}")
    return 0
