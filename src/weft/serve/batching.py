"""Micro-batching: run images of several requests in one forward pass.

One thread runs the model. Images that arrive during a forward pass form the next batch. A limit on the number of
waiting images keeps the response time of accepted requests below their timeout (backpressure).
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

from weft.data.preprocessing import Pixels
from weft.errors import WeftError
from weft.inference.predictor import ImagePrediction, NonFiniteError, Predictor

TRIALS = 3  # batches of one size that are timed; the shortest time counts, as others may include a warm-up


class ModelError(WeftError):
    """The model failed on a batch, for a reason that is not in the images."""


class QueueFull(Exception):
    """The queue has no room for the images of a request.

    Attributes:
        seconds: estimated time until the queue has room.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(eq=False)
class _QueuedImage:
    image: Pixels
    predictor: Predictor
    overlay: bool
    prediction: asyncio.Future[ImagePrediction]


def batch_limit(
    seconds: Callable[[int], float], most: int, *, max_seconds: float | None = None, min_gain: float | None = None
) -> int:
    """Return the number of images to which batches are limited, by timing batches of 1, 2, 4, ... images.

    Images of one batch have their results at the same time, so a larger batch that has no higher throughput only makes
    all of them later. On a CPU, this is so beyond 2 to 8 images; on a GPU it is not.

    Args:
        seconds: run a batch of a given size and return the duration. The limit is below the first size that fails.
        most: the largest limit to return.
        max_seconds: maximum duration of a batch; a limit of 1 is returned also where one image takes longer.
        min_gain: ratio of the throughputs, above 1, that a batch of twice the size must reach; None for any.
    """
    limit, rate = 1, 0.0
    size = 1
    while True:
        try:
            duration = min(seconds(size) for _ in range(TRIALS))
        except Exception as error:  # mostly too little memory; each runtime has its own exception types
            if size == 1 or isinstance(error, WeftError):
                raise
            return limit
        is_late = size > 1 and max_seconds is not None and duration > max_seconds
        if is_late or (min_gain is not None and size / duration < min_gain * rate):
            return limit
        limit, rate = size, size / duration
        if size == most:
            return limit
        size = min(2 * size, most)


class Batcher:
    """Queue that collects images into batches and returns one prediction per image.

    Args:
        max_batch: maximum number of images per forward pass.
        max_wait: maximum time to wait for a batch to fill, in seconds.
        max_queue: maximum number of waiting images.
        on_batch: called after every forward pass with the batch size and the duration in seconds.
        on_queue: called with the number of waiting images when it has changed.
    """

    def __init__(
        self,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        on_batch: Callable[[int, float], None] = lambda size, seconds: None,
        on_queue: Callable[[int], None] = lambda waiting: None,
    ) -> None:
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.on_batch, self.on_queue = on_batch, on_queue
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="weft-model")
        self._queue: deque[_QueuedImage] = deque()
        self._arrived = asyncio.Event()
        self._reserved = 0  # images that are being decoded
        self._last_batch_size = 1  # estimate of the number of concurrent images
        self._seconds_per_image = 0.01  # moving average
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that runs the batches; needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the task and cancel the waiting images."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for queued in self._queue:
            queued.prediction.cancel()
        self._queue.clear()
        self.on_queue(0)
        self.thread.shutdown(wait=False, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Number of images in the queue."""
        return len(self._queue)

    @property
    def pending(self) -> int:
        """Number of images in the queue and of images that are being decoded for it."""
        return len(self._queue) + self._reserved

    @property
    def is_running(self) -> bool:
        """Whether the task that runs the batches is alive."""
        return self._task is not None and not self._task.done()

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve room in the queue while `count` images are decoded, so that a decoded image is never refused.

        Raises:
            QueueFull: the queue has less room.
        """
        if self.pending + count > self.max_queue:
            raise QueueFull(max(self.pending * self._seconds_per_image, 0.1))
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
            self._arrived.set()

    async def predict(self, images: Sequence[Pixels], predictor: Predictor, overlay: bool) -> list[ImagePrediction]:
        """Queue images and return their predictions. If the caller is cancelled, its images leave the queue."""
        loop = asyncio.get_running_loop()
        queued = [_QueuedImage(image, predictor, overlay, loop.create_future()) for image in images]
        self._queue.extend(queued)
        self.on_queue(self.waiting)
        self._arrived.set()
        try:
            return list(await asyncio.gather(*(item.prediction for item in queued)))
        except BaseException:
            for item in queued:
                item.prediction.cancel()
            raise

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            if not batch:
                continue
            begun = time.perf_counter()
            images, predictor = [item.image for item in batch], batch[0].predictor
            forward = functools.partial(predictor.predict, images, overlay=batch[0].overlay)
            try:
                predictions = await loop.run_in_executor(self.thread, forward)
            except Exception as error:
                if isinstance(error, NonFiniteError):
                    failure = ModelError(str(error))
                else:
                    print(f"weft: the model failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                    failure = ModelError("The model failed; see the log of the service.")
                for item in batch:
                    if not item.prediction.done():
                        item.prediction.set_exception(failure)
                continue
            seconds = time.perf_counter() - begun
            self._last_batch_size = len(batch)
            self._seconds_per_image += 0.1 * (seconds / len(batch) - self._seconds_per_image)
            self.on_batch(len(batch), seconds)
            for item, prediction in zip(batch, predictions, strict=True):
                if not item.prediction.done():
                    item.prediction.set_result(prediction)

    async def _next_batch(self) -> list[_QueuedImage]:
        """Return the next batch: all waiting images up to `max_batch`. Wait for more only if more are expected."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.max_wait):
                while len(self._queue) < self.max_batch and self._expects_more():
                    self._arrived.clear()
                    await self._arrived.wait()
        batch: list[_QueuedImage] = []
        while self._queue and len(batch) < self.max_batch:
            item = self._queue[0]
            if not item.prediction.done():
                if batch and (item.predictor is not batch[0].predictor or item.overlay is not batch[0].overlay):
                    break  # a batch has one model (another after a reload), and computes attention for all or none
                batch.append(item)
            self._queue.popleft()
        self.on_queue(self.waiting)
        return batch

    def _expects_more(self) -> bool:
        return self._reserved > 0 or len(self._queue) < self._last_batch_size
