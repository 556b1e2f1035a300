"""Chance as a pure function: of the numbers that name an occasion, and of nothing that happened before."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def mix_seed(*numbers: int) -> int:
    """A seed, 0 to 2**63 - 1, for the occasion that `numbers` name, such as (seed, epoch, index); spread evenly."""
    return int.from_bytes(_digest(numbers)[:8], "little") >> 1


@contextlib.contextmanager
def randomness_of(*numbers: int) -> Iterator[None]:
    """Inside, `random`, `numpy.random` and `torch` on the CPU draw streams that `numbers` alone decide.

    Afterwards all three go on as if nothing had been drawn.
    """
    digest = _digest(numbers)
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(digest[8:16])
    np.random.seed(np.frombuffer(digest[16:32], np.uint32))
    torch.default_generator.manual_seed(mix_seed(*numbers))  # torch.manual_seed would seed every GPU for every sample
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """A permutation of `num_samples`, decided by (seed, epoch)."""
    # RandomState: NumPy promises its streams for ever, those of newer generators only within a version
    generator = np.random.RandomState(np.frombuffer(_digest((seed, epoch)), np.uint32))
    return generator.permutation(num_samples).tolist()


def _digest(numbers: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=32).digest()
