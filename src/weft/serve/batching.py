"""Micro-batching: run images of several requests in one forward pass.

One thread computes; meanwhile pictures gather, and the next batch is made of them. A bound on how many may wait keeps
the time that an accepted picture takes within reach of its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weft.data.images.crop import Pixels
from weft.serve.predictor import ModelFault, Predictor, Verdict


class Full(Exception):
    """More pictures wait than may.

    Attributes:
        seconds: after which there will be room.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(eq=False)
class _Job:
    picture: Pixels
    predictor: Predictor
    overlay: bool
    verdict: asyncio.Future[Verdict]


class Batcher:
    """Gathers pictures into batches, and gives each the verdict on its own.

    Args:
        max_batch: pictures in one forward pass.
        max_wait: seconds for which the first waits for company, where there has been some.
        max_queue: pictures that may wait.
        on_batch: told of every batch: its size and the seconds of its forward pass.
    """

    def __init__(
        self, max_batch: int, max_wait: float, max_queue: int, on_batch: Callable[[int, float], None] | None = None
    ) -> None:
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.on_batch = on_batch or (lambda size, seconds: None)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="weft-model")
        self._waiting: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._preparing = 0  # pictures that are about to arrive
        self._gathered = 1  # size of the last batch: how much company there is
        self._pace = 0.01  # seconds per picture, lately
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins; needs a running loop."""
        self._task = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Ends; what still waits is cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for job in self._waiting:
            job.verdict.cancel()
        self._waiting.clear()
        self.thread.shutdown(wait=False, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Pictures in the queue."""
        return len(self._waiting)

    @property
    def taken(self) -> int:
        """Pictures in the queue, and those that are being decoded for it."""
        return len(self._waiting) + self._preparing

    @property
    def is_working(self) -> bool:
        """Whether the task that computes is alive."""
        return self._task is not None and not self._task.done()

    @contextlib.contextmanager
    def preparing(self, count: int) -> Iterator[None]:
        """Reserves places for pictures that are being decoded, so that what was decoded is never refused.

        Raises:
            Full: there are not so many.
        """
        if self.taken + count > self.max_queue:
            raise Full(max(self.taken * self._pace, 0.1))
        self._preparing += count
        try:
            yield
        finally:
            self._preparing -= count
            self._arrived.set()

    async def answers(self, pictures: Sequence[Pixels], predictor: Predictor, overlay: bool) -> list[Verdict]:
        """Waits for the verdicts. A caller that gives up takes its pictures out of the queue."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(picture, predictor, overlay, loop.create_future()) for picture in pictures]
        self._waiting.extend(jobs)
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(job.verdict for job in jobs)))
        except BaseException:
            for job in jobs:
                job.verdict.cancel()
            raise

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            if not batch:
                continue
            begun = time.perf_counter()
            pictures, predictor = [job.picture for job in batch], batch[0].predictor
            answer = functools.partial(predictor.answer, pictures, overlay=batch[0].overlay)
            try:
                verdicts = await loop.run_in_executor(self.thread, answer)
            except Exception as error:
                if not isinstance(error, ModelFault):
                    print(f"weft: the model failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                    error = ModelFault("The model failed; the log of the service has the reason.")
                for job in batch:
                    if not job.verdict.done():
                        job.verdict.set_exception(error)
                continue
            seconds = time.perf_counter() - begun
            self._gathered = len(batch)
            self._pace += 0.1 * (seconds / len(batch) - self._pace)
            self.on_batch(len(batch), seconds)
            for job, verdict in zip(batch, verdicts, strict=True):
                if not job.verdict.done():
                    job.verdict.set_result(verdict)

    async def _gather(self) -> list[_Job]:
        """The next batch: all that waits, up to the most; one alone waits a little where others are to be expected."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.max_wait):
                while len(self._waiting) < self.max_batch and self._expects_more():
                    self._arrived.clear()
                    await self._arrived.wait()
        batch: list[_Job] = []
        while self._waiting and len(batch) < self.max_batch:
            job = self._waiting[0]
            if not job.verdict.done():
                if batch and (job.predictor is not batch[0].predictor or job.overlay is not batch[0].overlay):
                    break  # an old model answers what was prepared for it; attention costs who asked for it
                batch.append(job)
            self._waiting.popleft()
        return batch

    def _expects_more(self) -> bool:
        return self._preparing > 0 or len(self._waiting) < self._gathered
