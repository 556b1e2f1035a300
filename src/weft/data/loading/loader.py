"""Batches in an order that is a pure function of (seed, epoch), from any step on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from weft.data.loading.dataset import ImageDataset
from weft.data.loading.order import WHOLE, Key, Order, Share
from weft.errors import DataError, UsageError
from weft.text import printable

TIMEOUT_S = 60  # for one batch


_CAN_BLOCK = hasattr(signal, "pthread_sigmask") and hasattr(signal, "sigwaitinfo")  # not on macOS and Windows
_LEFT_TO_PARENT = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _obey_parent_alone(worker: int) -> None:
    """End this worker process on a SIGTERM that its parent sends, and on nobody else's; all are blocked here."""
    parent = os.getppid()

    def watch() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
            pass
        os._exit(0)

    if _CAN_BLOCK:
        threading.Thread(target=watch, daemon=True).start()


def _no_room(workers: int, error: OSError | RuntimeError) -> UsageError:
    """The error for a system that has no more files, shared memory or processes for workers."""
    hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda _: None,
    )  # torch's iterators cannot go when they are half-built
    error.__traceback__ = None  # its frames hold what was opened before
    sys.unraisablehook = hook
    reason = printable(str(error).rstrip().rpartition("\n")[2])
    return UsageError(
        f"There must be room for {workers} processes that read images; {reason}. Lower --workers (0 is the training"
        " process alone) or --batch-size, or allow more: /dev/shm (docker run --shm-size), open files (ulimit -n),"
        " processes (ulimit -u)."
    )


class EpochBatches(Sampler[list[Key]]):
    """The batches of the dataset's epoch, as keys: workers that live on need not be told the epoch."""

    def __init__(self, dataset: ImageDataset, order: Order):
        self.dataset, self.order, self.start = dataset, order, 0

    def __len__(self) -> int:
        return (self.order.steps_per_epoch - self.start) * self.order.share.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.order.steps_per_epoch):
            yield from filter(None, self.order.parts(self.dataset.epoch, step))


class ImageLoader(DataLoader):
    """A `DataLoader` that can begin within an epoch, and names a picture that is lost or hangs in one line."""

    batch_sampler: EpochBatches
    dataset: ImageDataset  # type: ignore[assignment]  # torch's own type is wider

    @property
    def order(self) -> Order:
        """Which images each step sees."""
        return self.batch_sampler.order

    def places(self) -> np.ndarray:
        """Of this process's images of an epoch, in its order, the indices in the source."""
        steps = range(self.order.steps_per_epoch)
        parts = [part for step in steps for part in self.order.parts(self.dataset.epoch, step)]
        return np.array([index for part in parts for _, index, _ in part], dtype=np.int64)

    def start_at(self, epoch: int, step: int = 0) -> None:
        """The next loop begins with this step of this epoch, both counted from 0."""
        self.dataset.set_epoch(epoch)
        self.batch_sampler.start = step

    def _get_iterator(self) -> Any:
        """Start worker processes that leave SIGINT, SIGTERM and SIGHUP to the parent, from their first instruction on.

        A signal to the group of processes (Ctrl-C, `timeout`, a cluster's scheduler) reaches the workers as well. Were
        one to end before the parent has stopped, torch would raise in the parent, in the middle of a step.
        """
        if self.num_workers == 0:
            return super()._get_iterator()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT) if _CAN_BLOCK else ()  # children inherit it
        try:
            return super()._get_iterator()
        except OSError as err:
            raise _no_room(self.num_workers, err) from None
        finally:
            if _CAN_BLOCK:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own, narrower type is private
        try:
            yield from super().__iter__()
        except DataError as err:
            # torch rebuilds a worker's exception around the text of its traceback; its last line is our message
            message = str(err).rstrip().rsplit("DataError: ", 1)[-1]
            # its frames hold the workers in a cycle, and collected from there they take five seconds each to end
            err.__traceback__ = None
            raise DataError(message) from None
        except RuntimeError as err:
            if "allocate shared memory" in str(err):
                raise _no_room(self.num_workers, err) from None
            if "timed out" not in str(err):
                raise
            err.__traceback__ = None
            self._iterator = None  # ends the workers that still answer
            raise DataError(self._hanging()) from None

    def _hanging(self) -> str:
        assert self.dataset.reading is not None, "only workers can be waited for in vain"
        names = []
        for index in self.dataset.reading.tolist():
            names += [] if index < 0 else [printable(self.dataset.source.keys[index])]
        return (
            f"Every batch must be read within {self.timeout:g} s; one was not. The workers are at {', '.join(names)}."
            " Is this file, or the disk it is on, out of reach?"
        )


def make_loader(
    dataset: ImageDataset,
    batch_size: int,
    *,
    shuffle: bool,
    seed: int = 0,
    workers: int = 0,
    drop_last: bool = False,
    repeats: int = 1,
    share: Share = WHOLE,
    timeout_s: float = TIMEOUT_S,
) -> ImageLoader:
    """Batches of (images, labels): float32 (b c h w) and int64 (b).

    Call `start_at` (or `dataset.set_epoch`) before each loop. Equal seeds and epochs give equal bits with any number
    of workers, from whatever step.

    Args:
        dataset: what to read.
        batch_size: images of a step, at least 1; a batch is this process's part of it, or a part of that.
        shuffle: a new order each epoch; else the source's.
        seed: of the order.
        workers: processes that read and decode; 0 does it here.
        drop_last: leave out a last batch that is not full.
        repeats: repeated augmentation, as in `Order`.
        share: which part of every step this process computes.
        timeout_s: how long a batch from the workers may take.

    Raises:
        UsageError: a number out of its range, `drop_last` would leave no batch, or the system has no room for workers.
    """
    if batch_size < 1 or workers < 0:
        raise UsageError(f"batch_size must be at least 1 and workers at least 0; got {batch_size} and {workers}.")
    order = Order(
        len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, repeats=repeats, share=share
    )
    if workers:
        try:
            dataset.watch(workers)
        except RuntimeError as error:
            raise _no_room(workers, error) from None
    return ImageLoader(
        dataset,
        batch_sampler=EpochBatches(dataset, order),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        timeout=timeout_s if workers else 0,
        worker_init_fn=_obey_parent_alone,
        generator=torch.Generator(),  # else every loop would draw from the global generator, and shift the model's
    )
