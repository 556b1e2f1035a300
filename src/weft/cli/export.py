"""`weft export`: export a model and verify the export."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, print_json

HELP = "export a model to ONNX, OpenVINO or torch, and verify its outputs"

EXAMPLE = """
weft export runs/photos deploy/photos --format openvino --precision int8 --data photos/
weft predict deploy/photos holiday/beach.jpg

Formats: onnx (fp32, fp16, int8), openvino (fp32, fp16, bf16, int8), torch (fp32, fp16, bf16) and aotinductor (fp32,
bf16); the last two are .pt2 files for use outside weft.
int8 is calibrated on the training images of --data. An export that loses more than --max-drop points of top-1 on the
held-out images is deleted, and the exit code is 7.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft export RUN OUT [options]"
    parser.add_argument("run", metavar="RUN", help="run directory (its best model is used) or model directory")
    parser.add_argument("out", metavar="OUT", help="directory to write, or a file .onnx, .xml or .pt2")
    formats = ("onnx", "openvino", "torch", "aotinductor")
    parser.add_argument("--format", choices=formats, help="format (default: by the suffix of OUT, else onnx)")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16", "bf16", "int8"), help="default: fp32")
    parser.add_argument("--data", metavar="DATA", help="labelled images for calibration and verification")
    parser.add_argument(
        "--max-drop",
        type=float,
        default=0.5,
        metavar="POINTS",
        help="largest accepted loss of top-1, in points (default: 0.5)",
    )
    add_common(parser, "--limit", "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Exports, and says how near it came."""
    from weft.train.apply import export_run

    report = export_run(
        args.run,
        args.out,
        format=args.format,
        precision=args.precision,
        data=args.data,
        max_drop=args.max_drop,
        limit=args.limit,
        force=args.force,
        quiet=args.quiet,
    )
    if args.json:
        print_json(report.as_dict())
        return 0
    print(f"{report.out}: {report.format} {report.precision}, {report.bytes / 1e6:.1f} MB")
    print(f"compared with the model on {report.images:,} {report.compared_on}: {report.agreement:.2f} % equal top-1")
    print(
        f"logits differ by {report.max_difference:.2g} at most, {report.mean_difference:.2g} on average;"
        f" the largest is {report.max_logit:.3g}"
    )
    if report.top1 is not None and report.top1_model is not None:
        print(f"top-1: {report.top1:.2f} %, the model {report.top1_model:.2f} %")
    return 0
