"""`weft train`: train an image classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from weft.cli import options as opt
from weft.cli.options import flat, given, in_group, note, pairs, print_json, table
from weft.errors import UsageError
from weft.progress import is_first_process

if TYPE_CHECKING:
    from weft.train import PlannedRun, RunResult
    from weft.train.lr_finder import LrFinding

    class OfRecipe:
        """The settings of the recipe with an option."""

else:  # every setting of the recipe with an option
    NAMES = [name for names in opt.GROUPS.values() for name in names]
    OfRecipe = flat(type("OfRecipe", (), {"__annotations__": dict.fromkeys(NAMES, ""), **dict.fromkeys(NAMES)}))


def train(
    data: str | None = None,
    /,
    *,
    recipe: Annotated[opt.Recipe, in_group("Training", alias="--config")] = None,
    settings: opt.Settings = None,
    from_scratch: Annotated[bool, in_group("Network")] = False,
    candidates: Annotated[str, in_group("Network", metavar="NAMES")] = "",
    budget: Annotated[str | None, in_group("Training", metavar="TIME")] = None,
    out: opt.Out = None,
    resume: Annotated[str | None, in_group("Stop and resume", metavar="RUN")] = None,
    override: Annotated[bool, in_group("Stop and resume")] = False,
    max_time: Annotated[str | None, in_group("Stop and resume", metavar="TIME")] = None,
    plan: bool = False,
    find_lr: bool = False,
    preview: Annotated[str | None, in_group("Options", metavar="FILE")] = None,
    track: Annotated[str | None, in_group("Output", metavar="NAMES")] = None,
    of_recipe: OfRecipe = OfRecipe(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Train a classifier on a folder of images.

    Args:
        data: folder of images, or `digits`; not needed if the recipe has it
        settings: recipe setting, for example optim.lr=3e-4; may be repeated (all: `weft recipes settings`)
        from_scratch: start from random weights also where weft would use public ones
        candidates: networks with public weights among which the images choose, for example levit_256,resnet50.a1_in1k
        budget: time for the run, for example 1h: fine-tune for as many epochs as fit (default: 15m without --model)
        out: output directory: best/, last/, report/ (default: runs/MODEL-DATA, or with a number)
        resume: resume a stopped run (bit-exact)
        override: with --resume: allow changed settings
        max_time: save and stop after 90s, 45m or 1h30m (exit code 143)
        plan: time 20 steps and print steps, duration, memory and disk space; writes no files
        find_lr: try learning rates and suggest one; writes no files
        preview: write a preview of augmented training images, and exit
        track: log to tensorboard, wandb, or tensorboard,wandb

    Example:
        weft train photos/ --out runs/photos

        photos/ holds one folder of images per class; with train/ and val/ inside, that split is used.
        Writes to runs/photos: best/ and last/ (model directories), metrics.csv, recipe.yaml, report/report.html.
        Resume after a stop or kill, with the same result: weft train --resume runs/photos
        Choose the network and settings: weft train photos/ --model levit_128s --epochs 30 --set optim.lr=5e-4
        Steps, duration and memory before the start: weft train photos/ --plan
        Fine-tune on other classes: weft train birds/ --from runs/photos
        Repeat a run: weft train --config runs/photos/recipe.yaml --out runs/again
        Two processes: torchrun --nproc-per-node 2 -m weft train photos/
    """
    if machine.threads is not None and resume is not None:
        raise UsageError(
            f"--resume uses the number of threads of the run, which its last bits depend on; got --threads"
            f" {machine.threads}. Omit it."
        )
    options = {"--plan": plan, "--find-lr": find_lr, "--preview": preview is not None}
    instead = [name for name, is_given in options.items() if is_given]
    if instead and resume is not None:
        raise UsageError(f"{instead[0]} prepares a new run, and --resume continues one. Omit one of them.")
    if len(instead) > 1:
        raise UsageError(f"{instead[0]} and {instead[1]} exclude each other; got both. Omit one of them.")
    if instead and (candidates or budget):
        option = "--candidates" if candidates else "--budget"
        raise UsageError(f"{instead[0]} trains nothing, and {option} is for a training run. Omit one of them.")
    common = {"recipe": recipe, "settings": pairs(settings), "from_scratch": from_scratch, **given(of_recipe)}
    import weft.train as library

    result: Any
    show: Callable[[Any], None]
    if preview is not None:
        page = library.preview(data, out=preview, force=output.force, **common)
        if is_first_process():
            print_json({"preview": str(page)}) if output.json else print(page)
        return 0
    if plan:
        result, show = library.planned_run(data, **common), _print_plan
    elif find_lr:
        result, show = library.find_lr(data, **common), _print_sweep
    else:
        run: dict[str, Any] = {
            "resume": resume,
            "override": override,
            "out": out,
            "max_time": max_time,
            "force": output.force,
            "candidates": candidates,
            "budget": budget,
        }
        result, show = library.train(data, track=track.split(",") if track else (), **run, **common), _print_result
    if is_first_process():
        print_json(result.as_dict()) if output.json else show(result)
    return 0


def _print_plan(planned: PlannedRun) -> None:
    """Print length, duration, memory and disk space of a run."""
    for name, value in planned.lines():
        print(f"{name + ':':<11} {value}")


def _print_result(result: RunResult) -> None:
    """Print the accuracy and the files of a run, and of its folds."""
    from weft.inference.metrics import class_lines

    print(
        f"{result.model} on {result.data}: held-out top-1 {result.evaluation.text()}, epoch"
        f" {result.best_epoch} of {result.epochs} (the best)"
    )
    for line in result.notes:
        print(line)
    print(f"model:  {result.out / 'best'}\nreport: {result.out / 'report' / 'report.html'}")
    folds = result.cross_validation
    if folds is not None:
        print("\n".join((str(folds), *class_lines(folds.evaluation))))
        print(f"report: {result.out / 'folds' / 'report' / 'report.html'}")
    if warning := (result if folds is None else folds).evaluation.too_few:
        note(warning)


def _print_sweep(finding: LrFinding) -> None:
    """Print a sweep over learning rates and the suggested one."""
    rows = [(f"{point.lr:.1e}", f"{point.loss:.3f}", f"{point.smoothed:.3f}") for point in finding.points[::5]]
    print(table(("lr", "loss", "smoothed"), rows))
    print(f"suggested: --set optim.lr={finding.lr:.1e}")
