"""Data loader whose order is a pure function of (seed, epoch) and that can start at any step."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from weft.data.crops import Crops
from weft.data.dataset import ImageDataset
from weft.data.order import WHOLE, Key, Order, Share
from weft.data.remote import PATIENCE_S
from weft.data.workers import Pace
from weft.errors import DataError, UsageError, WeftError
from weft.text import printable

TIMEOUT_S = 60  # per batch
PARENT_S = 2.0  # between two checks of a worker that its parent runs
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Handle signals that arrive while workers start only after that."""
    # Python ignores what a handler raises within a fork, and a worker in our process group must not act on a signal
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread
        yield
        return
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in handlers:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)


def _leave_process_group(worker: int) -> None:
    """Leave the process group of the training process, whose signals (Ctrl-C, `timeout`, a closed terminal) also reach
    its workers: if a worker ended before its parent has stopped, torch would raise in the parent, in the middle of a
    step. The parent ends its workers (torch handles its SIGTERM); if it is killed, they end within seconds."""
    sys.excepthook = _report_error
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    """End this process after its parent. torch also does so, but first writes all results to a pipe, which is full
    and has no reader any more."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def _report_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an uncaught error of a worker, but not that the training process stopped while it received a tensor."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, traceback)


def _as_it_is(batch: Any) -> Any:
    """Return what the dataset has collected."""
    return batch


class _WorkerIterator(_MultiProcessingDataLoaderIter):
    """Iterator of torch that can be deleted if one of its workers did not start."""

    _workers_status: ClassVar[Any] = defaultdict(bool)  # torch sets its own when all have started


class EpochBatches(Sampler[list[Key]]):
    """Batch sampler for the dataset's epoch. Keys contain the epoch, which persistent workers do not know."""

    def __init__(self, dataset: ImageDataset, order: Order):
        self.dataset, self.order, self.start, self.skipped = dataset, order, 0, 0

    def __len__(self) -> int:
        return (self.order.steps_per_epoch - self.start) * self.order.share.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        steps = range(self.start, self.order.steps_per_epoch)
        batches = (part for step in steps for part in self.order.parts(self.dataset.epoch, step) if part)
        return itertools.islice(batches, self.skipped, None)


class WorkerLoader(DataLoader):
    """A `DataLoader` whose worker processes leave the signals of the terminal to this one, and end with it. It yields
    the items as the dataset returns them."""

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        # without a generator of its own, every iteration would draw from the global one
        fixed = {"collate_fn": _as_it_is, "worker_init_fn": _leave_process_group, "generator": torch.Generator()}
        super().__init__(dataset, **fixed, **arguments)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        try:
            with _signals_held():
                return _WorkerIterator(self)
        except OSError as err:
            raise self.no_resources(err) from None

    def no_resources(self, err: Exception) -> UsageError:
        """Return the error for workers that cannot start, or not pass on what they read."""
        reason = printable(str(err).rstrip().splitlines()[-1])
        err.__traceback__ = None  # its frames hold the workers in a cycle: collected, each takes five seconds to end
        return UsageError(
            f"There must be resources for {self.num_workers} worker processes; {reason}. Lower --workers (0 uses this"
            " process) or --batch-size, or raise the limits: /dev/shm (docker run --shm-size), open files (ulimit -n),"
            " processes (ulimit -u)."
        )


class ImageLoader(WorkerLoader):
    """A `DataLoader` that can start within an epoch, and whose errors name the unreadable or blocking image."""

    batch_sampler: EpochBatches
    dataset: ImageDataset  # type: ignore[assignment]  # torch's own type is wider
    device: torch.device | str
    patience_s: float
    """Maximum time for a batch from the worker processes."""

    pace: Pace | None
    """Measured times, as long as the number of worker processes is not decided."""
    on_choice: Callable[[str], None]
    damaged: set[int]
    """Indices of the images that were damaged, in place of which others were loaded."""

    def use(self, workers: int) -> None:
        """Load with this number of worker processes from the next iteration on; with 0, in this process."""
        self.num_workers, self.timeout, self._iterator = workers, self.patience_s if workers else 0, None

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
        self.batch_sampler.start, self.batch_sampler.skipped = step, 0

    def _get_iterator(self) -> Any:
        if self.num_workers > 0:
            self.dataset.watch(self.num_workers)
        return super()._get_iterator()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own, narrower type is private
        try:
            if self.pace is not None:
                read = yield from self._measured(self.pace)
                if self.pace is not None:
                    return
                self.batch_sampler.skipped = read
            batches = super().__iter__()
            self.batch_sampler.skipped = 0  # of other iterations
            for crops in batches:
                yield self._on_device(crops)
        except (DataError, OSError, RuntimeError) as err:
            raise self._as_weft_error(err) from None

    def _on_device(self, crops: Crops) -> tuple[Tensor, Tensor]:
        self.damaged.update(crops.damaged)
        return self.dataset.normalized(crops, self.device), crops.labels

    def _measured(self, pace: Pace) -> Generator[tuple[Tensor, Tensor], None, int]:
        """Yield batches that this process loads until their pace decides the number of workers; return their number."""
        read, start = 0, time.perf_counter()
        for crops in super().__iter__():
            batch, loaded = self._on_device(crops), time.perf_counter()
            yield batch
            now, read = time.perf_counter(), read + 1
            pace.add(loaded - start, now - loaded)
            if pace.is_known and 2 * read <= len(self.batch_sampler):  # else the next iteration decides
                workers = pace.workers(on_cpu=torch.device(self.device).type == "cpu")
                self.pace = None
                self.use(workers)
                self.on_choice(pace.describe(workers))
                break
            start = time.perf_counter()
        return read

    def _as_weft_error(self, err: Exception) -> Exception:
        """Return the error of weft for one of torch; an unknown one unchanged."""
        if isinstance(err, DataError):
            # torch wraps a worker's exception in the text of its traceback; the last line is our message
            error: WeftError = DataError(str(err).rstrip().rsplit("DataError: ", 1)[-1])
        elif "allocate shared memory" in str(err):
            error = self.no_resources(err)
        elif "timed out" in str(err):
            self._iterator = None  # ends the workers that still respond
            error = DataError(
                f"Every batch must be read within {self.timeout:g} s; one was not. The workers are reading "
                f"{', '.join(printable(self.dataset.source.keys[index]) for index in self.dataset.being_read())}."
                " Check that this file and its disk are reachable."
            )
        else:
            return err
        # its frames hold open files, and the workers in a cycle: garbage-collected, each takes five seconds to end
        err.__traceback__ = None
        return error


def is_forking() -> bool:
    """Return whether worker processes are forked: in others, a script without `if __name__ == "__main__"` would run
    again."""
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork"


def make_loader(
    dataset: ImageDataset,
    batch_size: int,
    *,
    shuffle: bool,
    seed: int = 0,
    workers: int | Literal["auto"] = 0,
    drop_last: bool = False,
    repeats: int = 1,
    share: Share = WHOLE,
    is_balanced: bool = False,
    timeout_s: float | None = None,
    device: torch.device | str = "cpu",
    on_choice: Callable[[str], None] = lambda text: None,
) -> ImageLoader:
    """Create a loader of (images, labels): float32 (b c h w) on `device`, and int64 (b).

    Call `start_at` (or `dataset.set_epoch`) before each iteration. Equal seeds and epochs give equal bits with any
    number of workers and from any step.

    Args:
        dataset: images to load.
        batch_size: images per step, at least 1; `share` decides how a step is divided into batches.
        shuffle: draw a new order for each epoch; else the order of the source.
        seed: seed of the order.
        workers: number of processes that read and decode; 0 uses this process. auto: this process, until the time of
            its batches and of the work with them shows how many are needed; where processes are forked.
        drop_last: omit an incomplete last batch.
        repeats: repeated augmentation, as in `Order`.
        share: part of every step that this process computes.
        is_balanced: with `shuffle`, draw every class equally often, as `Order` does with labels.
        timeout_s: maximum time for a batch from the workers, in seconds; None: 60, and 900 for files on a server.
        device: where the images, which arrive as 8-bit pixels, are normalised.
        on_choice: called with a sentence when a number of workers is chosen.

    Raises:
        UsageError: a number out of its range, or no complete batch with `drop_last`; when iteration starts, no
            resources for the workers.
    """
    if batch_size < 1 or (workers != "auto" and workers < 0):
        raise UsageError(f"batch_size must be at least 1 and workers at least 0; got {batch_size} and {workers}.")
    order = Order(
        len(dataset),
        batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        repeats=repeats,
        share=share,
        blocks=getattr(dataset.source, "blocks", None),
        labels=dataset.source.labels if is_balanced else None,
    )
    loader = ImageLoader(
        dataset,
        batch_sampler=EpochBatches(dataset, order),
        num_workers=1,  # torch requires one for persistent workers; `use` sets the number
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )
    if timeout_s is None:
        timeout_s = TIMEOUT_S if order.blocks is None else PATIENCE_S
    loader.device, loader.patience_s, loader.on_choice, loader.damaged = device, timeout_s, on_choice, set()
    loader.pace = Pace() if workers == "auto" and is_forking() else None
    loader.use(0 if workers == "auto" else workers)
    return loader
