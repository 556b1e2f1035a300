"""Batches in an order that is a pure function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from weft.data.dataset import ImageDataset, Key
from weft.data.seeding import epoch_order
from weft.errors import DataError, UsageError


class EpochBatches(Sampler[list[Key]]):
    """The batches of the dataset's epoch, as (epoch, index) pairs: workers that live on need not be told the epoch."""

    def __init__(self, dataset: ImageDataset, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool):
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last = drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, num_samples = self.dataset.epoch, len(self.dataset)
        order = epoch_order(num_samples, self.seed, epoch) if self.shuffle else range(num_samples)
        for batch in range(len(self)):
            yield [(epoch, index) for index in order[batch * self.batch_size : (batch + 1) * self.batch_size]]


class ImageLoader(DataLoader):
    """A `DataLoader` that names a lost picture in one line, also from a worker process."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own, narrower type is private
        try:
            yield from super().__iter__()
        except DataError as err:
            # torch rebuilds a worker's exception around the text of its traceback; its last line is our message
            message = str(err).rstrip().rsplit("DataError: ", 1)[-1]
            # its frames hold the workers in a cycle, and collected from there they take five seconds each to end
            err.__traceback__ = None
            raise DataError(message) from None


def make_loader(
    dataset: ImageDataset, batch_size: int, *, shuffle: bool, seed: int = 0, workers: int = 0, drop_last: bool = False
) -> ImageLoader:
    """Batches of (images, labels): float32 (b c h w) and int64 (b).

    Call `dataset.set_epoch` before each loop. Equal seeds and epochs give equal bits with any number of workers.

    Args:
        dataset: what to read.
        batch_size: images in a batch, at least 1.
        shuffle: a new order each epoch; else the source's.
        seed: of the order.
        workers: processes that read and decode; 0 does it here.
        drop_last: leave out a last batch that is not full.

    Raises:
        UsageError: a number out of its range, or `drop_last` would leave no batch.
    """
    if batch_size < 1 or workers < 0:
        raise UsageError(f"batch_size must be at least 1 and workers at least 0; got {batch_size} and {workers}.")
    batches = EpochBatches(dataset, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if len(batches) == 0:
        raise UsageError(
            f"There must be at least one batch; {len(dataset)} images do not fill one of {batch_size}. "
            f"Lower batch_size."
        )
    return ImageLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else every loop would draw from the global generator, and shift the model's
    )
