"""`weft study`: repeat the papers' experiments, and compare with the papers' numbers."""

from __future__ import annotations

import argparse
import re
from importlib import resources
from pathlib import Path
from typing import Any

from weft.cli.options import (
    RUN_OPTIONS,
    add_common,
    example,
    print_json,
    refuse_options_of_others,
    run_settings,
    table,
    whole,
)
from weft.errors import UsageError, unknown
from weft.processor import MAX_THREADS

HELP = "repeat an experiment of the papers, and compare with the paper's numbers"

EXAMPLE = """
weft study                                         # list the studies
weft study ceit-leff --plan                        # its variants and number of runs
weft study ceit-leff cifar10 --seeds 3 --out studies/leff
weft study transfer cifar10=images/cifar10 cifar100=images/cifar100
weft study mine.yaml photos/ --jobs 2

Repeat the command to resume after a stop. Runs in studies/leff/runs.csv are not repeated, also on another machine.
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
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where training runs (default: local)"
    )
    parser.add_argument("--jobs", metavar="N", default="1", help="concurrent training runs (default: 1)")
    parser.add_argument(
        "--threads", metavar="N", help="CPU threads per training run (default: the cores shared among --jobs)"
    )
    add_common(parser, *RUN_OPTIONS)
    add_common(parser, "--out", out="default: runs/study-NAME-SCALE")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """List the studies, show the plan of one, or run it."""
    if args.name is None:
        refuse_options_of_others(args, "study", "list", {"list": (), "weft study NAME": OF_ONE})
        return _list(args.json)
    settings = run_settings(args)
    seeds, jobs = None if args.seeds is None else whole("--seeds", args.seeds), whole("--jobs", args.jobs)
    _check(args, settings)
    if args.plan:
        return _plan(args, settings)
    threads = None if args.threads is None else whole("--threads", args.threads, MAX_THREADS)
    from weft.progress import loading

    with loading():
        from weft.study import run_study

    result = run_study(
        args.name,
        _data(args.data),
        scale=args.scale,
        seeds=seeds,
        only=args.only,
        settings=settings,
        out=args.out,
        engine=args.engine,
        jobs=jobs,
        threads=threads,
        force=args.force,
    )
    if args.json:
        print_json(result.as_dict())
    else:
        from weft.study.result import HEADER, cells

        print(table(HEADER, [cells(row) for row in result.rows]))
        for row in result.rows:
            for seed, reason in row.errors:
                print(f"failed: {row.variant}, seed {seed}: {reason}")
        print(f"report: {result.out / 'report.html'}")
    if not any(row.top1 for row in result.rows):
        raise UsageError(
            f"None of the runs of study {result.study.name} finished. The reasons are in {result.out / 'report.md'};"
            " repeat the command to train them again."
        )
    return 0


def _check(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Check what can be checked before torch is imported: names, settings, data and the output directory."""
    from weft.data.folder import check_outside
    from weft.data.open import check_exists
    from weft.devices import check_device
    from weft.files import refuse_taken
    from weft.recipes import load_recipe

    path = Path(args.name)
    names = sorted(item.name[:-5] for item in resources.files("weft.study").iterdir() if item.name.endswith(".yaml"))
    if path.suffix not in (".yaml", ".yml") and len(path.parts) == 1 and args.name not in names:
        raise unknown("study", args.name, names, "weft study, or give a path ending in .yaml")
    check_device(load_recipe(None, list(settings.items())).device)
    data = _data(args.data)
    for place in data.values() if isinstance(data, dict) else [data] if data is not None else []:
        check_exists(place)
        if args.out is not None:
            check_outside(args.out, place)
    if args.out is not None and not args.force and not (Path(args.out) / "study.json").exists():
        refuse_taken(Path(args.out), (), force=False)


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


def _plan(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from weft.progress import loading

    with loading():
        from weft.study import load_study
        from weft.study.run import planned_runs

    study = load_study(args.name)
    seeds = None if args.seeds is None else whole("--seeds", args.seeds)
    rows = planned_runs(study, args.scale, seeds=seeds, only=args.only, settings=settings, data=_data(args.data))
    if args.json:
        print_json([row._asdict() for row in rows])
    else:
        size = study.scales[args.scale]
        print(f"{study.title}\n{study.claim} ({study.source})\n")
        shown = [(r.variant, f"{r.paper:g}" if r.paper else "", r.model, r.epochs or "-", r.runs, r.set) for r in rows]
        print(table(("variant", "paper %", "model", "epochs", "runs", "settings"), shown))
        print(f"\n{args.scale}: recipe {size.recipe}, data {' '.join(args.data) or size.data}")
    return 0
