"""A folded network gives the same answers, in every variant and with every switch, and holds no BatchNorm."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import weft
from tests.helpers import NANO, images, lively
from weft.bench.cost import cost
from weft.checkpoints import save_model_dir
from weft.deploy.folding import fastest
from weft.errors import UsageError

SWITCHES: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in NANO],
    ("ceit_nano_32", dict(img_size=(40, 36))),
    ("ceit_nano_32", dict(stem_convs=(), leff_kernel=0, lca=False)),
    ("ceit_nano_32", dict(stem_norm=False)),
    ("ceit_nano_32", dict(stem_convs=((3, 1), (3, 2)), stem_pool=False)),
    ("ceit_nano_32", dict(leff_norm=False)),
    ("ceit_nano_32", dict(leff_kernel=5, leff_final_act=True, leff_pass_cls=False)),
    ("ceit_nano_32", dict(qkv_bias=False, lca_embed=False)),
    ("ceit_nano_32", dict(global_pool="avg", drop_rate=0.2, drop_path_rate=0.2)),
    ("ceit_nano_32", dict(num_classes=0)),
    ("cvt_nano_32", dict(img_size=(40, 36))),
    ("cvt_nano_32", dict(conv_proj=False)),
    ("cvt_nano_32", dict(kv_stride=1)),
    ("cvt_nano_32", dict(qkv_bias=False, scale_by="head_dim", act_layer="gelu")),
    ("cvt_nano_32", dict(pos_embed=(True, False, False), global_pool="avg")),
    ("levit_nano_32", dict(img_size=(48, 36))),
    ("levit_nano_32", dict(norm="layer")),
    ("levit_nano_32", dict(distilled=False)),
    ("levit_nano_32", dict(attn_bias=False, pos_embed=True)),
    ("levit_nano_32", dict(act_layer="gelu", attn_act_layer="identity")),
    ("levit_nano_32", dict(num_classes=0)),
    ("port_ceit_pytorch", dict(img_size=(64, 80), depth=2, lca_head_dim=20)),
    ("port_ceit_pytorch", dict(img_size=64, depth=2, lca=False, global_pool="avg")),
    ("port_vit_pytorch_cvt", dict(img_size=64, depth=(1, 1, 1), num_heads=(1, 3, 4))),
    ("port_vit_pytorch_levit", dict(img_size=64, depth=(1, 1, 1), distilled=True)),
    ("port_vit_pytorch_levit", dict(img_size=64, depth=(1, 1, 1), num_classes=0)),
]
BIG = ("ceit_base", "ceit_small_patch16_384", "ceit_tiny_patch16_384", "cvt_w24", "grafted", "levit_384")


def check(model: nn.Module) -> nn.Module:
    model = model.double()
    folded = weft.fold(model)
    batch = images(model, 3).double()
    with torch.no_grad():
        expected, answer = model(batch), folded(batch)
    assert expected.std() > 1e-3
    assert (answer - expected).abs().max() < 1e-10
    assert not [module for module in folded.modules() if isinstance(module, _BatchNorm)]
    return folded


@pytest.mark.parametrize(("name", "switches"), SWITCHES, ids=str)
def test_every_switch(name, switches):
    check(lively(name, **switches))


@pytest.mark.slow
@pytest.mark.parametrize("name", weft.list_models())
def test_every_variant(name):
    """The big ones on small images: their modules are the same."""
    check(lively(name, **(dict(img_size=64) if name.startswith(BIG) else {})))


@pytest.mark.parametrize(
    ("name", "saved"), [("ceit_tiny_patch16_224", 88e6), ("cvt_13", 297e6), ("levit_128s", 0)], ids=str
)
def test_the_last_block_computes_the_class_row_alone(name, saved):
    """Multiply-adds that go, by the shapes: last LeFF or MLP, queries and projection for all but one token."""
    with torch.device("meta"):
        model = weft.create_model(name).eval()
    spared = cost(model, 224).macs - cost(weft.fold(model), 224).macs
    assert spared == pytest.approx(saved, rel=0.02, abs=1e6)


@pytest.mark.parametrize("name", NANO)
def test_the_original_stays_as_it_is(name):
    model = lively(name, drop_path_rate=0.1).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    weft.fold(model)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NANO)
def test_nothing_to_remember(name):
    """Training mode, another dtype and back, a copy by state dict: the same network."""
    model = lively(name, drop_rate=0.3, drop_path_rate=0.3)
    folded = weft.fold(model)
    batch = images(model)
    expected = folded(batch)
    assert torch.equal(folded.train()(batch), expected)
    other = weft.fold(lively(name, drop_rate=0.3).apply(_scramble))
    other.load_state_dict(folded.state_dict())
    assert torch.equal(other(batch), expected)
    for (key, copied), buffer in zip(other.named_buffers(), folded.buffers(), strict=True):
        assert torch.equal(copied, buffer), key  # also what is derived from weights
    assert (folded.to(torch.bfloat16)(batch.bfloat16()).float() - expected).abs().max() < 0.1 * expected.abs().max()


def _scramble(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def test_two_heads_are_one():
    model = lively("levit_nano_32", num_classes=7)
    folded = weft.fold(model)
    assert isinstance(folded.head, nn.Linear)
    assert folded.head_dist is None
    assert sum(parameter.numel() for parameter in folded.parameters()) < sum(p.numel() for p in model.parameters())


def test_what_cannot_be_done_says_so(tmp_path: Path):
    folded = weft.fold(lively("levit_nano_32"))
    with pytest.raises(UsageError, match=r"must not be folded twice; this one is folded already\."):
        weft.fold(folded)
    with pytest.raises(UsageError, match=r"A folded network must keep its size"):
        folded.set_input_size(64)
    with pytest.raises(UsageError, match=r"this network is folded, for inference only\. Save the original\."):
        save_model_dir(folded, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(UsageError, match=r"in Sequential it cannot merge 1, the first is 1\."):
        weft.fold(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


class Normalised(nn.Conv2d):
    """A convolution with other weights than it stores."""

    def forward(self, fmap: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(fmap, self.weight / self.weight.norm(), self.bias)


class Branches(nn.Module):
    """A network of the user: a convolution with BatchNorm, and one whose BatchNorm cannot be merged."""

    pretrained_cfg = {"input_size": (3, 8, 8)}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.other, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head, self.kind = nn.Linear(4, 3), kind
        if kind == "normalised":
            self.other = Normalised(3, 4, 3)

    def forward(self, fmap: torch.Tensor) -> torch.Tensor:
        first, other = self.conv(fmap), self.other(fmap)
        behind = self.last(other)
        if self.kind == "used twice":
            behind = behind + other
        elif self.kind == "two norms":
            behind = behind + self.norm(other)
        elif self.kind == "one norm":
            behind = self.norm(other)
        return self.head((self.norm(first) + behind).mean(dim=(2, 3)))


@pytest.mark.parametrize("kind", ["plain", "used twice", "two norms", "one norm", "normalised"])
def test_a_network_of_the_user_keeps_its_outputs(kind: str) -> None:
    """All that can be merged is merged, or nothing is."""
    torch.manual_seed(1)
    model = Branches(kind).eval()
    for norm in (model.norm, model.last):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    batch, state = torch.randn(2, 3, 8, 8), copy.deepcopy(model.state_dict())
    other = fastest(model, torch.device("cpu"))
    with torch.inference_mode():
        assert torch.allclose(model(batch), other(batch), atol=1e-5)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    left = sum(isinstance(module, _BatchNorm) for module in other.modules())
    assert left == {"plain": 0, "one norm": 0, "normalised": 1}.get(kind, 2)


@pytest.mark.parametrize(
    "name", ["resnet18", "tf_efficientnet_lite0", "densenet121", "vit_tiny_patch16_224", "levit_128s"]
)
def test_networks_of_timm_are_folded(name: str) -> None:
    torch.manual_seed(2)
    model: Any = timm.create_model(name, num_classes=7).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    batch, state = torch.randn(2, 3, 224, 224), torch.get_rng_state()
    folded = fastest(model, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.inference_mode():
        expected, outputs = model(batch), folded(batch)
    assert (outputs - expected).abs().max() < 1e-4 * expected.abs().max()
    left = sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert left == {"densenet121": 62}.get(name, 0)  # in front of convolutions
    assert fastest(folded, torch.device("cpu")) is folded
