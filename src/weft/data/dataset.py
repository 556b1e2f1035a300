"""Dataset of transformed images, with counter-based randomness per sample.

A sample is a pure function of (seed, epoch, index), without state: any worker in any process, started at any step,
produces the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from weft.data.colour import Picture
from weft.data.crops import Crop, Crops, Transform, batch_of, normalized
from weft.data.decode import BadImage, open_picture
from weft.data.order import Key
from weft.data.seeding import kept_rng, seed_rng
from weft.data.source import LostDataError, Source, lost_error, pixel_limit

_NOTHING = -1  # a worker that reads no image


class ImageDataset(Dataset):
    """Map-style dataset of (tensor, label): images of a source, decoded and transformed.

    Args:
        source: images to read.
        transform: of `train_transform` or `eval_transform`.
        seed: seed of the random numbers of every sample.
        at_least, value_range: as in `open_image`.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        seed: int = 0,
        *,
        at_least: int | None = None,
        value_range: tuple[int, int] | None = None,
    ):
        self.source, self.transform, self.seed = source, transform, seed
        self.at_least, self.value_range = at_least, value_range
        self.epoch = 0
        self.reading: Tensor | None = None  # index that each worker is reading, for the timeout message

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of samples and their order, from the next iteration of a loader."""
        self.epoch = epoch

    def watch(self, workers: int) -> None:
        """Allocate shared memory in which each worker process records the index that it is reading."""
        self.reading = torch.full((workers,), _NOTHING, dtype=torch.int64).share_memory_()

    def being_read(self) -> list[int]:
        """Return the indices that the workers are reading."""
        return [] if self.reading is None else [index for index in self.reading.tolist() if index != _NOTHING]

    def __getitem__(self, key: int | tuple[int, int] | Key) -> tuple[Float[Tensor, "c h w"], int]:
        """Return (image, label) for an index, or for the key (epoch, index[, repetition]) of a loader.

        Raises:
            DataError: the image can no longer be read; the message names it.
        """
        crops = self.__getitems__([(self.epoch, key) if isinstance(key, int) else key])
        return self.normalized(crops)[0], int(crops.labels[0])

    def __getitems__(self, keys: Sequence[tuple[int, int] | Key]) -> Crops:
        """Return a batch for the keys of a loader; torch's loader calls it.

        Raises:
            DataError: an image can no longer be read; the message names it.
        """
        with kept_rng():
            crops, labels, damaged = zip(*map(self._draw, keys), strict=True)
        return batch_of(crops, labels, list(itertools.chain(*damaged)))

    def normalized(self, crops: Crops, device: torch.device | str = "cpu") -> Float[Tensor, "b c h w"]:
        """Return the normalised images of a batch on a device."""
        return normalized(crops, self.transform.mean, self.transform.std, device)

    def _draw(self, key: tuple[int, int] | Key) -> tuple[Crop, int, list[int]]:
        epoch, index, repetition = (*key, 0)[:3]
        if self.reading is not None and (worker := get_worker_info()) is not None:
            self.reading[worker.id] = index
        image, damaged = self._opened(index)
        seed_rng(self.seed, *((epoch, index, repetition) if repetition else (epoch, index)))
        return self.transform.draw(image), self.source.labels[index], damaged

    def _opened(self, index: int) -> tuple[Picture, list[int]]:
        """Return an image, or the next usable one of its class if the source takes that; also the damaged ones."""
        origin = getattr(self.source, "origin", None)  # of a part of a source
        source, index = (self.source, index) if origin is None else origin(index)
        errors = dict[int, LostDataError]()
        for place in _of_its_class(source, index) if getattr(source, "takes_next", False) else (index,):
            try:
                return self._decoded(source, place), list(errors)
            except LostDataError as error:
                errors[place] = error
        raise errors[index]

    def _decoded(self, source: Source, index: int) -> Picture:
        sample, limit = source.read(index), pixel_limit(source)
        try:
            return open_picture(sample.data, max_pixels=limit, at_least=self.at_least, value_range=self.value_range)
        except BadImage as err:
            raise lost_error(source, sample.key, err) from err


def _of_its_class(source: Source, index: int) -> Iterator[int]:
    """Return an image and all others of its class, in the order of the source, from the first after the last."""
    labels = source.labels
    places = itertools.chain(range(index, len(labels)), range(index))
    return (place for place in places if labels[place] == labels[index])
