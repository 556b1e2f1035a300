"""`weft export`: export a model and verify the export."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.cli.options import MODEL, add_common, example, print_json, table, whole

if TYPE_CHECKING:
    from weft.deploy.choosing import ConsideredExport

HELP = "export a model to ONNX, OpenVINO or torch, and verify its outputs"

EXAMPLE = """
weft export runs/photos deploy/photos --format openvino --precision int8 --data photos/
weft predict deploy/photos holiday/beach.jpg

weft export runs/photos deploy/photos --format auto --data photos/

auto builds the exports that fit this machine, times them, and keeps the fastest that holds the accuracy (chosen.json).
Formats: onnx (fp32, fp16, int8), openvino (fp32, fp16, bf16, int8), torch (fp32, fp16, bf16) and aotinductor (fp32,
bf16); the last two are .pt2 files for use outside weft.
int8 is calibrated on the training images of --data. An export that loses more than --max-drop points of top-1 on the
held-out images, significantly, is deleted, and the exit code is 7.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft export RUN OUT [options]"
    parser.add_argument("run", metavar="RUN", help=MODEL)
    parser.add_argument("out", metavar="OUT", help="directory to write, or a file .onnx, .xml or .pt2")
    formats = ("onnx", "openvino", "torch", "aotinductor", "auto")
    parser.add_argument("--format", choices=formats, help="export format (default: by the suffix of OUT, else onnx)")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16", "bf16", "int8"),
        help="number format (default: fp32; with --format auto the fastest)",
    )
    parser.add_argument("--data", metavar="DATA", help="labelled images for calibration and verification")
    parser.add_argument(
        "--max-drop",
        type=float,
        default=0.5,
        metavar="POINTS",
        help="maximum loss of top-1, in percentage points (default: 0.5)",
    )
    parser.add_argument(
        "--batch-size",
        nargs="+",
        metavar="N",
        help="images per batch at which --format auto times the exports (default: 1 16)",
    )
    add_common(parser, "--limit", "--max-pixels", "--follow-links", "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Export a model, and print the differences from the model."""
    from weft.inference.exports import BATCH_SIZES, export_run
    from weft.progress import say

    sizes = None if args.batch_size is None else [whole("--batch-size", text, 4096) for text in args.batch_size]
    report = export_run(
        args.run,
        args.out,
        format=args.format,
        precision=args.precision,
        data=args.data,
        max_drop=args.max_drop,
        batch_sizes=sizes,
        limit=args.limit,
        max_pixels=args.max_pixels,
        follow_links=args.follow_links,
        force=args.force,
    )
    if args.json:
        print_json(report.as_dict())
        return 0
    from weft.deploy.choosing import PACKAGES, precision_note
    from weft.intervals import accuracy_text
    from weft.processor import bf16_note

    print(f"{report.out}: {report.format} {report.precision}, {report.bytes / 1e6:.1f} MB")
    print(f"compared with the model on {report.images:,} {report.compared_on}: {report.agreement:.2f} % equal top-1")
    print(
        f"difference of logits: maximum {report.max_difference:.2g}, mean {report.mean_difference:.2g};"
        f" largest logit {report.max_logit:.3g}"
    )
    if report.top1 is not None and report.top1_model is not None:
        print(f"top-1: {accuracy_text(report.top1, report.images)}; of the model: {report.top1_model:.2f} %")
        print(report.drop_text(args.max_drop))
    if not report.candidates:
        if report.format in PACKAGES:
            text = precision_note(report.format, report.precision, report.time_to_fp32)
        else:
            text = bf16_note("cpu", report.precision)
        if text is not None:
            say(text)
    if report.candidates:
        print("\n" + _table(report.candidates, sizes or BATCH_SIZES))
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
