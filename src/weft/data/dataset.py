"""Pictures as tensors, each with randomness of its own.

A sample is a pure function of (seed, epoch, index). There is no state to save or to share: any worker, in any
process, started at any step, makes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from weft.data.image import MAX_PIXELS, BadImage, open_image
from weft.data.seeding import randomness_of
from weft.data.source import Source, lost

Transform = Callable[[Image.Image], Float[Tensor, "c h w"]]
Key = tuple[int, int]  # (epoch, index)


class ImageDataset(Dataset):
    """A source seen through a transform.

    Args:
        source: where the pictures come from.
        transform: from an upright RGB picture to a tensor; may draw from `random`, `numpy.random` and `torch`.
        seed: of every sample's randomness.
        max_pixels: as in `open_image`.
    """

    def __init__(self, source: Source, transform: Transform, seed: int = 0, *, max_pixels: int = MAX_PIXELS):
        self.source, self.transform, self.seed, self.max_pixels = source, transform, seed, max_pixels
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """From the next loop over a loader on, samples and their order are those of `epoch` (counted from 0)."""
        self.epoch = epoch

    def __getitem__(self, key: int | Key) -> tuple[Float[Tensor, "c h w"], int]:
        """(picture, label) for an index, or for an (epoch, index): loaders give the latter, their workers know no
        epoch.

        Raises:
            DataError: the picture was good when the data was opened and is not any more; the message names it.
        """
        epoch, index = (self.epoch, key) if isinstance(key, int) else key
        sample = self.source.read(index)
        try:
            image = open_image(sample.data, max_pixels=self.max_pixels)
        except BadImage as err:
            raise lost(sample.key, err) from err
        with randomness_of(self.seed, epoch, index):
            return self.transform(image), sample.label
