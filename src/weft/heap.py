"""Memory that one step frees is kept for the next, or given back."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # the parameters of mallopt(3)


def keep_memory() -> bool:
    """Has the C library keep what is freed, instead of returning large blocks to the system.

    A step of training on a CPU frees and asks for hundreds of maps of some megabytes. By default each is mapped anew,
    and every page of it is cleared and faulted in when first touched: up to a fifteenth of a step of training
    (benchmarks/training, "as weft train"). The high-water mark stays the same; below it, nothing is given back.

    Returns:
        Whether it was done: not where the C library is not glibc, or where the environment already chooses (MALLOC_*,
        GLIBC_TUNABLES, another allocator by LD_PRELOAD).
    """
    chosen = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if sys.platform != "linux" or chosen:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))
    return all([library.mallopt(parameter, value) == 1 for parameter, value in settings])


def release_memory() -> None:
    """Gives back to the system what is free now, where the C library can."""
    gc.collect()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
