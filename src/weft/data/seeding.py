"""Counter-based random numbers: pure functions of (seed, epoch, index), without state."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def mix_seed(*numbers: int) -> int:
    """Return a uniformly distributed seed, 0 to 2**63 - 1, from numbers such as (seed, epoch, index)."""
    return _first_63_bits(_digest(numbers))


@contextlib.contextmanager
def seeded_rng(*numbers: int) -> Iterator[None]:
    """Seed `random`, `numpy.random` and `torch` (CPU) from `numbers` inside the context; restore their states after."""
    with kept_rng():
        seed_rng(*numbers)
        yield


@contextlib.contextmanager
def kept_rng() -> Iterator[None]:
    """Restore the states of `random`, `numpy.random` and `torch` (CPU) after the context."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def seed_rng(*numbers: int) -> None:
    """Seed `random`, `numpy.random` and `torch` (CPU) from `numbers`."""
    digest = _digest(numbers)
    random.seed(digest[8:16])
    np.random.seed(np.frombuffer(digest[16:32], np.uint32))
    torch.default_generator.manual_seed(_first_63_bits(digest))  # torch.manual_seed would also seed every GPU


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of `range(num_samples)`, a function of (seed, epoch)."""
    return _generator(seed, epoch).permutation(num_samples)


def sliding_order(blocks: np.ndarray, width: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of the images of several blocks, a function of (seed, epoch): images of about `width` blocks
    follow each other in random order, and each block begins when another one ends.

    Args:
        blocks: number of the block of every image.
        width: number of blocks.
    """
    generator = _generator(seed, epoch)
    begins = generator.permutation(int(blocks.max()) + 1)
    return np.argsort(begins[blocks] + width * generator.random_sample(len(blocks)), kind="stable")


def _generator(seed: int, epoch: int) -> np.random.RandomState:
    # RandomState: NumPy guarantees its streams across versions; not those of newer generators
    return np.random.RandomState(np.frombuffer(_digest((seed, epoch)), np.uint32))


def _digest(numbers: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=32).digest()


def _first_63_bits(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1
