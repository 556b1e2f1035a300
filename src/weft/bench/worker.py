"""Run one model in one runtime, in a process of its own.

Started by `speed` as `python -m weft.bench.worker`, and spoken to in lines of JSON: first what to build, then how many
calls with how many images to time. Thread pools of torch, ONNX Runtime and OpenVINO in one process disturb each other
by a fifth; in processes that wait for their turn they do not.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.bench.cost import Cost, cost
from weft.bench.peers import build_peer, peers_of
from weft.checkpoints import load_checkpoint
from weft.checkpoints.model_dir import model_dir
from weft.deploy import ExportedModel, fold, open_model
from weft.deploy.graphs import Cast, write_graph
from weft.deploy.runtimes import run_file
from weft.errors import WeftError
from weft.hub import create_model
from weft.memory import keep_memory, release_memory
from weft.models.base import Backbone

CALIBRATION = 32  # random images that set the ranges of int8: enough for its speed, not for its accuracy
ALLOCATORS = ("default", "keep")  # the C library's own settings, or `weft.keep_memory`
REFERENCE = "reference"  # the way that answers what the others should; not measured


@dataclass(frozen=True)
class Task:
    """What to build.

    Attributes:
        what: name of a model, or a directory of weights or of an export.
        peer: which of its peers to run instead; None for the model itself.
        peers: whether the first of them lends the model its weights.
        way, precision, device, threads: how to run it; the way of an export is its own.
        allocator: of ALLOCATORS; applies to the whole process.
    """

    what: str
    peer: int | None
    peers: bool
    way: str
    precision: str
    device: str
    threads: int
    allocator: str = "default"


@dataclass(frozen=True)
class Subject:
    """What was built.

    Attributes:
        model, way, precision: what it is called.
        size: (channels, height, width) of its images.
        cost: parameters and multiply-adds, None for an export.
        call: from images to logits.
    """

    model: str
    way: str
    precision: str
    size: tuple[int, ...]
    cost: Cost | None
    call: Callable[[Tensor], Any]


def build(task: Task, folder: Path) -> Subject:
    """The network in its runtime.

    Raises:
        WeftError: it cannot be had.
    """
    model, name, size = _network(task)
    if isinstance(model, ExportedModel):
        return Subject(name, model.format, model.precision, size, None, model)
    counted = cost(model, (size[1], size[2]), size[0])
    call = _call(model.to(task.device), task.way, task.precision, size, folder)
    return Subject(name, task.way, task.precision, size, counted, call)


def is_directory(what: str) -> bool:
    """Whether a run or an export is meant, not the name of a model."""
    return Path(what).exists() or "/" in what


def _network(task: Task) -> tuple[Any, str, tuple[int, ...]]:
    """The same weights in every process."""
    if is_directory(task.what):
        model: Any = open_model(model_dir(task.what))[0]
        return model, task.what, tuple(model.pretrained_cfg["input_size"])
    torch.manual_seed(0)
    model = _enlivened(create_model(task.what)).eval()
    size = tuple(model.pretrained_cfg["input_size"])
    if not task.peers:
        return model, task.what, size
    peers = peers_of(task.what)
    torch.manual_seed(0)
    if task.peer is not None:
        return _enlivened(build_peer(peers[task.peer])).eval(), peers[task.peer].label, size
    if peers[0].same_weights:
        load_checkpoint(model, _enlivened(build_peer(peers[0])).state_dict())
    return model, task.what, size


def _enlivened(model: nn.Module) -> nn.Module:
    """With statistics as of a trained network: fresh ones have zeros that make whole branches vanish."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for values, low, high in (
                (module.weight, 0.5, 1.5),
                (module.running_var, 0.5, 1.5),
                (module.bias, -0.1, 0.1),
            ):
                if values is not None:
                    nn.init.uniform_(values, low, high)
    return model


def _call(model: nn.Module, way: str, precision: str, size: tuple[int, ...], folder: Path) -> Callable[[Tensor], Any]:
    if way == REFERENCE:
        return model
    if way != "eager" and isinstance(model, Backbone):
        model = fold(model)
    if way in ("onnx", "openvino"):
        file = folder / ("model.onnx" if way == "onnx" else "model.xml")
        write_graph(model, file, way, precision, size, _noise(size) if precision == "int8" else ())
        answer = run_file(file, way, precision)
        return lambda images: torch.from_numpy(answer(images.numpy()))
    if precision == "bf16":
        model = Cast(copy.deepcopy(model), torch.bfloat16)
    if way == "compiled":
        return torch.compile(model)
    return torch.compile(model, mode="reduce-overhead") if way == "graphed" else model


def _noise(size: tuple[int, ...]) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for _ in range(CALIBRATION):
        yield generator.standard_normal((1, *size), dtype=np.float32)


def _turn(
    subject: Subject, device: str, batch_size: int, calls: int, seconds: float, answer: str | None
) -> list[float]:
    """Seconds of every call; the last answer goes into a file if one is named."""
    images = torch.randn(batch_size, *subject.size, generator=torch.Generator().manual_seed(0)).to(device)
    logits: Any = None
    times: list[float] = []
    with torch.inference_mode():
        for fewest in (1, calls):  # the first ones warm up: while others had their turn, memory and caches went cold
            times.clear()
            while len(times) < fewest or sum(times) < seconds:
                begun = time.perf_counter()
                logits = subject.call(images)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
    if answer is not None:
        np.save(answer, logits.float().cpu().numpy())
    del images, logits
    release_memory()  # others are waiting, and there may be many
    return times


def main() -> None:
    """Builds and serves until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it says when it ends
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer

    def say(**answer: Any) -> None:
        channel.write(json.dumps(answer) + "\n")

    task = Task(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subject = build(task, Path(folder))
        except WeftError as error:
            say(error=str(error))
            return
        release_memory()
        if task.allocator == "keep" and not keep_memory():
            say(error="allocator keep needs glibc and an environment without MALLOC_* settings. Leave keep out.")
            return
        say(
            model=subject.model,
            way=subject.way,
            precision=subject.precision,
            params=None if subject.cost is None else subject.cost.params,
            macs=None if subject.cost is None else subject.cost.macs,
        )
        for line in sys.stdin:
            say(seconds=_turn(subject, task.device, **json.loads(line)))


if __name__ == "__main__":
    main()
