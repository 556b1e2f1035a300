"""`weft bench`: measure latency and throughput on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from weft.cli.options import add_common, example, one_format, print_csv, print_json, table, whole
from weft.processor import MAX_THREADS

if TYPE_CHECKING:
    from weft.bench.speed import SpeedRow

HELP = "measure latency and throughput of models on this machine, in every runtime"

HEADER = ("model", "way", "precision", "batch", "p50 ms", "p95 ms", "images/s", "ratio", "MB", "differs")

EXAMPLE = """
weft bench levit_256 --backends eager folded openvino --precision fp32 bf16
weft bench runs/photos deploy/photos --batch-size 1 best

All ways take turns on the same images. ratio: throughput relative to the first line with the same batch size. differs:
largest difference of the logits from the model in fp32, relative to the largest logit (meaningless for int8, which is
calibrated on noise here). MB: memory of the process, or on a GPU the most that it has allocated there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model name, run directory or export")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["eager", "folded"],
        metavar="BACKEND",
        help="ways to run a model: eager, folded, compiled, onnx, openvino (default: eager folded)",
    )
    parser.add_argument(
        "--precision", nargs="+", default=["fp32"], metavar="P", help="fp32, bf16 or int8 (default: fp32)"
    )
    parser.add_argument(
        "--batch-size", nargs="+", default=["1", "16"], metavar="N", help="images per batch, or best (default: 1 16)"
    )
    parser.add_argument("--rounds", default="10", metavar="N", help="number of turns of each way (default: 10)")
    add_common(parser, "--threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: cpu)")
    parser.add_argument("--csv", action="store_true", help="print the result as CSV")
    add_common(parser, "--json")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Measure speeds, and print the table."""
    one_format(args)
    from weft.bench.speed import BEST, speed

    rows = speed(
        args.models,
        backends=args.backends,
        precisions=args.precision,
        batch_sizes=[text if text == BEST else whole("--batch-size", text) for text in args.batch_size],
        rounds=whole("--rounds", args.rounds),
        threads=None if args.threads is None else whole("--threads", args.threads, MAX_THREADS),
        device=args.device,
    )
    if args.json:
        print_json([row.as_dict() for row in rows])
    elif args.csv:
        print_csv(list(rows[0].as_dict()), [list(row.as_dict().values()) for row in rows])
    else:
        print(table(HEADER, [_cells(row) for row in rows]))
    return 0


def _cells(row: SpeedRow) -> tuple[str, ...]:
    return (
        row.model,
        row.way,
        row.precision,
        str(row.batch_size),
        f"{row.p50_ms:.1f}",
        f"{row.p95_ms:.1f}",
        f"{row.images_per_second:.1f}",
        f"{row.ratio:.2f}",
        f"{row.memory_mb:.0f}",
        "-" if row.difference is None else f"{row.difference:.1g}",
    )
