"""Run a network in a worker process of `weft.bench` in more ways than weft offers, next to networks of other libraries.

Further ways: CUDA graphs, code compiled ahead of time (AOTInductor), TF32 and mixed precision on a GPU, another memory
allocator, another image size.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.peers import build_peer, merge_batch_norms, peers_of
from torch import Tensor, nn

from weft.bench.cost import cost
from weft.bench.worker import Subject, runnable, timed, with_random_statistics
from weft.bench.worker_process import CALLS, SECONDS, WorkerProcess
from weft.checkpoints import load_checkpoint
from weft.checkpoints.hub import create_model
from weft.deploy import fold
from weft.deploy.graphs import Cast
from weft.errors import UsageError
from weft.machine.memory import keep_memory
from weft.models.base import Backbone
from weft.models.contract import resized

WAYS = {  # way of running a network -> its precisions; tf32: on a GPU, factors have 10 bits of mantissa
    "eager": ("fp32", "tf32", "bf16"),
    "folded": ("fp32", "tf32", "bf16", "amp"),
    "compiled": ("fp32", "tf32", "bf16"),
    "graphed": ("fp32", "tf32", "bf16"),  # compiled, and replayed as a CUDA graph
    "aotinductor": ("fp32", "bf16"),  # compiled ahead of time, for any batch size
    "onnx": ("fp32", "int8"),
    "openvino": ("fp32", "bf16", "int8"),
}
COMPILED = ("compiled", "graphed", "aotinductor")
IN_TORCH = ("eager", "folded", "compiled")  # ways in which torch allocates the activations, so the allocator matters


def worker(
    model: str, way: str, precision: str, *, folder: Path, threads: int, device: str = "cpu", **more: Any
) -> WorkerProcess:
    """Return a worker process, which is not started.

    Args:
        model, way, precision, folder, threads, device: as for `WorkerProcess`.
        **more: further arguments of `build`.
    """
    peer = more.get("peer")
    options: dict[str, Any] = dict(folder=folder, threads=threads, device=device, is_compiled=way in COMPILED)
    label = "" if peer is None else peers_of(model)[peer].label
    return WorkerProcess(model, way, precision, build=build, label=label, **options, **more)


def build(
    model: str,
    way: str,
    precision: str,
    device: str,
    *,
    peer: int | None = None,
    peers: bool = False,
    allocator: str = "default",
    img_size: int | None = None,
) -> Subject:
    """Build a network, or one of its peers, in its runtime; the weights are random, and the same in every process.

    Args:
        model: name of a model.
        way, precision, device: how to run it, as in WAYS; in all ways but eager, BatchNorm is merged on both sides.
        peer: index of the peer to run instead of the model; None for the model itself.
        peers: peers are measured; the model then has the weights of the first peer if that is possible.
        allocator: of the whole process: default, or keep (`weft.keep_memory`).
        img_size: image side in pixels; None for that of the model.

    Returns:
        The network, with its parameters and multiply-adds as `params` and `macs`.
    """
    network, size = _network(model, peer, peers, img_size)
    counted = cost(network, (size[1], size[2]), size[0])
    network = network.to(device)
    if device == "cuda":  # by default, PyTorch allows TF32 in convolutions alone
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if way != "eager" and not isinstance(network, Backbone):
        network = merge_batch_norms(network, torch.randn(1, *size, device=device))
    call = _call(network, way, precision, size)
    if allocator == "keep" and not keep_memory():
        raise UsageError("allocator keep needs glibc and an environment without MALLOC_* settings. Leave keep out.")
    return Subject(call, way, precision, device, size, counted._asdict())


def _network(model: str, peer: int | None, peers: bool, img_size: int | None) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    network: Any = with_random_statistics(create_model(model)).eval()
    if img_size is not None:
        network = resized(network, img_size)
    size = tuple(network.pretrained_cfg["input_size"])
    if not peers:
        return network, size
    known = peers_of(model)
    torch.manual_seed(0)
    if peer is not None:
        return with_random_statistics(build_peer(known[peer])).eval(), size
    if known[0].same_weights:
        load_checkpoint(network, with_random_statistics(build_peer(known[0])).state_dict())
    return network, size


def _call(network: nn.Module, way: str, precision: str, size: tuple[int, ...]) -> Callable[[Tensor], Any]:
    device = next(network.parameters()).device
    if way in COMPILED:
        # a network may cache tensors at its first call, as timm's LeViT does: a CUDA graph would overwrite its own
        with torch.inference_mode():
            network(torch.zeros(1, *size, device=device))
    if way not in ("graphed", "aotinductor") and precision != "amp":
        return runnable(network, way, "fp32" if precision == "tf32" else precision, size)
    if isinstance(network, Backbone):
        network = fold(network)
    if precision == "amp":
        return torch.autocast("cuda", torch.float16)(network)
    if precision == "bf16":
        network = Cast(copy.deepcopy(network), torch.bfloat16)
    if way == "graphed":
        return torch.compile(network, dynamic=False, mode="reduce-overhead")
    return _ahead_of_time(network, torch.zeros(2, *size, device=device))


def _ahead_of_time(network: nn.Module, example: Tensor) -> Callable[[Tensor], Any]:
    """Compile a network ahead of time for batches of any size."""
    file = str(Path(tempfile.mkdtemp()) / "model.pt2")
    with torch.no_grad():
        program = torch.export.export(
            network, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=2**16)},)
        )
        torch._inductor.aoti_compile_and_package(program, package_path=file)
    return torch._inductor.aoti_load_package(file)  # trusted: this process has compiled it


def timed_with_peak(subject: Subject, batch_size: int) -> tuple[list[float], float | None]:
    """Return the seconds of calls after a warm-up, and the largest memory of PyTorch on a GPU since then in MiB."""
    timed(subject, batch_size, calls=1, seconds=0, warm_up=SECONDS)
    is_on_gpu = subject.device == "cuda"
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = timed(subject, batch_size, calls=CALLS, seconds=SECONDS, warm_up=0)
    return times, torch.cuda.max_memory_allocated() / 2**20 if is_on_gpu else None


def settings_of(
    model: str, ways: Sequence[str], precisions: Sequence[str], allocators: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the ways, precisions, peers and allocators in which a model and its peers are measured on a CPU.

    All sides have the same settings; a peer is not folded, since weft folds its own networks alone.
    """
    return [
        dict(way=way, precision=precision, peer=peer, peers=True, allocator=allocator)
        for peer in (None, *range(len(peers_of(model))))
        for precision in precisions
        for way in ways
        if precision in WAYS[way] and (peer is None or way != "folded")
        for allocator in (allocators if way in IN_TORCH else ("default",))
    ]
