"""Formats of exports, and which of them fit together. No torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.errors import UsageError, need
from weft.machine.processor import bf16_note, cpu_flags, has_bf16, has_int8, onednn_flags

FORMATS = {  # and their precisions
    "onnx": ("fp32", "fp16", "int8"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "torch": ("fp32", "fp16", "bf16"),
}
AUTO = "auto"  # the fastest of several, by measurement
KINDS = (
    *(("openvino", "fp32"), ("openvino", "bf16"), ("openvino", "int8")),
    *(("onnx", "fp32"), ("onnx", "int8")),
)  # that it considers
PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime"}  # that run an export
NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "onnx", "onnxscript")}  # that make it
BATCH_SIZES = (1, 16)  # at which exports are timed
MAX_BATCH, MAX_SIZES = 4096, 64
RUNTIMES = (AUTO, "torch", "openvino", "onnx")  # what a model or one of its exports can run in
SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}
UNSUPPORTED = (".pt", ".pth", ".bin", ".engine", ".mlmodel", ".mlpackage", ".safetensors", ".tflite", ".torchscript")


def checked_format(
    out: str | Path, format: str | None, precision: str | None, max_drop: float, *, has_data: bool
) -> str:
    """Return the format of an export: `format`, or that of the suffix of `out`, or `onnx`; AUTO as it is.

    Args:
        out, format, precision, max_drop: as in `weft.export`.
        has_data: whether there are images for calibration.

    Raises:
        UsageError: a value that does not exist, or values that do not fit together.
    """
    suffix = Path(out).suffix
    of_suffix, formats = SUFFIXES.get(suffix), FORMATS | {AUTO: tuple(dict.fromkeys(kind[1] for kind in KINDS))}
    format = format or of_suffix or "onnx"
    if suffix in UNSUPPORTED:
        raise UsageError(
            f"The name of an exported file must end in {', '.join(SUFFIXES)}; got {out}. Choose one of them, or a"
            " directory."
        )
    if format not in formats:
        raise UsageError(f"format must be one of {', '.join(formats)}; got {format!r}.")
    if precision not in (None, *formats[format]):
        supported = "; ".join(f"{name}: {', '.join(precisions)}" for name, precisions in formats.items())
        raise UsageError(f"precision must be one that the format supports ({supported}); got {precision} for {format}.")
    if precision == "int8" and not has_data:
        raise UsageError(
            "int8 must be calibrated on images like those to predict; got no images. Pass --data (Python: data=)."
        )
    if not 0 <= max_drop <= 100:
        raise UsageError(f"max_drop must be from 0 to 100 points; got {max_drop}.")
    if of_suffix not in (None, format):
        raise UsageError(
            f"format must match the suffix of {out}, {of_suffix}; got {format}. Leave format out, or choose a"
            " directory."
        )
    return format


def check_batch_sizes(batch_sizes: Sequence[int]) -> None:
    """Check the batch sizes at which exports are timed.

    Raises:
        UsageError: there is none, there are more than MAX_SIZES, or one is not from 1 to MAX_BATCH.
    """
    if len(set(batch_sizes)) > MAX_SIZES:
        raise UsageError(f"batch_sizes must be at most {MAX_SIZES} numbers; got {len(set(batch_sizes))}.")
    wrong = [size for size in batch_sizes if type(size) is not int or not 1 <= size <= MAX_BATCH]
    if wrong or not batch_sizes:
        raise UsageError(f"batch_sizes must be whole numbers from 1 to {MAX_BATCH}; got {wrong or 'none'}.")


def check_tools(format: str, precision: str) -> None:
    """Check that the packages are installed that an export needs.

    Raises:
        UsageError: one is not.
    """
    need("deploy", *NEEDS.get(format, ()), *(("nncf",) if (format, precision) == ("openvino", "int8") else ()))


def unsuitable(format: str, precision: str, *, has_data: bool) -> str | None:
    """Return why an export cannot be made or cannot be fast here; None if it can."""
    try:
        check_tools(format, precision)
    except UsageError as error:
        return str(error)
    if precision == "bf16" and not has_bf16():
        return "this processor emulates bf16" if cpu_flags() else "whether this processor has bf16 is not known"
    if precision == "int8" and not has_data:
        return "int8 is calibrated on images; none were given"
    return None


def precision_note(format: str, precision: str) -> str | None:
    """Return a note on an export in a precision for which this processor has no instructions; None if it has them."""
    if format == "torch":
        return bf16_note("cpu", precision)
    if precision == "bf16" and cpu_flags() and not has_bf16():
        return (
            "This processor has no bf16 instructions: OpenVINO computes this export in fp32 here, so its verification"
            " shows no error of bf16."
        )
    if precision == "int8" and cpu_flags() and not runs_int8(format):
        return (
            "This processor has no int8 instructions (VNNI): int8 can be slower than fp32. --format auto chooses the"
            " faster one."
        )
    return None


def runs_int8(format: str) -> bool:
    """Return whether this processor has instructions for int8 that the runtime of a format uses."""
    return has_int8(cpu_flags() if format == "onnx" else onednn_flags())
