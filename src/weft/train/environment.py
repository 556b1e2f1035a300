"""Record of the software and hardware that a run depends on."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Annotated, Any, cast

import torch
from pydantic import Field, with_config
from typing_extensions import TypedDict

from weft.data import Splits
from weft.machine.processor import MAX_THREADS
from weft.machine.runtime import Runtime
from weft.models.families import plugins
from weft.version import __version__

RECORDED = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg")
VARIABLES = (  # of the environment; they select algorithms whose last bits differ
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)


@with_config(extra="allow")
class MachineRecord(TypedDict):
    """Fields of `machine` that weft reads again from a saved state; the others are versions and names."""

    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)]
    processes: Annotated[int, Field(ge=1, le=1 << 20)]


def machine(runtime: Runtime) -> MachineRecord:
    """Return everything that the bits of a run depend on, except recipe and data."""
    found = {
        "weft": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in RECORDED},
        "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": runtime.world,
        **{name: os.environ.get(name, "unset") for name in VARIABLES},
    }
    return cast(MachineRecord, found)


def environment(runtime: Runtime, splits: Splits, series: str | None = None) -> dict[str, Any]:
    """Return the record of a run for its recipe: start time, machine, number of images and of held-out groups, hash of
    the file with the series, classes, plugins."""
    groups = None if splits.val_groups is None or splits.is_given else len(set(splits.val_groups))
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(runtime),
        "train_images": len(splits.train),
        "val_images": len(splits.val),
        **({} if groups is None else {"val_groups": groups}),
        **({} if series is None else {"series_sha256": series}),
        "excluded_images": len(splits.bad),
        "classes": list(splits.classes),
        **({"plugins": plugins()} if plugins() else {}),
    }
