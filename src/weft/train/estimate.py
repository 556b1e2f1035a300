"""Duration, memory and disk space of a training run before it starts, and how fast its images are loaded.

`weft train --plan` runs a few steps; `weft data bench` loads images with several numbers of processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.data.loader import ImageLoader
from weft.data.order import epochs_of
from weft.data.workers import MEASURED
from weft.inference.torch_model import infer
from weft.machine.processor import available_cores
from weft.machine.runtime import Runtime
from weft.machine.system import peak_mib
from weft.models.contract import evaluation_mode, preprocessing
from weft.progress import Work, clock, rate
from weft.text import count
from weft.train.plan import Plan, batch_arithmetic
from weft.train.refusals import memory_error, refusing
from weft.train.reporter import LESS_WAITING, MOST_WAITING
from weft.train.request import FINETUNE
from weft.train.timing import step_times, time_step, timed

STEPS, BATCHES = 20, 5  # training steps and validation batches that are timed
LEAST = 3  # of them, also if that takes longer than `seconds`
WARM_UP = 3


@dataclass(frozen=True)
class PlannedRun:
    """A training run before it starts, with its measured speed.

    Attributes:
        batch: images of a step, over devices and accumulated parts, and where it runs.
        folds: number of runs of a cross-validation; 1 without. The other numbers are those of one run.
        step_s: seconds of a step: the median of the computation, and the mean of the waiting, which comes in bursts.
        data_wait: percentage of it that is spent waiting for images.
        evaluation_s: seconds of an evaluation.
        memory_mib, gpu_mib: peak memory of the training process, and of its GPU.
        states: number of saved states that are kept; each has `state_bytes`, and each of two models `model_bytes`.
    """

    recipe: str
    model: str
    img_size: tuple[int, int]
    train: int
    val: int
    classes: int
    batch: str
    folds: int
    epochs: int
    steps_per_epoch: int
    steps: int
    evaluations: int
    timed_steps: int
    step_s: float
    data_wait: float
    workers: int
    evaluation_s: float
    memory_mib: int
    gpu_mib: int | None
    states: int
    state_bytes: int
    model_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of training and evaluation, of all folds, without start and final report."""
        return self.folds * (self.steps * self.step_s + self.evaluations * self.evaluation_s)

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) lines for the terminal."""
        folds = f" x {self.folds} folds" if self.folds > 1 else ""
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + self.seconds))
        waiting = f"{self.data_wait:.0f} % of the time"
        state, model = (f"{size / 2**20:,.1f} MiB" for size in (self.state_bytes, self.model_bytes))
        gpu = f", {self.gpu_mib:,} MiB of the GPU" if self.gpu_mib is not None else ""
        advice = [("advice", f"Training waits {waiting}. {LESS_WAITING}")] if self.data_wait > MOST_WAITING else []
        return [
            ("model", f"{self.model} at {self.img_size[0]}x{self.img_size[1]} pixels, recipe {self.recipe}"),
            ("images", f"{self.train:,} for training, {self.val:,} held out, {self.classes:,} classes"),
            ("batch", self.batch),
            ("steps", f"{self.steps:,} = {count(self.epochs, 'epoch')} of {self.steps_per_epoch:,} steps{folds}"),
            ("step", f"{self.step_s:.3g} s over {self.timed_steps} steps, waiting for images {waiting}"),
            ("evaluation", f"{self.evaluation_s:.3g} s x {self.evaluations}{folds}"),
            ("duration", f"about {clock(self.seconds)}; if it starts now, until {end}"),
            ("memory", f"{self.memory_mib:,} MiB{gpu}"),
            ("disk", f"{state} x {self.states} states + {model} x 2 models{folds}"),
            *advice,
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {**dataclasses.asdict(self), "seconds": self.seconds}


def measure_run(plan: Plan, seconds: float) -> PlannedRun:
    """Run the first steps of a plan, and validation batches.

    Args:
        plan: of which everything is decided; its network is changed.
        seconds: time after which no further step is timed, if `LEAST` are.

    Raises:
        UsageError: a step does not work with these settings, or does not fit into memory.
    """
    recipe, runtime, splits, base = plan.recipe, plan.runtime, plan.splits, plan.request.base
    height, width = preprocessing(plan.build())["input_size"][1:]
    batches, val, learner = plan.batches, plan.val_batches, plan.learner()
    if batches.pace is not None:  # chooses a number of workers as early as possible, for the time of the whole run
        batches.pace.start_s *= min(MEASURED / (plan.steps * recipe.accumulate), 1.0)
    if has_gpu := runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)
    requirement = f"{recipe.model} must support training with these settings"
    with refusing(requirement, memory_error(recipe)), Work("timing steps", STEPS, unit="steps") as work:
        times = step_times(learner, plan.all_steps())
        waiting, working, timed_steps = _steady(times, batches, runtime, STEPS, seconds, work)
        val.pace, batch_s = None, 0.0
        val.use(batches.num_workers)
        if len(val.places()):  # of several processes, one may have no image
            work.unit = "batches"
            work.begin("timing an evaluation", BATCHES)
            again = (images for _ in itertools.count() for images, _ in val)
            with evaluation_mode(learner.eval_model):
                times = timed(lambda images: infer(learner.eval_model, images, runtime), again)
                batch_s = sum(_steady(times, val, runtime.alone(), BATCHES, seconds / 6, work)[:2])
    gpu_mib = torch.cuda.max_memory_allocated(runtime.device) >> 20 if has_gpu else 0
    step_s, waiting, batch_s, host_mib, gpu_mib = runtime.max(
        [waiting + working, waiting, batch_s, peak_mib(), gpu_mib]
    )
    epochs = epochs_of(plan.steps, plan.steps_per_epoch)
    is_chosen = base is None and recipe.pretrained and not plan.request.says("pretrained")
    return PlannedRun(
        recipe=FINETUNE if is_chosen else str(base or "default"),
        model=str(recipe.model),
        img_size=(height, width),
        train=len(splits.train),
        val=len(splits.val),
        classes=len(splits.classes),
        batch=f"{batch_arithmetic(recipe, runtime.world)}, on {runtime.device} in {runtime.precision}",
        folds=(recipe.data.folds or 1) if recipe.data.fold is None else 1,
        epochs=epochs,
        steps_per_epoch=plan.steps_per_epoch,
        steps=plan.steps,
        evaluations=math.ceil(epochs / recipe.evaluate_every) + (recipe.head_init == "probe"),
        timed_steps=timed_steps,
        step_s=step_s,
        data_wait=100 * waiting / step_s,
        workers=batches.num_workers,
        evaluation_s=batch_s * val.order.steps_per_epoch,
        memory_mib=int(host_mib),
        gpu_mib=int(gpu_mib) if has_gpu else None,
        states=recipe.save.keep,
        state_bytes=sum(tensor.nbytes for tensor in learner.state()[0].values()),
        model_bytes=sum(tensor.nbytes for tensor in learner.eval_model.state_dict().values()),
    )


def _steady(
    times: Iterable[tuple[float, float]],
    batches: ImageLoader,
    runtime: Runtime,
    number: int,
    limit_s: float,
    work: Work,
) -> tuple[float, float, int]:
    """Return the mean of waiting, the median of working, and their number, from when the speed is steady."""
    measured, began, workers, first = list[tuple[float, float]](), time.perf_counter(), 0, WARM_UP
    for place, seconds in enumerate(times):
        if batches.num_workers != workers:
            workers = batches.num_workers
            first = place + max(workers, WARM_UP)
            number = math.ceil(number / workers) * workers  # equal workers have their batches ready at the same time
        measured.append(seconds)
        done = len(measured) - first
        work.update(max(done, 0), number)
        is_late = time.perf_counter() - began >= limit_s
        if not any(runtime.max([done < (LEAST if is_late else number)])):
            break
    waiting, working = zip(*measured[first:], strict=True)
    return statistics.fmean(waiting), statistics.median(working), len(working)


class LoadingRate(NamedTuple):
    """Training images per second of a number of worker processes; 0 is the training process itself."""

    workers: int
    images_per_second: float


@dataclass(frozen=True)
class Loading:
    """Result of a measurement.

    Attributes:
        model, device, precision: what trains.
        training: images per second that its training steps take, without loading.
        rates: of loading alone.
    """

    model: str
    device: str
    precision: str
    training: float
    rates: list[LoadingRate]

    @property
    def enough(self) -> int | None:
        """Smallest number of workers that load as fast as the steps; None if none does."""
        return next((one.workers for one in self.rates if one.images_per_second >= self.training), None)

    def headline(self) -> str:
        """Return a sentence on the number of workers."""
        steps = f"{self.model} trains on {self.device} in {self.precision} ({rate(self.training, 'images')})"
        if self.enough is not None:
            return f"--workers {self.enough} loads as fast as {steps}."
        best = max(self.rates, key=lambda one: one.images_per_second)
        waiting = 100 * (1 - best.images_per_second / self.training)
        return (
            f"No number of processes loads as fast as {steps}: with --workers {best.workers}, training waits"
            f" {waiting:.0f} % of the time. Make the images smaller once: weft data prepare DATA PACKED."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        rates = [one._asdict() for one in self.rates]
        return {**dataclasses.asdict(self), "rates": rates, "enough": self.enough}


def measure_loading(plan: Plan, seconds: float) -> Loading:
    """Load training images with 0, 1, 2, 4 ... processes up to the number of cores, and time training steps.

    Args:
        plan: of a run with one process.
        seconds: time for each number, besides that to start the processes.
    """
    plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, workers=0))
    recipe, runtime, batches = plan.recipe, plan.runtime, plan.batches
    size = batches.order.batch_size // recipe.accumulate
    step = time_step(recipe, size, len(plan.splits.classes), runtime)
    cores = available_cores()
    counts = [0, *itertools.takewhile(lambda count: count < cores, (2**power for power in range(11))), cores]
    rates = []
    with Work("loading", len(counts)) as work:
        for workers in counts:
            batches.use(workers)
            rates.append(LoadingRate(workers, _rate(batches, seconds)))
            work.advance(1)
    batches.use(0)
    return Loading(str(recipe.model), str(runtime.device), runtime.precision, size / step, rates)


def _rate(batches: ImageLoader, seconds: float) -> float:
    """Return the images per second, once every process has loaded what it loads in advance."""
    ahead, count, start, now = 2 * batches.num_workers + 1, 0, 0.0, 0.0  # torch: 2 batches per process
    for epoch in itertools.count():
        batches.start_at(epoch)
        for images, _ in batches:
            now = time.perf_counter()
            if ahead:
                ahead -= 1
                start = now
                continue
            count += len(images)
            if now - start >= seconds:
                return count / (now - start)
    raise AssertionError
