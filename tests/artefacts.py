"""What many tests need and is slow to make, made once for all test processes of a run.

Nearly all of the time of an export is spent in `torch.onnx.export`. Its result depends on the network and its weights
alone, so it is stored under their hash: the first test that exports a network makes the file, the others copy it.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from weft.data import library
from weft.deploy import graphs


def share_graphs(folder: Path) -> Callable[[], None]:
    """Let `weft.deploy.graphs` make every ONNX file once, in a folder of all test processes; return the undo."""
    original = graphs._to_onnx

    def shared(network: nn.Module, file: Path, size: tuple[int, ...]) -> None:
        stored = folder / f"{_key(network, size)}.onnx"
        with (folder / f"{stored.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stored.exists():
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    made = Path(temporary) / "model.onnx"
                    original(network, made, size)
                    made.rename(stored)
        shutil.copyfile(stored, file)

    def undo() -> None:
        graphs._to_onnx = original

    graphs._to_onnx = shared
    return undo


def share_digits() -> Callable[[], None]:
    """Let `weft.data.library` encode every digit once in each test process; return the undo."""
    original, known = library._png, dict[bytes, bytes]()

    def shared(image: np.ndarray) -> bytes:
        key = image.tobytes()
        if key not in known:
            known[key] = original(image)
        return known[key]

    def undo() -> None:
        library._png = original

    library._png = shared
    return undo


def _key(network: nn.Module, size: tuple[int, ...]) -> str:
    """Return a hash of all that decides how a network is exported."""
    digest = hashlib.sha256(repr((str(network), type(network).__qualname__, size, torch.__version__)).encode())
    for name, module in network.named_modules():  # settings that no representation shows, such as strides of attention
        plain = {
            key: value for key, value in sorted(vars(module).items()) if isinstance(value, (int, float, str, tuple))
        }
        digest.update(repr((name, type(module).__qualname__, plain)).encode())
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
