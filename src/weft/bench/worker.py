"""Worker process of a speed measurement: builds one model in one runtime, and times its calls."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from weft.checkpoints.hub import create_model
from weft.checkpoints.model_dir import load_model_dir
from weft.checkpoints.resolve import is_path, model_dir
from weft.deploy import fold
from weft.deploy.choosing import exports_in
from weft.deploy.graphs import Cast, write_graph
from weft.deploy.model import Model
from weft.deploy.opening import open_export
from weft.deploy.runtimes import run_file
from weft.errors import UsageError, WeftError
from weft.machine.memory import is_out_of_memory, keep_memory, release_memory
from weft.models.base import Backbone
from weft.models.contract import resized
from weft.progress import quietly

CALIBRATION = 32  # random images to calibrate int8: enough to measure its speed, not its accuracy


class OutOfMemoryError(UsageError):
    """The memory of the device does not suffice for a batch."""


class Subject(NamedTuple):
    """The model that a worker runs.

    Attributes:
        call: function from images (b c h w) to logits; None outside the worker.
        way, precision, device: how it runs; for an export, as it was exported.
        size: (channels, height, width) of the images.
        more: further values by name, or None.
    """

    call: Any
    way: str
    precision: str
    device: str
    size: tuple[int, ...]
    more: dict[str, Any] | None = None


def build(model: str, way: str, precision: str, device: str, img_size: int | tuple[int, int] | None = None) -> Subject:
    """Build a model in its runtime.

    Args:
        model: name of a model (with random weights, the same in every process), or a run directory, model directory or
            export.
        way, precision: how to run it; an export has only its own way.
        device: cpu or cuda.
        img_size: input size in pixels, or (height, width); None for that of the model.

    Raises:
        WeftError: the model is unknown or cannot be loaded, or a package is missing.
    """
    keep_memory()
    network: Any
    with quietly():  # the parent prints the notes
        export = open_export(folder) if is_path(model) and exports_in(folder := model_dir(model)) else None
    if export is not None:
        size = export.info.pretrained_cfg["input_size"]
        return Subject(_on_tensors(export), export.info.runtime, export.info.precision, device, size)
    if is_path(model):
        network = load_model_dir(model_dir(model))[0]
    else:
        torch.manual_seed(0)
        network = with_random_statistics(create_model(model)).eval()
    if img_size is not None:
        network = resized(network, img_size)
    size = tuple(network.pretrained_cfg["input_size"])
    return Subject(runnable(network.to(device), way, precision, size), way, precision, device, size)


def with_random_statistics(model: nn.Module) -> nn.Module:
    """Set BatchNorm to random values as after training; the initial ones contain zeros that disable whole branches."""
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


def runnable(model: nn.Module, way: str, precision: str, size: tuple[int, ...]) -> Callable[[Tensor], Any]:
    """Return a function from images to logits that runs a network in one of `weft.bench.speed.WAYS`."""
    if way != "eager" and isinstance(model, Backbone):
        model = fold(model)
    if way in ("onnx", "openvino"):
        file = Path(tempfile.mkdtemp()) / ("model.onnx" if way == "onnx" else "model.xml")
        write_graph(model, file, way, precision, size, noise(size) if precision == "int8" else ())
        return _on_tensors(run_file(file, way, precision))
    if precision == "bf16":
        model = Cast(copy.deepcopy(model), torch.bfloat16)
    # compiled for each batch size: with automatic dynamic shapes, the second size would get code for any size
    return torch.compile(model, dynamic=False) if way == "compiled" else model


def _on_tensors(export: Model) -> Callable[[Tensor], Tensor]:
    return lambda images: torch.from_numpy(export.run(images.numpy()).logits)


def noise(size: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield CALIBRATION random images of a size (channels, height, width), one at a time."""
    generator = np.random.default_rng(0)
    for _ in range(CALIBRATION):
        yield generator.standard_normal((1, *size), dtype=np.float32)


def timed(subject: Subject, batch_size: int, *, calls: int, seconds: float, warm_up: float) -> list[float]:
    """Time calls, and return the seconds of each.

    Args:
        subject: the model.
        batch_size: images per call.
        calls, seconds: minimum number of calls, and minimum of their total time.
        warm_up: seconds of calls before, at least one: other workers have used the caches in between.
    """
    images = _images(subject, batch_size)
    times: list[float] = []
    with torch.inference_mode():
        for min_calls, min_seconds in ((1, warm_up), (calls, seconds)):
            times.clear()
            while len(times) < min_calls or sum(times) < min_seconds:
                begun = time.perf_counter()
                subject.call(images)
                if subject.device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
    return times


def logits(subject: Subject, batch_size: int) -> np.ndarray:
    """Return the logits of one call."""
    with torch.inference_mode():
        return subject.call(_images(subject, batch_size)).float().cpu().numpy()


def memory(subject: Subject, batch_size: int) -> float:
    """Return the memory in use after one call, in MB (10^6 bytes): of this process, or the most on the GPU."""
    images = _images(subject, batch_size)
    with torch.inference_mode():
        subject.call(images)
    on_gpu = subject.device == "cuda"
    return (torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss) / 1e6


def _images(subject: Subject, batch_size: int) -> Tensor:
    return torch.randn(batch_size, *subject.size, generator=torch.Generator().manual_seed(0)).to(subject.device)


def main() -> None:
    """Build the model, then run functions on it until the standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the worker
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that libraries print must not get into the channel
    name, threads, build, arguments = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    built = _tried(name, build, **arguments)
    reply = built._replace(call=None) if isinstance(built, Subject) else built
    while True:
        release_memory()  # for the other workers, of which there may be many
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        pickle.dump(reply, channel)
        channel.flush()
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reply = _tried(name, function, built, **arguments)


def _tried(name: str, function: Callable[..., Any], *subject: Subject, **arguments: Any) -> Any:
    """Return what a function returns, or the error that the measuring process raises instead."""
    try:
        return function(*subject, **arguments)
    except Exception as error:  # every runtime and compiler has its own type
        return failure(name, error, arguments.get("batch_size"))


def failure(name: str, error: Exception, batch_size: int | None) -> WeftError:
    """Return the error that the measuring process raises for an error in a worker.

    Args:
        name: of the worker.
        error: what was raised.
        batch_size: of the call; None if the model could not be built.
    """
    if isinstance(error, WeftError):
        return error
    traceback.print_exception(error)
    if not is_out_of_memory(error):
        return UsageError(f"{name} cannot be measured: {cause(error).rstrip('.')}. Leave it out.")
    if batch_size is None:
        return OutOfMemoryError(f"{name} needs more memory to be built; measure fewer ways at the same time.")
    return OutOfMemoryError(f"{name} needs more memory for a batch of {batch_size}; use a smaller one.")


def cause(error: BaseException) -> str:
    """Return the type of an error and its first line; the second line also, if the first one ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:300]}"
