"""Worker process of a speed measurement: runs one model in one runtime.

`WorkerProcess` starts it and sends lines of JSON: first the task, then for each turn the batch
size and the number of calls to time. Thread pools of torch, ONNX Runtime and OpenVINO in the same process slow each
other down by a fifth; separate processes, of which only one computes at a time, do not.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.bench.cost import Cost, cost
from weft.bench.peers import build_peer, merge_batch_norms, peers_of
from weft.checkpoints import load_checkpoint
from weft.checkpoints.hub import create_model
from weft.checkpoints.resolve import model_dir
from weft.deploy import ExportedModel, fold, open_model
from weft.deploy.graphs import Cast, check_tools, write_graph
from weft.deploy.onnx_runtime import import_onnx_runtime
from weft.deploy.runtimes import run_file
from weft.errors import UsageError, WeftError, need
from weft.memory import is_out_of_memory, keep_memory, release_memory
from weft.models.base import Backbone
from weft.models.contract import resized

CALIBRATION = 32  # random images to calibrate int8: enough to measure its speed, not its accuracy
REFERENCE = "reference"  # way whose logits the others are compared with; its speed is not measured


@dataclass(frozen=True)
class Task:
    """Description of the model that a worker runs, and of the way to run it.

    Attributes:
        model: name of a model, or a run directory, model directory or export.
        peer: index of the peer to run instead of the model; None for the model itself.
        peers: peers are measured; the model then has the weights of the first peer if that is possible.
        way, precision, device, threads: how to run the model; an export has only its own way.
        allocator: of ALLOCATORS; applies to the whole process.
        img_size: image side in pixels; None for that of the model.
    """

    model: str
    peer: int | None
    peers: bool
    way: str
    precision: str
    device: str
    threads: int
    allocator: str = "default"
    img_size: int | None = None

    @property
    def label(self) -> str:
        """Model, peer, way and precision, for messages."""
        peer = "" if self.peer is None else f" of peer {self.peer + 1}"
        return f"{self.model}{peer} {self.way} {self.precision}"


@dataclass(frozen=True)
class Subject:
    """The model that a worker runs.

    Attributes:
        model, way, precision: names for the table.
        size: (channels, height, width) of the images.
        cost: parameters and multiply-adds; None for an export.
        call: function from images to logits.
    """

    model: str
    way: str
    precision: str
    size: tuple[int, ...]
    cost: Cost | None
    call: Callable[[Tensor], Any]


def build(task: Task, folder: Path) -> Subject:
    """Build the model of a task in its runtime.

    Args:
        task: the task.
        folder: directory for temporary files.

    Raises:
        WeftError: the model is unknown or cannot be loaded, or a package is missing.
    """
    model, name, size = network_of(task)
    if isinstance(model, ExportedModel):
        return Subject(name, model.format, model.precision, size, None, model)
    counted = cost(model, (size[1], size[2]), size[0])
    call = _call(model.to(task.device), task, size, folder)
    return Subject(name, task.way, task.precision, size, counted, call)


def is_directory(model: str) -> bool:
    """Return whether `model` is the path of a run, model directory or export, and not the name of a model."""
    return Path(model).exists() or "/" in model


def network_of(task: Task) -> tuple[Any, str, tuple[int, ...]]:
    """Return the network or export of a task, its name and its input size; the weights are the same in every process.

    Raises:
        WeftError: the model is unknown or cannot be loaded.
    """
    if is_directory(task.model):
        model: Any = open_model(model_dir(task.model))[0]
        return model, task.model, tuple(model.pretrained_cfg["input_size"])
    torch.manual_seed(0)
    model = _with_random_statistics(create_model(task.model)).eval()
    if task.img_size is not None:
        model = resized(model, task.img_size)
    size = tuple(model.pretrained_cfg["input_size"])
    if not task.peers:
        return model, task.model, size
    peers = peers_of(task.model)
    torch.manual_seed(0)
    if task.peer is not None:
        return _with_random_statistics(build_peer(peers[task.peer])).eval(), peers[task.peer].label, size
    if peers[0].same_weights:
        load_checkpoint(model, _with_random_statistics(build_peer(peers[0])).state_dict())
    return model, task.model, size


def _with_random_statistics(model: nn.Module) -> nn.Module:
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


def _call(model: nn.Module, task: Task, size: tuple[int, ...], folder: Path) -> Callable[[Tensor], Any]:
    way, precision = task.way, task.precision
    if task.device == "cuda":
        _set_tf32(precision == "tf32")
    if way == REFERENCE:
        return model
    if way != "eager":  # BatchNorm is merged on both sides
        is_own = isinstance(model, Backbone)
        model = fold(model) if is_own else merge_batch_norms(model, torch.randn(1, *size, device=task.device))
    if way == "onnx" and task.device == "cuda":
        return _onnx_on_gpu(model.cpu(), precision, size, folder / "model.onnx")
    if way in ("onnx", "openvino"):
        file = folder / ("model.onnx" if way == "onnx" else "model.xml")
        write_graph(model, file, way, precision, size, noise(size) if precision == "int8" else ())
        graph = run_file(file, way, precision)
        return lambda images: torch.from_numpy(graph(images.numpy()))
    if precision == "amp":
        return torch.autocast("cuda", torch.float16)(model)
    if precision == "bf16":
        model = Cast(copy.deepcopy(model), torch.bfloat16)
    if way == "aotinductor":
        return _ahead_of_time(model, size, folder / "model.pt2")
    if way in ("compiled", "graphed"):
        # a network may cache tensors at its first call, as timm's LeViT does: a CUDA graph would overwrite its own
        with torch.inference_mode():
            model(torch.zeros(1, *size, device=task.device))
    # compiled for each batch size: with automatic dynamic shapes, the second size would get code for any size
    if way == "compiled":
        return torch.compile(model, dynamic=False)
    return torch.compile(model, dynamic=False, mode="reduce-overhead") if way == "graphed" else model


def _set_tf32(matmul: bool, conv: bool | None = None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = matmul if conv is None else conv


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow a GPU to multiply float32 in TF32, or not; PyTorch's defaults allow it in convolutions alone."""
    before = bool(torch.backends.cuda.matmul.allow_tf32), bool(torch.backends.cudnn.allow_tf32)
    _set_tf32(allowed)
    try:
        yield
    finally:
        _set_tf32(*before)


def _ahead_of_time(model: nn.Module, size: tuple[int, ...], file: Path) -> Callable[[Tensor], Any]:
    """Compile a network ahead of time for batches of any size, as `weft export --format aotinductor` does."""
    check_tools("aotinductor", "fp32")
    example = torch.zeros(2, *size, device=next(model.parameters()).device)
    shapes = ({0: torch.export.Dim("batch", min=1, max=2**16)},)
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return torch._inductor.aoti_load_package(str(file))  # trusted: this process has compiled it


def _onnx_on_gpu(model: nn.Module, precision: str, size: tuple[int, ...], file: Path) -> Callable[[Tensor], Any]:
    """Run a network in ONNX Runtime on the GPU, with images and logits in the memory of the GPU.

    Raises:
        UsageError: ONNX Runtime is not installed, or has no CUDA provider.
    """
    need("deploy", "onnxruntime")
    runtime = import_onnx_runtime()
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        raise UsageError("onnx on cuda needs the package onnxruntime-gpu; the installed one has no CUDA provider.")
    write_graph(model, file, "onnx", "fp32", size)
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    provider = ("CUDAExecutionProvider", {"use_tf32": int(precision == "tf32")})
    session = runtime.InferenceSession(str(file), options, providers=[provider])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise UsageError("onnx on cuda needs CUDA libraries that ONNX Runtime can load; see its messages above.")

    def run(images: Tensor) -> Tensor:
        logits = torch.empty(len(images), session.get_outputs()[0].shape[1], device=images.device)
        binding = session.io_binding()
        binding.bind_input("images", "cuda", 0, np.float32, tuple(images.shape), images.data_ptr())
        binding.bind_output("logits", "cuda", 0, np.float32, tuple(logits.shape), logits.data_ptr())
        session.run_with_iobinding(binding)
        return logits

    return run


def noise(size: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield CALIBRATION random images of a size (channels, height, width), one at a time."""
    generator = np.random.default_rng(0)
    for _ in range(CALIBRATION):
        yield generator.standard_normal((1, *size), dtype=np.float32)


def _turn(
    subject: Subject,
    device: str,
    batch_size: int,
    calls: int,
    seconds: float,
    warm_up: float,
    outputs: str | None = None,
    is_new: bool = False,
) -> list[float]:
    """Time calls, and return the seconds of each.

    Args:
        subject: the model.
        device: cpu or cuda.
        batch_size: images per call.
        calls, seconds: minimum number of calls, and minimum of their total time.
        warm_up: seconds of calls before, at least one: other workers have used the caches in between.
        outputs: file for the logits of the last call, or None.
        is_new: this batch size is new; the largest memory of a GPU is then measured from the end of the warm-up.
    """
    images = torch.randn(batch_size, *subject.size, generator=torch.Generator().manual_seed(0)).to(device)
    logits: Any = None
    times: list[float] = []
    with torch.inference_mode():
        for is_warm_up in (True, False):
            min_calls, min_seconds = (1, warm_up) if is_warm_up else (calls, seconds)
            times.clear()
            while len(times) < min_calls or sum(times) < min_seconds:
                begun = time.perf_counter()
                logits = subject.call(images)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
            if is_warm_up and is_new and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
    if outputs is not None:
        np.save(outputs, logits.float().cpu().numpy())
    del images, logits
    _release(device)
    return times


def _reply(subject: Subject, task: Task, turn: dict[str, Any], is_new: bool = False) -> dict[str, Any]:
    """Run a turn, whose dictionary has arguments of `_turn`, and return the reply to it."""
    try:
        return {"seconds": _turn(subject, task.device, **turn, is_new=is_new), "peak_mib": _peak_mib(task)}
    except Exception as error:  # every runtime has its own type
        reply = _failure(task, error, turn["batch_size"])
    with contextlib.suppress(Exception):  # after some errors, CUDA only repeats them
        _release(task.device)
    return reply


def _failure(task: Task, error: Exception, batch_size: int | None = None) -> dict[str, Any]:
    """Return the reply to a turn that failed, or without a batch size, to a task whose model cannot be built."""
    if isinstance(error, WeftError):
        return {"error": str(error)}
    traceback.print_exception(error)
    if not is_out_of_memory(error):
        return {"error": f"{task.label} cannot be measured: {cause(error).rstrip('.')}. Leave it out."}
    if batch_size is None:
        text = f"{task.label} needs more memory to be built; measure fewer ways at the same time."
    else:
        text = f"{task.model} needs more memory for a batch of {batch_size}; use a smaller one."
    return {"error": text, "out_of_memory": True}


def cause(error: BaseException) -> str:
    """Return the type of an error and its first line; the second line also, if the first one ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text[:300]}"


def _peak_mib(task: Task) -> float | None:
    """Return the largest memory of PyTorch on a GPU since the last reset, in MiB; None on a CPU or for ONNX Runtime."""
    return torch.cuda.max_memory_allocated() / 2**20 if task.device == "cuda" and task.way != "onnx" else None


def _release(device: str) -> None:
    """Release free memory for the other workers, of which there may be many."""
    release_memory()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Build the model, then run turns until the standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the worker
    channel = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # text that libraries print must not get into the channel

    def reply(**fields: Any) -> None:
        channel.write(json.dumps(fields) + "\n")

    task = Task(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subject = build(task, Path(folder))
        except Exception as error:  # of a compiler, for example
            reply(**_failure(task, error))
            return
        release_memory()
        if task.allocator == "keep" and not keep_memory():
            reply(error="allocator keep needs glibc and an environment without MALLOC_* settings. Leave keep out.")
            return
        reply(
            model=subject.model,
            way=subject.way,
            precision=subject.precision,
            params=None if subject.cost is None else subject.cost.params,
            macs=None if subject.cost is None else subject.cost.macs,
        )
        batch_size = None
        for line in sys.stdin:
            turn = json.loads(line)
            reply(**_reply(subject, task, turn, is_new=turn["batch_size"] != batch_size))
            batch_size = turn["batch_size"]
