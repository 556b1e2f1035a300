"""`weft study`: repeat the papers' experiments, and compare with the papers' numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import print_json, run_settings, table
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.study.result import ExperimentResult


def study(
    name: str | None = None,
    /,
    *data: str,
    scale: Annotated[Literal["small", "paper"], Parameter(metavar="small|paper")] = "small",
    seeds: Annotated[opt.Positive | None, Parameter(metavar="N")] = None,
    only: Annotated[opt.Words, Parameter(metavar="VARIANT")] = None,
    plan: bool = False,
    settings: opt.Settings = None,
    out: opt.Out = None,
    sweep: opt.Sweep = opt.Sweep(),
    plugins: opt.Plugins = opt.Plugins(),
    output: opt.Output = opt.Output(),
) -> int:
    """Repeat an experiment of the papers, and compare with the paper's numbers.

    Args:
        name: study name or YAML file (default: list all studies)
        data: training data, or NAME=DATA for each dataset of the study (default: that of the study)
        scale: size of the runs (default: small)
        seeds: runs per variant (default: that of the study)
        only: run only these variants, and those that they are compared with
        plan: print the plan, and exit
        settings: recipe setting, for example optim.lr=3e-4; may be repeated (all: `weft recipes settings`)
        out: output directory: report.html, results.json (default: runs/study-NAME-SCALE)

    Example:
        weft study                                         # list the studies
        weft study ceit-leff --plan                        # its variants and number of runs
        weft study ceit-leff cifar10 --seeds 3 --out studies/leff
        weft study transfer cifar10=images/cifar10 cifar100=images/cifar100
        weft study mine.yaml photos/ --jobs 2

        Repeat the command to resume after a stop; finished runs are kept, also with more --seeds or other --only.
        Report: studies/leff/report.html
    """
    if name is None:
        if plan or output.force or sweep != opt.Sweep() or any((seeds, only, settings, out)):
            raise UsageError("An option of a study needs NAME, the study; got none. weft study lists the studies.")
        return _list(output.json)
    import weft.study as library

    places = _data(data)
    if plan:
        from weft.study.run import planned_runs

        found, of_recipe = library.load_study(name), run_settings(settings, sweep)
        rows = planned_runs(found, scale, seeds=seeds, only=only or (), settings=of_recipe, data=places)
        if output.json:
            print_json(rows)
            return 0
        print(f"{found.title}\n{found.claim} ({found.source})\n")
        for row in rows:
            row |= {"paper": f"{row['paper']:g}" if row["paper"] else "", "epochs": row["epochs"] or "-"}
        header = ("variant", "paper %", "model", "epochs", "runs", "settings")
        print(table(header, [tuple(row.values()) for row in rows]))
        size = found.scales[scale]
        print(f"\n{scale}: recipe {size.recipe}, data {' '.join(data) or size.data}")
        return 0
    result = library.run_study(
        name, places, scale=scale, seeds=seeds, only=only or (), **shared_arguments(settings, out, sweep, output)
    )
    show(result, as_json=output.json)
    if not any(row.top1 for row in result.rows):
        raise UsageError(
            f"None of the runs of study {result.study.name} finished. The reasons are in {result.out / 'report.html'};"
            " repeat the command to train them again."
        )
    return 0


def shared_arguments(
    settings: list[str] | None, out: str | None, sweep: opt.Sweep, output: opt.Output
) -> dict[str, Any]:
    """Return the arguments that `compare` and `run_study` share."""
    where = {"engine": sweep.engine, "jobs": sweep.jobs, "threads": sweep.threads}
    return {"settings": run_settings(settings, sweep), "out": out, "force": output.force, **where}


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


def _data(given: Sequence[str]) -> str | dict[str, str] | None:
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
