"""Pictures as tensors, each with randomness of its own.

A sample is a pure function of (seed, epoch, index). There is no state to save or to share: any worker, in any
process, started at any step, makes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from weft.data.images.decode import BadImage, open_image
from weft.data.index.source import Source, lost
from weft.data.loading.order import Key
from weft.data.loading.seeding import randomness_of
from weft.errors import DataError

Transform = Callable[[Image.Image], Float[Tensor, "c h w"]]

LOST = -1  # the label of a picture that is not there any more
_BLANK = Image.new("RGB", (64, 64))


class ImageDataset(Dataset):
    """A source seen through a transform.

    Args:
        source: where the pictures come from.
        transform: from an upright RGB picture to a tensor; may draw from `random`, `numpy.random` and `torch`.
        seed: of every sample's randomness.
        at_least: as in `open_image`.
        on_lost: what a picture that vanished or broke since the data was opened leads to: `stop` to a DataError,
            `exclude` to a blank one with the label `LOST`, which the reader of the batch leaves out.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        seed: int = 0,
        *,
        at_least: int | None = None,
        on_lost: Literal["stop", "exclude"] = "stop",
    ):
        self.source, self.transform, self.seed = source, transform, seed
        self.at_least, self.on_lost = at_least, on_lost
        self.epoch = 0
        self.reading: Tensor | None = None  # by worker, what it is reading: for the message when one hangs

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """From the next loop over a loader on, samples and their order are those of `epoch` (counted from 0)."""
        self.epoch = epoch

    def watch(self, workers: int) -> None:
        """Lets worker processes leave the number of the picture that each is reading where all can see it."""
        self.reading = torch.full((workers,), LOST, dtype=torch.int64).share_memory_()

    def __getitem__(self, key: int | tuple[int, int] | Key) -> tuple[Float[Tensor, "c h w"], int]:
        """(picture, label) for an index, or for (epoch, index) and perhaps the number of a repetition: loaders give
        the latter, their workers know no epoch.

        Raises:
            DataError: the picture was good when the data was opened and is not any more; the message names it.
        """
        epoch, index, repetition = (self.epoch, key, 0) if isinstance(key, int) else (*key, 0)[:3]
        if self.reading is not None and (worker := get_worker_info()) is not None:
            self.reading[worker.id] = index
        try:
            image, label = self._open(index)
        except DataError:
            if self.on_lost == "stop":
                raise
            image, label = _BLANK, LOST
        occasion = (epoch, index, repetition) if repetition else (epoch, index)
        with randomness_of(self.seed, *occasion):
            return self.transform(image), label

    def _open(self, index: int) -> tuple[Image.Image, int]:
        sample = self.source.read(index)
        try:
            return open_image(sample.data, at_least=self.at_least), sample.label
        except BadImage as err:
            raise lost(sample.key, err) from err
