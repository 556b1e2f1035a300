"""Memory: keep what PyTorch frees on the CPU or give it back, ask how much is available, recognise a lack of it."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

from weft.errors import WeftError
from weft.text import reason_of

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # the parameters of mallopt(3)


def keep_memory() -> bool:
    """Configure glibc malloc to keep freed memory in the process instead of returning large blocks to the system.

    A forward pass or training step on a CPU allocates and frees many tensors of some megabytes. By default, glibc maps
    each of them again, and the kernel clears and faults in every page on first use. Keeping the memory avoids this. It
    helps most where the network spends much of its time writing large activations (LeViT at batch 16: 1.1 to 1.7 times
    the throughput, of timm's network as well as of weft's), little at batch 1, and not at all on a GPU. The peak memory
    of the process stays the same, but the process keeps that amount until it ends. benchmarks/speed and
    benchmarks/training list the effect for each network.

    The command `weft` and the service (`weft.serve.create_app`) call this function; other calls of the library do not.
    Call it once, before the first forward pass, to have the same throughput in a program of your own. It applies to all
    of the process and cannot be undone.

    Returns:
        Whether the setting was applied. It is not applied outside glibc (macOS, Windows, musl), or where the
        environment already configures the allocator (MALLOC_*, GLIBC_TUNABLES, or another allocator by LD_PRELOAD).
    """
    is_custom = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if sys.platform != "linux" or is_custom:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))
    return all([library.mallopt(parameter, value) == 1 for parameter, value in settings])


def release_memory() -> None:
    """Return all free memory of the process to the operating system, where the C library can."""
    gc.collect()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of the machine or the GPU is exhausted."""
    phrases = (
        "out of memory",
        "allocate memory",
        "not enough memory",
        "STATUS_ALLOC_FAILED",
        "bad_alloc",
        "bad allocation",
    )
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases)


def known_error(error: BaseException) -> WeftError | None:
    """Return an error as one that the user can fix: itself, or for a lack of memory; None for a defect of weft."""
    if isinstance(error, WeftError) or not is_out_of_memory(error):
        return error if isinstance(error, WeftError) else None
    return WeftError(
        f"There must be enough memory; there is not ({reason_of(error)}). Choose a smaller batch or image size."
    )


def available_gib() -> float:
    """Return the memory that new processes can use, in GiB."""
    import psutil

    return psutil.virtual_memory().available / 2**30
