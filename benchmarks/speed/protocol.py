"""Measure throughput under the protocol of the LeViT paper (arXiv 2104.01136), next to the numbers of its Table 3.

    python benchmarks/speed/protocol.py                          # all networks of the table: half an hour on a CPU
    python benchmarks/speed/protocol.py levit_128s levit_256 --seconds 10
    python benchmarks/speed/protocol.py --device cuda --csv benchmarks/speed/levit-protocol.csv

The networks are the five LeViT, and from timm the two distilled DeiT and EfficientNet-B0 to B4, each at the image size
of the paper. BatchNorm is merged into the weights, of timm's networks also. A GPU computes in mixed precision (fp16
autocast) with large batches, a CPU in fp32 with one thread and small ones. The paper times each network for 60 s after
a warm-up of 10 s; here the networks take turns, of which each has its share of both, so that other load on the machine
affects all of them equally. The paper's script also traces the networks with TorchScript, which PyTorch deprecates;
here they run in eager mode.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv
from benchmarks.common.ways import worker

from weft.bench.worker import OutOfMemoryError
from weft.bench.worker_process import WorkerProcess
from weft.cli.options import table
from weft.deploy.verification import relative_difference
from weft.errors import UsageError, unknown
from weft.machine.processor import cpu_name, processor_class
from weft.models.papers import MACHINES, Printed, printed_rows

SECONDS, ROUNDS = 60.0, 10
WARM_UP = 1 / 6  # of the timed seconds
BASE = "levit_128s"  # model that the throughput of the others is also given relative to
# batches of the released timing script
CPU_BATCH = 16
GPU_BATCH = 2048
GPU_BATCHES = {  # of models with another one
    "levit_384": 1024,
    "efficientnet_b0": 1024,
    "efficientnet_b1": 1024,
    "efficientnet_b2": 512,
    "efficientnet_b3": 512,
    "efficientnet_b4": 256,
}


@dataclass(frozen=True)
class ProtocolRow:
    """Throughput of one model, measured here and in the paper.

    Attributes:
        model, paper_model: name for `weft.create_model`, and in the paper.
        img_size, batch_size, precision, device, threads: what was measured; amp is fp16 autocast.
        images_per_second: number of images divided by the time of all timed calls.
        calls, seconds: number of timed calls, and their time.
        difference: largest difference of the logits from those of the original network in fp32, relative to the largest
            logit.
        machine: of the paper's number; None if the paper has none of this kind.
        paper: images per second in the paper.
        ratio: measured throughput, relative to the paper's.
        base: model of the paper that the next two are relative to.
        relative, paper_relative: throughput relative to `base`, measured here and in the paper;
            None if it is not measured.
        processor, processor_class, torch: what measured it; processor is the name of the GPU, where it is one.
    """

    model: str
    paper_model: str
    img_size: int
    batch_size: int
    precision: str
    device: str
    threads: int
    images_per_second: float
    calls: int
    seconds: float
    difference: float
    machine: str | None
    paper: float | None
    ratio: float | None
    base: str
    relative: float | None
    paper_relative: float | None
    processor: str
    processor_class: str
    torch: str


def protocol_models() -> dict[str, Printed]:
    """Return the rows of the paper's table with throughput whose networks weft or timm has, by name of the model."""
    return {
        row.builds: row
        for row in printed_rows("imagenet", "LeViT")
        if (row.paper, row.table) == ("LeViT", "3") and row.builds and row.images_per_second
    }


def measure_protocol(
    models: Sequence[str] = (), *, device: str = "cpu", seconds: float = SECONDS, rounds: int = ROUNDS
) -> list[ProtocolRow]:
    """Measure the models of the paper's table under its protocol.

    Args:
        models: names as in `protocol_models`, or as in the paper; none for all.
        device: cpu or cuda.
        seconds: timed seconds per model, in all rounds together, after a sixth of them as warm-up.
        rounds: number of turns of each model.

    Returns:
        One row per model, in the order of the paper.

    Raises:
        UsageError: an unknown model, or the memory does not suffice for one image.
    """
    chosen, on_gpu = _chosen(models), device == "cuda"
    precision, threads = ("amp", torch.get_num_threads()) if on_gpu else ("fp32", 1)
    share = seconds / rounds
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: list[WorkerProcess] = []
        sizes: list[int] = []
        differences: list[float] = []
        for name, row in chosen.items():
            options = dict(folder=folder, threads=threads, device=device, img_size=row.size)
            process = stack.enter_context(worker(name, "folded", precision, **options))
            process.build()
            workers.append(process)
            with worker(name, "eager", "fp32", **options) as reference:
                reference.build()
                differences.append(relative_difference(process.logits(1), reference.logits(1)))
            sizes.append(_batch_size(process, GPU_BATCHES.get(name, GPU_BATCH) if on_gpu else CPU_BATCH))
            print(f"{name} is ready, batch {sizes[-1]}, {len(workers)} of {len(chosen)}", flush=True)
        times: list[list[float]] = [[] for _ in workers]
        for number in range(rounds):
            for process, size, calls in zip(workers, sizes, times, strict=True):
                calls += process.turn(size, calls=1, seconds=share, warm_up=share * WARM_UP)
            speeds = (f"{name} {speed:.1f}" for name, speed in zip(chosen, map(_speed, sizes, times), strict=True))
            print(f"round {number + 1} of {rounds}, images/s: {', '.join(speeds)}", flush=True)
    measured = dict(zip(chosen, map(_speed, sizes, times), strict=True))
    machine = _paper_machine(device)
    base = protocol_models()[BASE]
    rows = []
    for name, size, calls, difference in zip(chosen, sizes, times, differences, strict=True):
        paper, paper_base = (row.images_per_second.get(machine or "") for row in (chosen[name], base))
        rows.append(
            ProtocolRow(
                model=name,
                paper_model=chosen[name].model,
                img_size=chosen[name].size,
                batch_size=size,
                precision=precision,
                device=device,
                threads=threads,
                images_per_second=measured[name],
                calls=len(calls),
                seconds=sum(calls),
                difference=difference,
                machine=machine,
                paper=paper,
                ratio=measured[name] / paper if paper else None,
                base=base.model,
                relative=measured[name] / measured[BASE] if BASE in measured else None,
                paper_relative=paper / paper_base if paper and paper_base else None,
                processor=torch.cuda.get_device_name() if on_gpu else cpu_name() or platform.machine(),
                processor_class=processor_class(),
                torch=torch.__version__,
            )
        )
    return rows


def _chosen(models: Sequence[str]) -> dict[str, Printed]:
    known = protocol_models()
    names = {row.model: name for name, row in known.items()}
    chosen = [names.get(str(model), str(model)) for model in models]
    for name in chosen:
        if name not in known:
            raise unknown("model of the protocol", name, known, ", ".join(known))
    return {name: row for name, row in known.items() if not chosen or name in chosen}


def _batch_size(process: WorkerProcess, size: int) -> int:
    """Return the batch size of the protocol, halved until the memory of the device suffices."""
    while True:
        try:
            process.turn(size, calls=1, seconds=0, warm_up=0)
        except OutOfMemoryError:
            if size == 1:
                raise
            size //= 2
        else:
            return size


def _speed(size: int, calls: Sequence[float]) -> float:
    return size * len(calls) / sum(calls)


def _paper_machine(device: str) -> str | None:
    """Return the machine of the paper that is of the kind of this one."""
    if device == "cuda":
        return MACHINES["v100"]
    machine = platform.machine().lower()
    kinds = {"x86_64": "xeon", "amd64": "xeon", "aarch64": "graviton2", "arm64": "graviton2"}
    return MACHINES[kinds[machine]] if machine in kinds else None


def shown(rows: Sequence[ProtocolRow]) -> str:
    """Return the table of a measurement, with the machines below it."""
    row = rows[0]
    header = ("model", "batch", "images/s", "paper", "ratio", f"to {row.base}", "paper", "differs")
    where = row.processor if row.device == "cuda" else f"{row.processor} ({row.processor_class}), one thread"
    paper = row.machine or "no such machine"
    return (
        f"{table(header, map(_cells, rows))}\n\nMeasured: {where}, {row.precision}, torch {row.torch}. Paper: {paper}."
    )


def _cells(row: ProtocolRow) -> tuple[str, ...]:
    return (
        row.paper_model,
        str(row.batch_size),
        f"{row.images_per_second:.1f}",
        "-" if row.paper is None else f"{row.paper:g}",
        *("-" if value is None else f"{value:.3f}" for value in (row.ratio, row.relative, row.paper_relative)),
        f"{row.difference:.1g}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="default: all of the table")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="timed seconds per model, in all turns")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of turns of each model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--csv", type=Path, help="file for the rows")
    args = parser.parse_args()
    try:
        rows = measure_protocol(args.models, device=args.device, seconds=args.seconds, rounds=args.rounds)
    except UsageError as error:
        parser.error(str(error))
    if args.csv:
        write_csv(args.csv, [asdict(row) for row in rows])
    print(shown(rows))


if __name__ == "__main__":
    main()
