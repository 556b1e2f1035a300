"""Which images a step of training sees: a pure function of (seed, epoch, step), in however many parts and processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.data.loading.seeding import epoch_order
from weft.errors import UsageError

Key = tuple[int, int, int]  # (epoch, index of the image, which of its repetitions)


@dataclass(frozen=True)
class Share:
    """Which part of every step a process computes.

    Attributes:
        rank: number of the process, from 0.
        world: how many processes there are.
        accumulate: parts in which a process computes its share, one after the other.
    """

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    @property
    def parts(self) -> int:
        """Into how many parts a step falls altogether."""
        return self.world * self.accumulate


WHOLE = Share()
"""One process that computes every step at once."""


class Order:
    """The images of every step.

    Args:
        num_images: in the source.
        batch_size: images of one step, all parts together.
        shuffle: a new order each epoch; else the source's.
        seed: of the orders.
        drop_last: leave out a last step that is not full.
        repeats: every image comes so many times in a row, and an epoch, no longer for it, sees one in so many.
        share: what of it this process computes.

    Raises:
        UsageError: the batch does not fall into equal parts, or fills no step.
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
    ):
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
                f"A step must fall into equal parts; batch_size {batch_size} does not over {share.world} "
                f"{'process' if share.world == 1 else 'processes'} x accumulate {share.accumulate}."
            )
        self._drawn: tuple[int, list[int]] = (-1, [])

    def keys(self, epoch: int, step: int) -> list[Key]:
        """What a step of an epoch sees, all parts together."""
        start = step * self.batch_size
        places = range(start, min(start + self.batch_size, self.num_images))
        order = self._order(epoch)
        return [(epoch, order[place // self.repeats], place % self.repeats) for place in places]

    def parts(self, epoch: int, step: int) -> list[list[Key]]:
        """What this process computes of it, part by part."""
        keys, first = self.keys(epoch, step), self.share.rank * self.share.accumulate
        return [_part(keys, first + number, self.share.parts) for number in range(self.share.accumulate)]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            epoch = 0
        if self._drawn[0] != epoch:
            drawn = epoch_order(self.num_images, self.seed, epoch) if self.shuffle else list(range(self.num_images))
            self._drawn = (epoch, drawn)
        return self._drawn[1]


def _part(keys: list[Key], number: int, count: int) -> list[Key]:
    """One of `count` parts of a step.

    Mixup and cutmix join the first image of a batch with its last, the second with the last but one. Here every part
    holds both of each of its pairs, in places where they meet again: however many parts, the same pairs are mixed.
    Repetitions of an image, which stand side by side, go to different parts, as in the released trainings.
    """
    if len(keys) % (2 * count):
        return keys[number::count]
    front = range(number, len(keys) // 2, count)
    return [keys[place] for place in front] + [keys[-1 - place] for place in reversed(front)]


def epochs_of(steps: int, steps_per_epoch: int) -> int:
    """How many epochs, the last perhaps shorter, a number of steps takes."""
    return math.ceil(steps / steps_per_epoch)
