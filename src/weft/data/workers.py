"""How many processes read images, by the time that images and the work with them take."""

from __future__ import annotations

import math
import os

import torch

from weft.machine.processor import available_cores

START_S = 2.0  # of loading in this process, from which others are started: that takes about as long
LEAST_SHARE = 0.2  # of the time spent loading, from which others help
SPARE = 1.25  # times the number that would keep pace on average: the time of an image varies
MEASURED = 3  # batches, after one that warms up


class Pace:
    """Seconds of loading batches in this process, and of the work with them."""

    def __init__(self) -> None:
        self.batches, self.loading, self.working, self.start_s = -1, 0.0, 0.0, START_S

    def add(self, loading: float, working: float) -> None:
        """Add a batch."""
        self.batches += 1
        if self.batches:
            self.loading, self.working = self.loading + loading, self.working + working

    @property
    def is_known(self) -> bool:
        """Whether enough was measured to choose a number of processes, and loading takes long enough to need any."""
        return self.batches >= MEASURED and self.loading >= self.start_s

    def workers(self, *, on_cpu: bool) -> int:
        """Return the number of processes that load in time, at most the cores of this process.

        With a GPU, one core gives it its work, and the others load. On a CPU the work itself uses all cores, and takes
        longer by what the processes take from it.
        """
        cores = max(available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        if on_cpu:  # as in a study, whose runs share the cores
            cores = min(cores, torch.get_num_threads())
        if self.loading < LEAST_SHARE * (self.loading + self.working) or cores == 1:
            return 0
        elapsed = (self.loading + cores * self.working) / cores if on_cpu else self.working
        needed = math.ceil(SPARE * self.loading / max(elapsed, 1e-9))
        return min(needed + on_cpu, cores if on_cpu else cores - 1)

    def describe(self, workers: int) -> str:
        """Return the decision as a sentence."""
        loading, working = (1e3 * seconds / self.batches for seconds in (self.loading, self.working))
        who = (
            f"{workers} process{'es' if workers > 1 else ''} read images"
            if workers
            else "images are read between the steps"
        )
        times = f"a batch takes {loading:.0f} ms to load and {working:.0f} ms to compute"
        return f"Workers: {who}, since {times}; another number: --workers N."
