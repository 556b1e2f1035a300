"""Data loader whose order is a pure function of (seed, epoch) and that can start at any step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from weft.data.loading.dataset import ImageDataset
from weft.data.loading.order import WHOLE, Key, Order, Share
from weft.errors import DataError, UsageError
from weft.text import printable

TIMEOUT_S = 60  # per batch


_CAN_BLOCK = hasattr(signal, "pthread_sigmask")  # not on Windows
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # not on macOS and Windows
_TERMINAL_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
_BLOCKED_SIGNALS = [*_TERMINAL_SIGNALS, signal.SIGTERM] if _CAN_WAIT else _TERMINAL_SIGNALS


def _exit_on_parent_sigterm(worker: int) -> None:
    """Ignore the signals of a terminal in this worker process, and exit on a SIGTERM from the training process only.

    On macOS and Windows a SIGTERM from any process ends the worker.
    """
    sys.excepthook = _report_error
    if not _CAN_WAIT:
        for number in _TERMINAL_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # if the worker is forked by a server from before
    parent = multiprocessing.parent_process()  # `os.getppid` would return the server
    assert parent is not None

    def watch() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent.pid:
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _report_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an uncaught error of a worker, but not that the training process stopped while it received a tensor."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, traceback)


def _resource_error(workers: int, error: OSError | RuntimeError) -> UsageError:
    """Return the error for a lack of file descriptors, shared memory or processes for workers."""
    hook, sys.unraisablehook = (
        sys.unraisablehook,
        lambda _: None,
    )  # torch's iterators raise when deleted half-built
    error.__traceback__ = None  # its frames keep open what was opened before
    sys.unraisablehook = hook
    reason = printable(str(error).rstrip().rpartition("\n")[2])
    return UsageError(
        f"There must be resources for {workers} worker processes; {reason}. Lower --workers (0 uses the training"
        " process) or --batch-size, or raise the limits: /dev/shm (docker run --shm-size), open files (ulimit -n),"
        " processes (ulimit -u)."
    )


class EpochBatches(Sampler[list[Key]]):
    """Batch sampler for the dataset's epoch. Keys contain the epoch, which persistent workers do not know."""

    def __init__(self, dataset: ImageDataset, order: Order):
        self.dataset, self.order, self.start = dataset, order, 0

    def __len__(self) -> int:
        return (self.order.steps_per_epoch - self.start) * self.order.share.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.order.steps_per_epoch):
            yield from filter(None, self.order.parts(self.dataset.epoch, step))


class ImageLoader(DataLoader):
    """A `DataLoader` that can start within an epoch, and whose errors name the unreadable or blocking image."""

    batch_sampler: EpochBatches
    dataset: ImageDataset  # type: ignore[assignment]  # torch's own type is wider

    @property
    def order(self) -> Order:
        """Order of the images over steps and epochs."""
        return self.batch_sampler.order

    def places(self) -> np.ndarray:
        """Return the source indices of this process's images of an epoch, in order."""
        steps = range(self.order.steps_per_epoch)
        parts = [part for step in steps for part in self.order.parts(self.dataset.epoch, step)]
        return np.array([index for part in parts for _, index, _ in part], dtype=np.int64)

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Start the next iteration at this step of this epoch, both from 0."""
        self.dataset.set_epoch(epoch)
        self.batch_sampler.start = step

    def _get_iterator(self) -> Any:
        """Start worker processes with SIGINT, SIGHUP and SIGTERM blocked from their first instruction.

        A signal to the process group (Ctrl-C, `timeout`, a cluster's scheduler) also reaches the workers. If a worker
        ended before the parent has stopped, torch would raise in the parent in the middle of a step.
        """
        if self.num_workers == 0:
            return super()._get_iterator()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS) if _CAN_BLOCK else ()  # children inherit it
        try:
            return super()._get_iterator()
        except OSError as err:
            raise _resource_error(self.num_workers, err) from None
        finally:
            if _CAN_BLOCK:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own, narrower type is private
        try:
            yield from super().__iter__()
        except DataError as err:
            # torch wraps a worker's exception in the text of its traceback; the last line is our message
            message = str(err).rstrip().rsplit("DataError: ", 1)[-1]
            # its frames reference the workers in a cycle; garbage-collected, each takes five seconds to end
            err.__traceback__ = None
            raise DataError(message) from None
        except RuntimeError as err:
            if "allocate shared memory" in str(err):
                raise _resource_error(self.num_workers, err) from None
            if "timed out" not in str(err):
                raise
            err.__traceback__ = None
            self._iterator = None  # ends the workers that still respond
            raise DataError(self._timeout_message()) from None

    def _timeout_message(self) -> str:
        assert self.dataset.reading is not None, "only workers time out"
        names = []
        for index in self.dataset.reading.tolist():
            names += [] if index < 0 else [printable(self.dataset.source.keys[index])]
        return (
            f"Every batch must be read within {self.timeout:g} s; one was not. The workers are reading "
            f"{', '.join(names)}. Check that this file and its disk are reachable."
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
    is_balanced: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> ImageLoader:
    """Create a loader of (images, labels): float32 (b c h w) and int64 (b).

    Call `start_at` (or `dataset.set_epoch`) before each iteration. Equal seeds and epochs give equal bits with any
    number of workers and from any step.

    Args:
        dataset: images to load.
        batch_size: images per step, at least 1; `share` decides how a step is divided into batches.
        shuffle: draw a new order for each epoch; else the order of the source.
        seed: seed of the order.
        workers: number of processes that read and decode; 0 uses this process.
        drop_last: omit an incomplete last batch.
        repeats: repeated augmentation, as in `Order`.
        share: part of every step that this process computes.
        is_balanced: with `shuffle`, draw every class equally often, as `Order` does with labels.
        timeout_s: maximum time for a batch from the workers, in seconds.

    Raises:
        UsageError: a number out of its range, no complete batch with `drop_last`, or no resources for the workers.
    """
    if batch_size < 1 or workers < 0:
        raise UsageError(f"batch_size must be at least 1 and workers at least 0; got {batch_size} and {workers}.")
    order = Order(
        len(dataset),
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        repeats=repeats,
        share=share,
        labels=dataset.source.labels if is_balanced else None,
    )
    if workers:
        try:
            dataset.watch(workers)
        except RuntimeError as error:
            raise _resource_error(workers, error) from None
    return ImageLoader(
        dataset,
        batch_sampler=EpochBatches(dataset, order),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        timeout=timeout_s if workers else 0,
        worker_init_fn=_exit_on_parent_sigterm,
        generator=torch.Generator(),  # else every iteration would draw from the global generator
    )
