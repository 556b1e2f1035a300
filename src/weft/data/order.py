"""Images of every training step: a pure function of (seed, epoch, step), for any number of processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.data.seeding import epoch_order, sliding_order
from weft.errors import UsageError

FILES = 32  # whose images are shuffled together where files are fetched
Key = tuple[int, int, int]  # (epoch, index of the image, number of its repetition)


@dataclass(frozen=True)
class Share:
    """Part of every step that one process computes.

    Attributes:
        rank: index of the process, from 0.
        world: number of processes.
        accumulate: gradient accumulation: number of batches in which a process computes its part.
    """

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    @property
    def parts(self) -> int:
        """Number of batches of a step over all processes."""
        return self.world * self.accumulate


WHOLE = Share()
"""A single process that computes every step as one batch."""


class Order:
    """Order of the images over steps and epochs.

    Args:
        num_images: number of images in the source.
        batch_size: images per step, over all processes and accumulated batches.
        shuffle: draw a new permutation for each epoch; else the order of the source.
        seed: seed of the permutations.
        drop_last: omit an incomplete last step.
        repeats: repeated augmentation (arXiv 1902.05509): use each image this many times in a row; an epoch then covers
            1/repeats of the images.
        share: part of each step for this process.
        blocks: number of the file that every image is in, to shuffle with `shuffle` only images of some files together:
            files on a server are fetched one after the other. Without effect with `labels`.
        labels: class index of every image, to draw every class equally often with `shuffle`: in each epoch, images of
            small classes several times, with different augmentation, and of large ones a different part. None draws
            every image once.

    Raises:
        UsageError: `batch_size` is not divisible into equal batches, or larger than the data with `drop_last`.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
        repeats: int = 1,
        share: Share = WHOLE,
        blocks: np.ndarray | None = None,
        labels: Sequence[int] | None = None,
    ):
        self.labels, self.blocks = labels, blocks
        self.num_images, self.batch_size, self.seed, self.shuffle = num_images, batch_size, seed, shuffle
        self.repeats, self.share = repeats, share
        whole, rest = divmod(num_images, batch_size)
        self.steps_per_epoch = whole + (rest > 0 and not drop_last)
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"There must be at least one batch; {num_images} images do not fill one of {batch_size}. "
                f"Lower batch_size."
            )
        if drop_last and batch_size % share.parts:
            raise UsageError(
                f"batch_size must be divisible into equal batches; {batch_size} is not by {share.world} "
                f"{'process' if share.world == 1 else 'processes'} x accumulate {share.accumulate}."
            )
        self._epoch, self._indices, self._earlier = -1, np.zeros(0, np.int64), np.zeros(0, np.int64)

    def keys(self, epoch: int, step: int) -> list[Key]:
        """Return the images of a step over all processes."""
        start = step * self.batch_size
        places = range(start, min(start + self.batch_size, self.num_images))
        if self._epoch != epoch:
            self._epoch, (self._indices, self._earlier) = epoch, self._draw(epoch)
        drawn = [place // self.repeats for place in places]
        indices, earlier = self._indices[drawn].tolist(), self._earlier[drawn].tolist()
        return [
            (epoch, index, before * self.repeats + place % self.repeats)
            for place, index, before in zip(places, indices, earlier, strict=True)
        ]

    def parts(self, epoch: int, step: int) -> list[list[Key]]:
        """Return the images of a step for this process, one list per accumulated batch."""
        keys, first = self.keys(epoch, step), self.share.rank * self.share.accumulate
        return [_part(keys, first + number, self.share.parts) for number in range(self.share.accumulate)]

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each image in order, and how often it was drawn before: 0 if not balanced."""
        if self.labels is not None and self.shuffle:
            return self._draw_balanced(epoch, self.labels)
        if not self.shuffle:
            indices = np.arange(self.num_images)
        elif self.blocks is None:
            indices = epoch_order(self.num_images, self.seed, epoch)
        else:
            indices = sliding_order(self.blocks, FILES, self.seed, epoch)
        return indices, np.broadcast_to(np.int64(0), indices.shape)

    def _draw_balanced(self, epoch: int, labels: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        members = defaultdict[int, list[int]](list)
        for index in epoch_order(self.num_images, self.seed, epoch).tolist():
            members[labels[index]].append(index)
        # in the order of their first images, so that another class gets the odd image in every epoch
        draws: list[tuple[int, int]] = []
        total = math.ceil(self.num_images / self.repeats)
        for place, indices in enumerate(members.values()):
            number = total // len(members) + (place < total % len(members))
            draws += [(indices[turn % len(indices)], turn // len(indices)) for turn in range(number)]
        indices, earlier = np.array(draws)[epoch_order(len(draws), self.seed, epoch)].T
        return indices, earlier


def _part(keys: list[Key], number: int, count: int) -> list[Key]:
    """Return batch `number` of `count` of a step.

    Mixup and cutmix pair the first image of a batch with the last, the second with the second last. Each batch contains
    both images of its pairs at mirrored positions, so that the same pairs are mixed for any number of batches.
    Repetitions of an image, which are adjacent, go to different batches, as in the released training code.
    """
    if len(keys) % (2 * count):
        return keys[number::count]
    front = range(number, len(keys) // 2, count)
    return [keys[place] for place in front] + [keys[-1 - place] for place in reversed(front)]


def epochs_of(steps: int, steps_per_epoch: int) -> int:
    """Return the number of epochs that `steps` take, rounded up."""
    return math.ceil(steps / steps_per_epoch)
