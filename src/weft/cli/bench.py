"""`weft bench`: measure latency and throughput on this machine."""

from __future__ import annotations

import argparse

from weft.cli.options import add_common, example, print_csv, print_json, table, whole
from weft.processor import MAX_THREADS

HELP = "measure latency and throughput of models on this machine, in every runtime"

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

Models alternate on the same images. ratio: throughput relative to the first line with the same batch size. peak %:
share of this machine's measured peak of matrix multiplication. differs: largest difference of the logits from the model
in fp32, relative to the largest logit (meaningless for int8, which is calibrated on noise here).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft bench MODEL [MODEL ...] [options]"
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name from `weft models`, run directory or export")
    ways = "eager, folded, compiled, graphed (CUDA graphs), onnx, openvino"
    parser.add_argument("--ways", nargs="+", default=["eager", "folded"], metavar="WAY", help=ways)
    parser.add_argument("--precision", nargs="+", default=["fp32"], metavar="P", help="fp32, bf16, int8")
    parser.add_argument(
        "--allocator",
        nargs="+",
        default=["default"],
        metavar="A",
        help="memory allocator: default, keep (weft.keep_memory, as in train, evaluate, predict and serve), or both",
    )
    parser.add_argument(
        "--batch-size", nargs="+", default=["1", "16"], metavar="N", help="images per batch, or best (default: 1 16)"
    )
    parser.add_argument("--rounds", default="10", metavar="N", help="rounds of three calls each (default: 10)")
    add_common(parser, "--threads")
    parser.add_argument(
        "--peers", action="store_true", help="also measure the same networks of timm, transformers and vit-pytorch"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--plot", metavar="FILE", help="plot throughput against multiply-adds (.png, .svg or .pdf)")
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
