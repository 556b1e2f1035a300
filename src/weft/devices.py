"""Devices that a machine certainly does not have, without torch, whose import takes seconds."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from weft.errors import UsageError

NO_CUDA = "device cuda needs a GPU that PyTorch can use; there is none. Pass --device cpu."
NO_MPS = (
    "device mps needs the GPU of a Mac with Apple silicon, and a PyTorch that can use it; there is none."
    " Pass --device cpu."
)
# of the drivers of NVIDIA's cards and of Jetson, of WSL, and of AMD's cards, which are also torch's `cuda`
GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")
DEVICE_FILES = Path("/dev")


def check_device(device: str | None) -> None:
    """Refuse a device that this machine certainly does not have; the others are left to torch.

    Args:
        device: as in `train`; None for the default.

    Raises:
        UsageError: `cuda` without a GPU driver, or `mps` on anything but a Mac with Apple silicon.
    """
    if device == "cuda" and _has_no_driver():
        raise UsageError(NO_CUDA)
    if device == "mps" and (sys.platform, platform.machine()) != ("darwin", "arm64"):
        raise UsageError(NO_MPS)


def gpus() -> tuple[str, ...]:
    """Return what the GPUs of this machine can be told by without torch: device files and CUDA_VISIBLE_DEVICES."""
    files = sorted(file.name for pattern in GPU_FILES for file in DEVICE_FILES.glob(pattern))
    return (*files, os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


def _has_no_driver() -> bool:
    if sys.platform != "linux":
        return sys.platform == "darwin"
    has_files = any(file for pattern in GPU_FILES for file in DEVICE_FILES.glob(pattern))
    return not has_files and shutil.which("nvidia-smi") is None
