"""Measure throughput under the protocol of a paper, next to its numbers: Table 3 of LeViT (arXiv 2104.01136).

BatchNorm is merged into the weights. A GPU computes in mixed precision (fp16 autocast) with large batches, a CPU in
fp32 with one thread and small ones; protocols.yaml has their sizes. The paper times each network for 60 s
after a warm-up of 10 s; here the networks take turns, of which each has its share of both, so that other load on the
machine affects all of them equally.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from weft.bench.worker import REFERENCE, Task
from weft.bench.worker_process import OutOfMemoryError, WorkerProcess
from weft.deploy.verification import relative_difference
from weft.devices import NO_CUDA
from weft.errors import UsageError, unknown
from weft.models.papers import MACHINES, Printed, printed_rows
from weft.processor import cpu_name, processor_class

SECONDS, ROUNDS = 60.0, 10
WARM_UP = 1 / 6  # of the timed seconds


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

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary of JSON values."""
        return asdict(self)


def protocol_models(protocol: str) -> dict[str, Printed]:
    """Return the rows of the paper's table with throughput whose networks weft or timm has, by name of the model.

    Raises:
        UsageError: an unknown protocol.
    """
    settings = _settings(protocol)
    return {
        row.builds: row
        for row in printed_rows("imagenet", settings["paper"])
        if (row.paper, row.table) == (settings["paper"], settings["table"]) and row.builds and row.images_per_second
    }


def _settings(protocol: str) -> dict[str, Any]:
    known = _protocols()
    if protocol not in known:
        raise unknown("protocol", protocol, known, ", ".join(known))
    return known[protocol]


@functools.cache
def _protocols() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name("protocols.yaml").read_text(encoding="utf-8"))


def measure_protocol(
    protocol: str,
    models: Sequence[str] = (),
    *,
    device: str = "cpu",
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    log: Callable[[str], None] = lambda text: None,
) -> list[ProtocolRow]:
    """Measure the models of a paper's table under its protocol.

    Args:
        protocol: name of the family in lower case, such as levit.
        models: names as in `protocol_models`, or as in the paper; none for all.
        device: cpu or cuda.
        seconds: timed seconds per model, in all rounds together, after a sixth of them as warm-up.
        rounds: number of turns of each model.
        log: called with a line of progress.

    Returns:
        One row per model, in the order of the paper.

    Raises:
        UsageError: an unknown protocol or model, or an invalid argument.
    """
    if not 0 < seconds < 86_400:
        raise UsageError(f"seconds must be more than 0 and less than a day; got {seconds:g}.")
    if rounds < 1:
        raise UsageError(f"rounds must be at least 1; got {rounds}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(NO_CUDA)
    settings, chosen = _settings(protocol), _chosen(protocol, models)
    on_gpu = device == "cuda"
    precision, threads = ("amp", torch.get_num_threads()) if on_gpu else ("fp32", 1)
    share = seconds / rounds
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: list[WorkerProcess] = []
        sizes: list[int] = []
        differences: list[float] = []
        for name, row in chosen.items():
            task = Task(name, None, False, "folded", precision, device, threads, img_size=row.size)
            worker = stack.enter_context(WorkerProcess(task, folder / f"{name}.npy"))
            worker.build()
            workers.append(worker)
            differences.append(_difference(worker, folder))
            gpu_batch = settings["gpu_batches"].get(name, settings["gpu_batch"])
            sizes.append(_batch_size(worker, gpu_batch if on_gpu else settings["cpu_batch"]))
            log(f"{name} is ready, batch {sizes[-1]}, {len(workers)} of {len(chosen)}")
        times: list[list[float]] = [[] for _ in workers]
        for number in range(rounds):
            for worker, size, calls in zip(workers, sizes, times, strict=True):
                calls += worker.turn(size, calls=1, seconds=share, warm_up=share * WARM_UP)
            speeds = (
                f"{name} {_speed(*done):.1f}" for name, done in zip(chosen, zip(sizes, times, strict=True), strict=True)
            )
            log(f"round {number + 1} of {rounds}, images/s: {', '.join(speeds)}")
    measured = dict(zip(chosen, map(_speed, sizes, times), strict=True))
    machine = _paper_machine(device)
    base = protocol_models(protocol)[settings["base"]]
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
                relative=measured[name] / measured[base.builds] if base.builds in measured else None,
                paper_relative=paper / paper_base if paper and paper_base else None,
                processor=torch.cuda.get_device_name() if on_gpu else cpu_name() or platform.machine(),
                processor_class=processor_class(),
                torch=torch.__version__,
            )
        )
    return rows


def _chosen(protocol: str, models: Sequence[str]) -> dict[str, Printed]:
    known = protocol_models(protocol)
    names = {row.model: name for name, row in known.items()}
    chosen = [names.get(str(model), str(model)) for model in models]
    for name in chosen:
        if name not in known:
            raise unknown(f"model of the protocol {protocol}", name, known, ", ".join(known))
    return {name: row for name, row in known.items() if not chosen or name in chosen}


def _difference(worker: WorkerProcess, folder: Path) -> float:
    """Return the largest difference of the logits from those of the network in fp32, relative to the largest logit."""
    task = worker.task
    original = Task(task.model, None, False, REFERENCE, "fp32", task.device, task.threads, img_size=task.img_size)
    with WorkerProcess(original, folder / f"{task.model}-original.npy") as reference:
        reference.build()
        expected, actual = reference.logits(1), worker.logits(1)
    return relative_difference(actual, expected)


def _batch_size(worker: WorkerProcess, size: int) -> int:
    """Return the batch size of the protocol, halved until the memory of the device suffices."""
    while True:
        try:
            worker.turn(size, calls=1, seconds=0, warm_up=0)
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
