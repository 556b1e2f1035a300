"""The network of a recipe: synchronized BatchNorm keeps what the network computes, and needs GPUs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import FrozenBatchNormAct2d, create_norm, create_norm_act
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.helpers import baselines
from weft.errors import UsageError
from weft.train import train
from weft.train.network import synchronized

CHANNELS = 32
ON_CUDA = ("inplaceabn", "iabn")  # a package of its own
NORMS: dict[str, Callable[[int], nn.Module]] = {
    **{f"norm {name}": kind for name, kind in create_norm._NORM_MAP.items()},
    **{f"norm and act {name}": kind for name, kind in create_norm_act._NORM_ACT_MAP.items() if name not in ON_CUDA},
    "norm and act frozen": FrozenBatchNormAct2d,
}
IMAGES = {"1d": (4, CHANNELS), "2d": (4, CHANNELS, 5, 7), "last": (4, 5, 7, CHANNELS)}


def with_random_statistics(network: nn.Module) -> nn.Module:
    """Return a network in evaluation mode whose norm layers are far from the identity."""
    torch.manual_seed(0)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5) if name.endswith(("weight", "var")) else tensor.uniform_(-0.5, 0.5)
    return network.eval()


def assert_same_outputs(network: nn.Module, images: torch.Tensor) -> None:
    before = with_random_statistics(network)
    after = synchronized(copy.deepcopy(before)).eval()
    left = [name for name, module in after.named_modules() if isinstance(module, _BatchNorm)]
    assert all(isinstance(after.get_submodule(name), nn.SyncBatchNorm) for name in left)
    assert after.state_dict().keys() == before.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(after(images), before(images))


@pytest.mark.parametrize("kind", NORMS)
def test_synchronized_norm_layers_compute_the_same_in_evaluation(kind: str) -> None:
    layer = NORMS[kind](CHANNELS)
    name = type(layer).__name__
    shape = "1d" if name.endswith("1d") else "2d"
    if name.startswith(("LayerNorm", "RmsNorm", "SimpleNorm")) and "2d" not in name:
        shape = "last"
    assert_same_outputs(nn.Sequential(layer), torch.randn(IMAGES[shape]))


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "levit_128s", "resnet18"])
def test_synchronized_networks_compute_the_same_in_evaluation(name: str) -> None:
    """tf_efficientnet_lite0 is the default network without a connection; its BatchNorm has the activation inside."""
    size = 224 if name.startswith("levit") else 32
    assert_same_outputs(timm.create_model(name, num_classes=4), torch.randn(2, 3, size, size))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(row["name"] for row in baselines()))
def test_every_baseline_computes_the_same_in_evaluation(name: str) -> None:
    network = timm.create_model(name, num_classes=4)
    assert_same_outputs(network, torch.randn(1, *network.pretrained_cfg["input_size"]))


def test_synchronized_batchnorm_is_refused_on_a_cpu_before_the_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings = {"sync_bn": True}
    with pytest.raises(UsageError, match=r"sync_bn needs GPUs; got sync_bn true on device cpu. Pass --set sync_bn=f"):
        train(tmp_path / "empty", "levit_nano_32", settings=settings, device="cpu", out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
