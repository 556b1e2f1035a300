"""Instruction sets of the processor that decide how fast a network runs."""

from __future__ import annotations

import functools
from pathlib import Path

FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve")
_CPUINFO = Path("/proc/cpuinfo")
_CLASSES = (  # the first whose flags are all there names the class
    ("amx", ("amx_bf16", "amx_int8")),
    ("avx512_bf16_vnni", ("avx512_bf16", "avx512_vnni")),
    ("avx512_vnni", ("avx512f", "avx512_vnni")),
    ("avx512", ("avx512f",)),
    ("avx2_vnni", ("avx2", "avx_vnni")),
    ("avx2", ("avx2",)),
    ("sve", ("sve",)),
    ("neon", ("asimd",)),
)


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Return those of FLAGS that the processor has; empty on systems without /proc/cpuinfo."""
    lines = _cpuinfo()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "").partition(":")[2]
    return tuple(flag for flag in FLAGS if flag in flags.split())


MAX_THREADS = 1024  # OpenMP crashes with many more


def cpu_name() -> str | None:
    """Return the name that the processor gives itself, or None where it is not known."""
    line = next((line for line in _cpuinfo() if line.startswith("model name")), None)
    return None if line is None else line.partition(":")[2].strip()


def has_bf16() -> bool:
    """Return whether the processor multiplies bf16 matrices itself; elsewhere this is emulated, slower than fp32."""
    return "avx512_bf16" in cpu_flags() or "amx_bf16" in cpu_flags()


def processor_class() -> str:
    """Return the class under which speeds are recorded: processors of one class rank the ways of inference alike.

    One of amx, avx512_bf16_vnni, avx512_vnni, avx512, avx2_vnni, avx2, sve, neon; `unknown` elsewhere.
    """
    flags = cpu_flags()
    return next((name for name, needed in _CLASSES if all(flag in flags for flag in needed)), "unknown")


def _cpuinfo() -> list[str]:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
