"""`weft bench`: measure latency and throughput on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from weft.cli import options as opt
from weft.cli.options import in_group, one_format, print_csv, print_json, table

if TYPE_CHECKING:
    from weft.bench.speed import SpeedRow

HEADER = ("model", "way", "precision", "batch", "p50 ms", "p95 ms", "images/s", "ratio", "MB", "differs")


def bench(
    *models: Annotated[str, Parameter(required=True, help="model names, run directories or exports")],
    backends: Annotated[opt.Words, Parameter(metavar="BACKEND")] = None,
    precision: Annotated[opt.Words, in_group("Machine", metavar="P")] = None,
    batch_size: Annotated[opt.Words, in_group("Machine", alias="-b", metavar="N")] = None,
    rounds: opt.Positive = 10,
    img_size: opt.ImageSize = None,
    threads: opt.Threads = None,
    device: Annotated[Literal["cpu", "cuda"], in_group("Machine", metavar="cpu|cuda")] = "cpu",
    csv: Annotated[
        bool, opt.as_csv("one line per model, backend, precision and batch size, with the keys of --json")
    ] = False,
    plugins: opt.Plugins = opt.Plugins(),
    shown: opt.Shown = opt.Shown(),
) -> int:
    """Measure latency and throughput of models on this machine, in every runtime.

    Args:
        backends: ways to run a model: eager, folded, compiled, onnx, openvino (default: eager folded)
        precision: fp32, bf16 or int8 (default: fp32)
        batch_size: images per batch, or best (default: 1 16)
        rounds: number of turns of each way (default: 10)
        device: device (default: cpu)

    Example:
        weft bench levit_256 --backends eager folded openvino --precision fp32 bf16
        weft bench runs/photos deploy/photos --batch-size 1 best

        All ways take turns on the same images. ratio: throughput relative to the first line with the same batch size.
        differs: largest difference of the logits from the model in fp32, relative to the largest logit (meaningless for
        int8, which is calibrated on noise here). MB: memory of the process, or on a GPU the most that it has allocated
        there.
    """
    one_format(json=shown.json, csv=csv)
    from weft.bench.speed import speed

    rows = speed(
        models,
        backends=backends or ["eager", "folded"],
        precisions=precision or ["fp32"],
        batch_sizes=[int(text) if text.isascii() and text.isdecimal() else text for text in batch_size or ["1", "16"]],
        rounds=rounds,
        img_size=img_size,
        threads=threads,
        device=device,
    )
    if shown.json:
        print_json([row.as_dict() for row in rows])
    elif csv:
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
