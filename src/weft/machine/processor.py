"""The processor: instruction sets that decide how fast a network runs, and compute threads."""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from weft.errors import UsageError
from weft.text import printable

T = TypeVar("T")
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve")
ARM = ("asimd", "sve")
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f")
_ISA_FLAGS = {  # by value of ONEDNN_MAX_CPU_ISA; any other value allows all
    "SSE41": (),
    "AVX": (),
    "AVX2": _AVX2,
    "AVX2_VNNI": (*_AVX2, "avx_vnni"),
    "AVX2_VNNI_2": (*_AVX2, "avx_vnni"),
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": (*_AVX512, "avx512_vnni"),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), (*_AVX512, "avx512_vnni", "avx512_bf16")),
}
MAX_LIMIT = 100  # characters of a value of LIMITS
MAX_THREADS = 1024  # OpenMP crashes with many more
_threads: list[int] = []  # the number that was set while torch was not loaded; empty once torch has it
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP, _CFS = Path("/sys/fs/cgroup"), ("quota", "period")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
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


def onednn_flags() -> tuple[str, ...]:
    """Return those of `cpu_flags` that PyTorch and OpenVINO use for matrices of bf16 and int8.

    Both multiply them with oneDNN, whose instructions ONEDNN_MAX_CPU_ISA limits on x86. ONNX Runtime does not use it.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    allowed = _ISA_FLAGS.get(limit.upper(), FLAGS)
    return tuple(flag for flag in cpu_flags() if flag in allowed or flag in ARM)


def num_threads() -> int:
    """Return the number of CPU threads of inference: the one that was set, that of torch if it is loaded, or OpenMP's.

    OpenMP's is OMP_NUM_THREADS, or one per physical core, as torch's default; but not more than a container may use.
    """
    if _threads:
        return _threads[0]
    if (torch := sys.modules.get("torch")) is not None:
        return torch.get_num_threads()
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(int(given), MAX_THREADS) if given.isdecimal() and int(given) else default_threads()


def set_num_threads(count: int) -> None:
    """Set the number of CPU threads of torch and of every inference runtime; torch is not imported for this.

    Raises:
        UsageError: fewer than 1 or more than MAX_THREADS.
    """
    if not 1 <= count <= MAX_THREADS:
        raise UsageError(f"threads must be from 1 to {MAX_THREADS}; got {count}.")
    _threads[:] = [count]
    if "torch" in sys.modules:
        give_threads_to_torch()


def give_threads_to_torch() -> None:
    """Set in torch, which is imported, the number of threads that was set before its import."""
    if _threads:
        sys.modules["torch"].set_num_threads(_threads.pop())


def default_threads() -> int:
    """Return one thread per physical core that this process may use, and not more than its container may use."""
    return min(_physical_cores(), available_cores())


def limit_threads() -> None:
    """Use fewer threads than torch's default if the container of this process may use fewer cores than it sees.

    torch and OpenMP do not know this limit: with more threads than it allows, all of them are stopped for most of the
    time. Call it before torch is imported, which reads OMP_NUM_THREADS once. A number in this variable stays.
    """
    if "OMP_NUM_THREADS" not in os.environ and default_threads() < _physical_cores():
        os.environ["OMP_NUM_THREADS"] = str(default_threads())


def available_cores() -> int:
    """Return the number of logical cores that this process may use, by its affinity and the limit of its container."""
    return max(1, math.ceil(min(_logical_cores(), _container_cores())))


def _logical_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _container_cores() -> float:
    """Return the number of cores that a container may use on average (`docker run --cpus`); infinite without limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:  # version 1 of control groups
            quota, period = ((_CGROUP / f"cpu/cpu.cfs_{name}_us").read_text(encoding="ascii") for name in _CFS)
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # `max`
        return math.inf


def _physical_cores() -> int:
    """Return the number of physical cores that this process may use; where it is not known, that of logical ones."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    try:
        return len({Path(_TOPOLOGY.format(cpu)).read_text(encoding="ascii") for cpu in allowed})
    except OSError:
        return len(allowed)


def limits() -> dict[str, str]:
    """Return the environment variables that limit the instruction set, as printable text."""
    return {name: printable(os.environ[name])[:MAX_LIMIT] for name in LIMITS if os.environ.get(name)}


def cpu_name() -> str | None:
    """Return the name that the processor or the system gives it, or None where it is not known."""
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in _cpuinfo())}
    arm = " ".join(values[name] for name in ("CPU implementer", "CPU part") if name in values)
    return values.get("model name") or (f"ARM {arm}" if arm else None) or platform.processor() or None


def has_bf16() -> bool:
    """Return whether bf16 matrices are multiplied by instructions for them; elsewhere this is emulated, and slow."""
    return "avx512_bf16" in onednn_flags() or "amx_bf16" in onednn_flags()


def bf16_note(device: str, precision: str) -> str | None:
    """Return a warning if bf16 is emulated on a type of device; None otherwise."""
    if precision != "bf16" or device != "cpu" or has_bf16():
        return None
    given = " ".join(f"{name}={value}" for name, value in limits().items())
    subject = f"With {given}, this processor" if given else "This processor"
    return f"{subject} emulates bf16, which is slow. --precision fp32 is faster."


def has_int8(flags: Iterable[str]) -> bool:
    """Return whether instruction sets include one that sums multiplications of 8-bit numbers in 32 bits, such as VNNI.

    Args:
        flags: `cpu_flags()`, or `onednn_flags()` for OpenVINO.
    """
    return not {"avx512_vnni", "avx_vnni", "amx_int8", "asimd"}.isdisjoint(flags)


def limit_spinning() -> None:
    """Let OpenMP threads that wait for each other sleep after about 1 ms, so that other processes can use their cores.

    Call it before torch is imported, which reads the setting once. By default, GNU's OpenMP waits in a busy loop for
    many milliseconds. Where a decoder takes the core of one thread, all others then burn theirs until it is back. Much
    less than 1 ms would make threads sleep between the operations of one forward pass, which slows it down. An
    environment that already configures the waiting (OMP_WAIT_POLICY, GOMP_SPINCOUNT, KMP_BLOCKTIME) is not changed.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["GOMP_SPINCOUNT"] = "20000"
        os.environ["KMP_BLOCKTIME"] = "1"  # ms; LLVM's OpenMP, on macOS, waits for 200


def call_in_thread(function: Callable[[], T]) -> T:
    """Call a function that computes in a thread that then ends; return its result, or raise its error.

    Each thread that computes with torch has compute threads of its own, until it ends. As soon as these are more than
    the cores, threads that wait for each other sleep immediately (GNU's OpenMP), which slows down every operation of
    all of them: a forward pass of CeiT-T takes twice as long. A program should therefore compute in one thread, and use
    this function for what another one has to compute once.
    """
    future, thread = _started(function)
    future.exception()  # waits
    thread.join()  # until its compute threads have also ended
    return future.result()


def begin_in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread for whose end neither the caller nor the process waits; return its future result."""
    return _started(function)[0]


def _started(function: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    return future, thread


def processor_class(flags: tuple[str, ...] | None = None) -> str:
    """Return the class under which speeds are recorded: processors of one class rank the ways of inference alike.

    Args:
        flags: of FLAGS; None for `cpu_flags`.

    Returns:
        One of amx, avx512_bf16_vnni, avx512_vnni, avx512, avx2_vnni, avx2, sve, neon; `unknown` elsewhere.
    """
    known = cpu_flags() if flags is None else flags
    return next((name for name, needed in _CLASSES if all(flag in known for flag in needed)), "unknown")


def _cpuinfo() -> list[str]:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
