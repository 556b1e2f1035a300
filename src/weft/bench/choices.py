"""Choices of `weft bench`: ways to run a model, precisions and allocators. No torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import UsageError
from weft.processor import has_bf16

WAYS = {  # way of running a model -> its precisions
    "eager": ("fp32", "tf32", "bf16"),
    "folded": ("fp32", "tf32", "bf16"),
    "compiled": ("fp32", "tf32", "bf16"),
    "graphed": ("fp32", "tf32", "bf16"),  # compiled, and replayed as a CUDA graph
    "aotinductor": ("fp32", "tf32", "bf16"),  # compiled ahead of time, for any batch size
    "onnx": ("fp32", "tf32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
}
COMPILED = ("compiled", "graphed", "aotinductor")
PRECISIONS = ("fp32", "tf32", "bf16", "int8")  # tf32: on a GPU, factors have 10 bits of mantissa
ALLOCATORS = ("default", "keep")  # default settings of the C library, or `weft.keep_memory`
BEST = "best"


def check_choices(
    ways: Sequence[str],
    precisions: Sequence[str],
    allocators: Sequence[str],
    batch_sizes: Sequence[int | str],
    rounds: int,
    threads: int | None,
    device: str,
) -> None:
    """Check the arguments of `speed`.

    Raises:
        UsageError: a value that does not exist, or values that do not fit together.
    """
    lists = (
        ("ways", ways, tuple(WAYS)),
        ("precisions", precisions, PRECISIONS),
        ("allocators", allocators, ALLOCATORS),
    )
    for name, values, known in lists:
        wrong = [value for value in values if value not in known]
        if wrong or not values:
            raise UsageError(f"{name} must be one or more of {', '.join(known)}; got {', '.join(wrong) or 'none'}.")
    if not any(precision in WAYS[way] for way in ways for precision in precisions):
        supported = "; ".join(f"{way}: {', '.join(WAYS[way])}" for way in ways)
        raise UsageError(
            f"precisions must include one that these ways support ({supported}); got {', '.join(precisions)}."
        )
    numbers: list[tuple[str, int | str]] = [("rounds", rounds), ("threads", 1 if threads is None else threads)]
    for name, number in [*(("batch_size", size) for size in batch_sizes if size != BEST), *numbers]:
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{name} must be at least 1; got {number}.")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda; got {device}.")
    unsupported = ("openvino", "int8") if device == "cuda" else ("graphed", "tf32")
    wrong = [choice for choice in (*ways, *precisions) if choice in unsupported]
    if wrong:
        raise UsageError(f"{wrong[0]} is not supported on {device}; choose another device, way or precision.")
    if "openvino" in ways and "bf16" in precisions and not has_bf16():
        raise UsageError(
            "openvino in bf16 needs a processor with AVX-512 bf16 or AMX; this processor emulates bf16, and OpenVINO"
            " would compute in fp32. Leave out bf16 or openvino."
        )


def check_cold_start(cold_start: bool, device: str) -> None:
    """Refuse to measure cold starts on a GPU.

    Raises:
        UsageError: `cold_start` and a device other than the CPU.
    """
    if cold_start and device != "cpu":
        raise UsageError(f"--cold-start is measured on the CPU; got device {device}. Leave one of the two out.")
