"""`weft bench`: measure latency and throughput on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from weft.cli.options import add_common, example, note, one_format, print_csv, print_json, table, whole
from weft.errors import UsageError
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

COLD_START = ("start s", "peak MB", "disk MB")

# options that a protocol fixes -> their defaults without one
FIXED: dict[str, Any] = {
    "ways": ["eager", "folded"],
    "precision": ["fp32"],
    "allocator": ["default"],
    "batch_size": ["1", "16"],
    "threads": None,
    "peers": False,
    "cold_start": False,
    "plot": None,
}

EXAMPLE = """
weft bench levit_256 --ways eager folded openvino --precision fp32 bf16 --peers
weft bench runs/photos deploy/photos --batch-size 1 best
weft bench levit_128s levit_256 ceit_tiny_patch16_224 --ways openvino --precision fp32 bf16 int8 --plot speed.png
weft bench --protocol levit levit_128s levit_256    # one thread, batch 16, next to the LeViT paper's numbers

All ways take turns on the same images. ratio: throughput relative to the first line with the same batch size. peak %:
percent of this machine's measured peak of matrix multiplication. differs: largest difference of the logits from the
model in fp32, relative to the largest logit (meaningless for int8, which is calibrated on noise here). With
--cold-start, start s, peak MB, disk MB: needs of a new process of `weft predict` with one image, and of its files.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft bench MODEL [MODEL ...] [options]\n       weft bench --protocol levit [MODEL ...] [options]"
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="model name, run directory or export; a directory comes first"
    )
    parser.add_argument(
        "--protocol",
        metavar="PAPER",
        help="measure as a paper does, next to its numbers: levit, Table 3 (default MODELs: all of the table)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="with --protocol: timed seconds per model, in all turns (default: 60)",
    )
    ways = "eager, folded, compiled, graphed (CUDA graphs), aotinductor, onnx, openvino"
    parser.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help=f"ways to run a model: {ways} (default: eager folded)",
    )
    parser.add_argument("--precision", nargs="+", metavar="P", help="fp32, tf32 (GPU), bf16 or int8 (default: fp32)")
    parser.add_argument(
        "--allocator",
        nargs="+",
        metavar="A",
        help="memory allocator: default, keep (weft.keep_memory, as in train, evaluate, predict and serve), or both",
    )
    parser.add_argument("--batch-size", nargs="+", metavar="N", help="images per batch, or best (default: 1 16)")
    parser.add_argument(
        "--rounds", default="10", metavar="N", help="number of turns of each way or model (default: 10)"
    )
    add_common(parser, "--threads")
    parser.add_argument(
        "--peers", action="store_true", help="also measure the same networks of timm, transformers and vit-pytorch"
    )
    parser.add_argument(
        "--cold-start",
        action="store_true",
        help="also start `weft predict` with what folded, onnx and openvino deploy: time, memory, disk space",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device (default: cpu)")
    parser.add_argument("--plot", metavar="FILE", help="plot throughput against multiply-adds (.png, .svg or .pdf)")
    parser.add_argument("--csv", action="store_true", help="print the result as CSV")
    add_common(parser, "--json")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Measure speeds, and print the table."""
    one_format(args)
    if args.protocol:
        return _protocol(args)
    if args.seconds is not None:
        raise UsageError("--seconds belongs to --protocol; without one, a turn takes 0.25 s. Use --rounds N.")
    if not args.models:
        raise UsageError("weft bench needs a MODEL, or --protocol levit; got neither. See: weft bench --help")
    for name, default in FIXED.items():
        setattr(args, name, getattr(args, name) or default)
    from weft.bench.choices import BEST, check_choices, check_cold_start
    from weft.checkpoints.resolve import check_model, is_path
    from weft.devices import check_device
    from weft.models.families import check_name

    batch_sizes = [text if text == BEST else whole("--batch-size", text) for text in args.batch_size]
    rounds = whole("--rounds", args.rounds)
    threads = None if args.threads is None else whole("--threads", args.threads, MAX_THREADS)
    check_choices(args.ways, args.precision, args.allocator, batch_sizes, rounds, threads or 1, args.device)
    check_cold_start(args.cold_start, args.device)
    check_device(args.device)
    for model in args.models:
        if is_path(model):
            check_model(model)
    if args.plot and all(map(_is_export, args.models)):
        raise UsageError("A plot needs multiply-adds, which are not known for exports; also measure a model or a run.")
    from weft.progress import loading

    with loading():
        from weft.bench.plot import check_plot, plot_speed
        from weft.bench.speed import speed
        from weft.capabilities import bf16_note

        for model in args.models:
            if not is_path(model):
                check_name(model)
    if args.plot:
        check_plot(args.plot)
    if "bf16" in args.precision and (emulated := bf16_note(args.device, "bf16")) is not None:
        note(emulated)
    rows = speed(
        args.models,
        ways=args.ways,
        precisions=args.precision,
        allocators=args.allocator,
        batch_sizes=batch_sizes,
        rounds=rounds,
        threads=threads,
        peers=args.peers,
        device=args.device,
        cold_start=args.cold_start,
        log=note,
    )
    if args.json:
        print_json([row.as_dict() for row in rows])
    elif args.csv:
        print_csv(list(rows[0].as_dict()), [list(row.as_dict().values()) for row in rows])
    elif args.cold_start:
        print(table((*HEADER, *COLD_START), [(*_cells(row), *_needs(row)) for row in rows]))
    else:
        print(table(HEADER, [_cells(row) for row in rows]))
    if args.plot:
        plot_speed(rows, args.plot)
    return 0


def _is_export(model: str) -> bool:
    """Return whether a path is an export."""
    from weft.checkpoints.config import read_config
    from weft.checkpoints.resolve import local_model_dir

    folder = local_model_dir(model)
    return folder is not None and "artefact" in read_config(folder)


def _protocol(args: argparse.Namespace) -> int:
    given = [f"--{name.replace('_', '-')}" for name in FIXED if getattr(args, name)]
    if given:
        raise UsageError(f"--protocol {args.protocol} fixes the settings of a measurement; leave out {given[0]}.")
    from weft.progress import loading

    with loading():
        from weft.bench.protocol import SECONDS, measure_protocol

    rows = measure_protocol(
        args.protocol,
        args.models,
        device=args.device,
        seconds=SECONDS if args.seconds is None else args.seconds,
        rounds=whole("--rounds", args.rounds),
        log=note,
    )
    if args.json:
        print_json([row.as_dict() for row in rows])
    elif args.csv:
        print_csv(list(rows[0].as_dict()), [list(row.as_dict().values()) for row in rows])
    else:
        row = rows[0]
        header = ("model", "batch", "images/s", "paper", "ratio", f"to {row.base}", "paper", "differs")
        print(table(header, [_protocol_cells(row) for row in rows]))
        where = row.processor if row.device == "cuda" else f"{row.processor} ({row.processor_class}), one thread"
        print(f"\nMeasured: {where}, {row.precision}, torch {row.torch}. Paper: {row.machine or 'no such machine'}.")
    return 0


def _protocol_cells(row) -> tuple[str, ...]:
    return (
        row.paper_model,
        str(row.batch_size),
        f"{row.images_per_second:.1f}",
        "-" if row.paper is None else f"{row.paper:g}",
        *("-" if value is None else f"{value:.3f}" for value in (row.ratio, row.relative, row.paper_relative)),
        f"{row.difference:.1g}",
    )


def _cells(row) -> tuple[str, ...]:  # no annotation: its module imports torch, which --help must not
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


def _needs(row) -> tuple[str, ...]:
    values = ((row.cold_start_s, ".2f"), (row.peak_mb, ".0f"), (row.disk_mb, ".1f"))
    return tuple("-" if value is None else f"{value:{form}}" for value, form in values)
