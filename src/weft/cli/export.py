"""`weft export`: export a model and verify the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import flat, given, in_group, print_json, table
from weft.deploy.formats import AUTO, BATCH_SIZES, FORMATS, precision_note

if TYPE_CHECKING:
    from weft.deploy.verification import ConsideredExport


@flat
class Labelled:
    """Reading of the images of --data."""

    limit: str | None = None
    max_pixels: str | None = None
    follow_links: bool | None = None


def export(
    run: opt.Model,
    out: str,
    /,
    *,
    format: Annotated[str | None, Parameter(metavar="FORMAT", choices=(*FORMATS, AUTO))] = None,
    precision: Annotated[Literal["fp32", "fp16", "bf16", "int8"] | None, in_group("Machine", metavar="P")] = None,
    data: Annotated[str | None, in_group("Data", metavar="DATA")] = None,
    max_drop: Annotated[float, Parameter(metavar="POINTS")] = 0.5,
    batch_size: Annotated[list[int] | None, in_group("Machine", alias="-b", metavar="N", consume_multiple=1)] = None,
    labelled: Labelled = Labelled(),
    plugins: opt.Plugins = opt.Plugins(),
    output: opt.Output = opt.Output(),
) -> int:
    """Export a model to ONNX, OpenVINO or torch, and verify its outputs.

    Args:
        out: output directory: the model, report.json; or output file: .onnx, .xml, .pt2
        format: onnx, openvino, torch or auto (default: by the suffix of OUT, else onnx)
        precision: number format: fp32, fp16, bf16 or int8 (default: fp32; with --format auto all)
        data: labelled images for calibration and verification
        max_drop: maximum loss of top-1, in percentage points (default: 0.5)
        batch_size: images per batch at which --format auto times the exports (default: 1 16)

    Example:
        weft export runs/photos deploy/photos --format openvino --precision int8 --data photos/
        weft predict deploy/photos holiday/beach.jpg

        weft export runs/photos deploy/photos --format auto --data photos/

        auto builds the exports that fit this machine and hold the accuracy, and times them. The fastest is used
        (chosen.json).
        Formats: onnx (fp32, fp16, int8), openvino (fp32, fp16, bf16, int8) and torch (fp32, fp16, bf16), a .pt2 file
        for use outside weft.
        int8 is calibrated on the training images of --data. An export that loses more than --max-drop points of top-1
        on the held-out images, and more than one image, is deleted, and the exit code is 7.
    """
    from weft.inference.exports import export_run
    from weft.progress import say

    report = export_run(
        run,
        out,
        format=format,
        precision=precision,
        data=data,
        max_drop=max_drop,
        batch_sizes=batch_size,
        force=output.force,
        **given(labelled),
    )
    if output.json:
        print_json(report.as_dict())
        return 0
    from weft.report.intervals import accuracy_text

    print(f"{report.out}: {report.format} {report.precision}, {report.bytes / 1e6:.1f} MB")
    print(f"compared with the model on {report.images:,} {report.compared_on}: {report.agreement:.2f} % equal top-1")
    print(
        f"difference of logits: maximum {report.max_difference:.2g}, mean {report.mean_difference:.2g};"
        f" largest logit {report.max_logit:.3g}"
    )
    if report.top1 is not None and report.top1_model is not None:
        print(f"top-1: {accuracy_text(report.top1, report.images)}; of the model: {report.top1_model:.2f} %")
        print(report.drop_text(max_drop))
    if report.candidates:
        print("\n" + _table(report.candidates, batch_size or BATCH_SIZES))
    elif (text := precision_note(report.format, report.precision)) is not None:
        say(text)
    return 0


def _table(candidates: Sequence[ConsideredExport], batch_sizes: Sequence[int]) -> str:
    """Return the candidates of format auto with images per second by batch size, and why others were refused."""
    rows = [
        (
            row.format,
            row.precision,
            *(f"{size / row.seconds[str(size)]:.1f}" if str(size) in row.seconds else "-" for size in batch_sizes),
            row.refused or "",
        )
        for row in candidates
    ]
    return table(("format", "precision", *(f"images/s at {size}" for size in batch_sizes), "refused"), rows)
