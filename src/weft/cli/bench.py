"""`weft bench`: how fast models, runs and exports answer on this machine."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, print_csv, print_json, table, whole
from weft.processor import MAX_THREADS

HELP = "measure how fast models answer here, in every way that they can be run"

HEADER = (
    "model",
    "way",
    "precision",
    "allocator",
    "batch",
    "p50 ms",
    "p95 ms",
    "images/s",
    "ratio",
    "peak %",
    "MACs",
    "differs",
)

EXAMPLE = """
weft bench levit_256 --ways eager folded openvino --precision fp32 bf16 --peers
weft bench runs/photos deploy/photos --batch-size 1 best
weft bench levit_128s levit_256 ceit_tiny_patch16_224 --ways openvino --precision fp32 bf16 int8 --plot speed.png

All are measured in turns on the same images. ratio is to the first line of its batch size, peak % the share of this
machine's measured peak of matrix products, differs the largest difference of logits from the model's in fp32 to the
largest of these (of int8 without meaning: it is calibrated on noise here).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft bench MODEL [MODEL ...] [options]"
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name from `weft models`, a run or an export")
    ways = "eager, folded, compiled, graphed (CUDA graphs), onnx, openvino"
    parser.add_argument("--ways", nargs="+", default=["eager", "folded"], metavar="WAY", help=ways)
    parser.add_argument("--precision", nargs="+", default=["fp32"], metavar="P", help="fp32, bf16, int8")
    parser.add_argument(
        "--allocator",
        nargs="+",
        default=["default"],
        metavar="A",
        help="default, keep (weft.keep_memory, as train, evaluate, predict and serve); both: a row for each",
    )
    parser.add_argument(
        "--batch-size", nargs="+", default=["1", "16"], metavar="N", help="images at a time, or best (default: 1 16)"
    )
    parser.add_argument(
        "--rounds", default="10", metavar="N", help="turns of each, three calls in a turn (default: 10)"
    )
    add_common(parser, "--threads")
    parser.add_argument("--peers", action="store_true", help="timm's, transformers', vit-pytorch's, too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--plot", metavar="FILE", help="speed against multiply-adds, as .png, .svg or .pdf")
    parser.add_argument("--csv", action="store_true", help="print the result as CSV")
    add_common(parser, "--json")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the table."""
    from weft.bench.plot import check_plot, plot_speed
    from weft.bench.speed import BEST, speed

    if args.plot:
        check_plot(args.plot)
    rows = speed(
        args.models,
        ways=args.ways,
        precisions=args.precision,
        allocators=args.allocator,
        batch_sizes=[text if text == BEST else whole("--batch-size", text) for text in args.batch_size],
        rounds=whole("--rounds", args.rounds),
        threads=None if args.threads is None else whole("--threads", args.threads, MAX_THREADS),
        peers=args.peers,
        device=args.device,
    )
    if args.json:
        print_json([row.as_dict() for row in rows])
    elif args.csv:
        print_csv(list(rows[0].as_dict()), [list(row.as_dict().values()) for row in rows])
    else:
        print(table(HEADER, [_cells(row) for row in rows]))
    if args.plot:
        plot_speed(rows, args.plot)
    return 0


def _cells(row) -> tuple[str, ...]:  # its module brings torch, which --help must not pay for
    return (
        row.model,
        row.way,
        row.precision,
        row.allocator,
        str(row.batch_size),
        f"{row.p50_ms:.1f}",
        f"{row.p95_ms:.1f}",
        f"{row.images_per_second:.1f}",
        f"{row.ratio:.2f}",
        "-" if row.peak_percent is None else f"{row.peak_percent:.0f}",
        "-" if row.macs is None else f"{row.macs / 1e6:.0f}M",
        "-" if row.difference is None else f"{row.difference:.1g}",
    )
