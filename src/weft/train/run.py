"""`train`: from data and a recipe to a run directory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoints import save_model_dir
from weft.data import Splits, image_size_hint, open_data
from weft.data.image import printable
from weft.errors import UsageError
from weft.recipes import Recipe, dump, load_recipe
from weft.train.build import (
    build_model,
    default_name,
    environment,
    evaluation_batches,
    training_batches,
    training_images,
)
from weft.train.defaults import default_recipe, fill_in, overrides_of
from weft.train.loop import Learner, Meter, train_epoch
from weft.train.metrics import Evaluation, measure
from weft.train.progress import Reporter, clock, looking
from weft.train.report import write_report
from weft.train.rundir import EpochRow, make_dir, refuse_taken, write_metrics, write_text, writing
from weft.train.runtime import Runtime, StopSignals


@dataclass(frozen=True)
class RunResult:
    """What a run came to. Accuracies of the best epoch, in percent, on the held-out images.

    Attributes:
        out: the run directory.
        model: name of the model.
        data: what it learned from.
        epochs: how many were run.
        best_epoch: the one that was kept, from 1.
        count: held-out images.
        seconds: of training and evaluation together.
    """

    out: Path
    model: str
    data: str
    epochs: int
    best_epoch: int
    top1: float
    top5: float
    loss: float
    count: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**dataclasses.asdict(self), "out": str(self.out)}


def train(
    data: str | Path | None = None,
    model: str | None = None,
    *,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    limit: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Trains a classifier and leaves a run directory.

    Args:
        data: a folder of images (one folder per class, or train/ and val/ above them), or 'digits'; None where the
            recipe names it.
        model: a name; None to choose by the images' size and number.
        recipe: name of a recipe that comes with weft, or a YAML file.
        settings: dotted keys of the recipe and their values, such as `{"optim.lr": 3e-4}`.
        epochs, batch_size, img_size, seed, device, precision, workers, limit: settings that have an argument of their
            own; `limit` is the largest number of training images.
        out: the run directory; None for runs/MODEL-DATA.
        force: take the place of a run that is there.
        quiet: no progress and no notes.

    Returns:
        Where everything is, and how good the best epoch was.

    Raises:
        UsageError: a setting that does not fit, or a run directory that is taken.
        DataError: data that cannot be used.
        DivergedError: loss or gradient is not finite.
        StorageError: the disk did not take what had to be written.
    """
    given = dict(
        model=model,
        epochs=epochs,
        batch_size=batch_size,
        img_size=img_size,
        seed=seed,
        device=device,
        precision=precision,
        workers=workers,
        limit=limit,
    )
    plan = load_recipe(recipe or default_recipe(data), overrides_of(data, settings or {}, given))
    if plan.data.source is None:
        raise UsageError("Training needs images; got none. Name a folder or `digits`: weft train DATA.")
    runtime = Runtime.of(plan.device, plan.precision)
    if out is not None:
        refuse_taken(Path(out), force=force)
    with looking(quiet=quiet) as progress:
        splits = open_data(
            plan.data.source,
            val_fraction=plan.data.val_fraction,
            seed=plan.seed,
            max_bad=plan.data.max_bad,
            limit=plan.data.limit,
            progress=progress,
        )
    plan, decisions = fill_in(plan, image_size_hint(splits.train), len(splits.train))
    out = Path(out) if out is not None else Path("runs") / (plan.name or default_name(plan))
    run = _Run(plan, splits, out, runtime, Reporter(plan.epochs or 0, quiet=quiet))
    make_dir(out, force=force)
    for note in [*splits.notes, *decisions]:
        run.reporter.note(note)
    return run.carry_out()


class _Run:
    """One run on its way, from the first epoch to the report."""

    def __init__(self, recipe: Recipe, splits: Splits, out: Path, runtime: Runtime, reporter: Reporter) -> None:
        self.recipe, self.splits, self.out, self.runtime, self.reporter = recipe, splits, out, runtime, reporter
        model = build_model(recipe, len(splits.classes)).to(runtime.device)
        self.train_images = training_images(recipe, splits.train, model)
        self.train_batches = training_batches(recipe, self.train_images, model)
        self.val_batches = evaluation_batches(splits.val, model, recipe.batch_size, recipe.workers)
        self.learner = Learner(model, recipe, runtime, len(self.train_batches), reporter.epochs)
        self.history: list[EpochRow] = []
        self.best: tuple[int, Evaluation] | None = None

    def carry_out(self) -> RunResult:
        """All epochs, each followed by an evaluation and the files that keep it; then the report."""
        begun = time.perf_counter()
        recorded = dataclasses.replace(self.recipe, environment=environment(self.runtime, self.splits))
        write_text(self.out / "recipe.yaml", dump(recorded))
        with self.reporter, StopSignals() as signals:
            try:
                for epoch in range(1, self.reporter.epochs + 1):
                    self._epoch(epoch, signals)
            except (KeyboardInterrupt, SystemExit, RuntimeError) as error:
                # Ctrl-C also reaches the processes that read images; their end may be noticed before the signal
                if isinstance(error, RuntimeError) and signals.requested is None:
                    raise
                self._keep("last")
                self.reporter.note(f"Stopped after step {self.learner.step}; its weights are in {self.out / 'last'}.")
                signals.check()
                raise
        result = self._result(time.perf_counter() - begun)
        self._report(result)
        return result

    def _epoch(self, epoch: int, signals: StopSignals) -> None:
        begun = time.perf_counter()
        lr = self.learner.lr
        self.train_images.set_epoch(epoch - 1)

        def on_step(meter: Meter) -> None:
            self.reporter.step(epoch, meter)
            signals.check()

        meter = train_epoch(self.learner, self.train_batches, on_step)
        result = measure(
            self.learner.best_guess,
            self.val_batches,
            self.splits.classes,
            self.runtime,
            key_of=lambda place: printable(self.splits.val.read(place).key),
            excluded=[(printable(bad.key), bad.reason) for bad in self.splits.bad if bad.split != "train"],
            on_batch=lambda count: signals.check(),
        )
        seconds = time.perf_counter() - begun
        scores = (meter.loss, meter.top1, result.loss, result.top1, result.top5)
        row = EpochRow(epoch, self.learner.step, lr, *scores, meter.images_per_second, seconds)
        self.history.append(row)
        self._keep("last")
        is_best = self.best is None or (result.top1, -result.loss) > (self.best[1].top1, -self.best[1].loss)
        if is_best:
            self.best = (epoch, result)
            self._keep("best")
        write_metrics(self.out / "metrics.csv", self.history)
        self.reporter.epoch(row, is_best)

    def _keep(self, name: str) -> None:
        with writing(self.out / name):
            save_model_dir(self.learner.best_guess, self.out / name, label_names=self.splits.classes, force=True)

    def _result(self, seconds: float) -> RunResult:
        assert self.best is not None, "a run has at least one epoch"
        best_epoch, best = self.best
        return RunResult(
            out=self.out,
            model=str(self.recipe.model),
            data=str(self.recipe.data.source),
            epochs=len(self.history),
            best_epoch=best_epoch,
            top1=best.top1,
            top5=best.top5,
            loss=best.loss,
            count=best.count,
            seconds=seconds,
        )

    def _report(self, result: RunResult) -> None:
        assert self.best is not None
        best = self.best[1]
        params = sum(parameter.numel() for parameter in self.learner.model.parameters())
        facts = [
            (
                "held-out images",
                str(best.count) + (f", {len(best.excluded)} excluded as unreadable" if best.excluded else ""),
            ),
            ("best epoch", f"{result.best_epoch} of {result.epochs}"),
            ("top-1, top-5", f"{best.top1:.2f} %, {best.top5:.2f} %"),
            ("training images", f"{len(self.splits.train)}"),
            ("parameters", f"{params:,}"),
            ("training and evaluation", f"{clock(result.seconds)} on {self.runtime.device.type}"),
            ("again", f"weft train --config {self.out / 'recipe.yaml'} --out DIR"),
        ]
        write_report(self.out / "report", f"{result.model} on {result.data}", facts, best, self.history)
