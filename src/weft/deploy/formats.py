"""Formats of exports, and which of them fit together. No torch is imported."""

from __future__ import annotations

from pathlib import Path

from weft.errors import UsageError

FORMATS = {  # and their precisions
    "onnx": ("fp32", "fp16", "int8"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "torch": ("fp32", "fp16", "bf16"),
    "aotinductor": ("fp32", "bf16"),
}
AUTO = "auto"  # the fastest of several, by measurement
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
    if suffix in UNSUPPORTED:
        raise UsageError(
            f"The name of an exported file must end in {', '.join(SUFFIXES)}; got {out}. Choose one of them, or a"
            " directory."
        )
    format = format or SUFFIXES.get(suffix, "onnx")
    if format not in (*FORMATS, AUTO):
        raise UsageError(f"format must be one of {', '.join((*FORMATS, AUTO))}; got {format!r}.")
    if format == AUTO:
        if suffix in SUFFIXES:
            raise UsageError(f"format auto writes a directory; got the file name {out}. Pass the name of a directory.")
        if precision not in (None, "fp32", "bf16", "int8"):
            raise UsageError(f"precision must be fp32, bf16 or int8 with format auto; got {precision}. Leave it out.")
    precision = precision or "fp32"
    if format != AUTO and precision not in FORMATS[format]:
        supported = "; ".join(f"{name}: {', '.join(precisions)}" for name, precisions in FORMATS.items())
        raise UsageError(f"precision must be one that the format supports ({supported}); got {precision} for {format}.")
    if precision == "int8" and not has_data:
        raise UsageError(
            "int8 must be calibrated on images like those to predict; got no images. Pass --data (Python: data=)."
        )
    if not 0 <= max_drop <= 100:
        raise UsageError(f"max_drop must be from 0 to 100 points; got {max_drop}.")
    if suffix in SUFFIXES and suffix != _SUFFIX[format]:
        raise UsageError(
            f"format must match the suffix of {out}, {SUFFIXES[suffix]}; got {format}. Leave format out, or choose a"
            " directory."
        )
    return format


_SUFFIX = {format: suffix for suffix, format in SUFFIXES.items()} | {"aotinductor": ".pt2"}
