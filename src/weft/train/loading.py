"""Measure how fast training images are loaded, and how fast the network takes them (`weft data bench`)."""

from __future__ import annotations

import dataclasses
import itertools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.data.loader import ImageLoader
from weft.machine.processor import available_cores
from weft.progress import Work, rate
from weft.train.plan import Plan
from weft.train.timing import time_step


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
