"""Networks that articles print: what `weft convert` makes of their weights is trained, resized, exported and explained.

Equal to the networks themselves: tests/checkpoints/test_sources.py, and for CeiT-pytorch tests/parity/test_golden.py.
Folded: tests/deploy/test_fold.py.
"""

import numpy as np
import pytest
import timm
import torch

import weft
import weft.models.registry  # registers with timm
from tests.helpers import lively
from weft.interpret import explain
from weft.models.families import VARIANTS

SMALL = {
    "port_ceit_pytorch": dict(depth=2),
    "port_vit_pytorch_cvt": dict(depth=(1, 1, 1)),
    "port_vit_pytorch_levit": dict(depth=(1, 1, 1)),
}


def small(name, **switches):
    return lively(name, **{**dict(num_classes=5, img_size=64), **SMALL[name], **switches})


def test_they_are_listed_only_if_asked_for():
    assert weft.list_models("port_*") == list(SMALL)
    assert not set(SMALL) & {*weft.list_models(), *weft.list_models("*cvt*"), *VARIANTS}
    assert all(name in VARIANTS for name in SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name):
    model = small(name).train()
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", SMALL)
def test_another_size(name):
    model = small(name)
    model.set_input_size((96, 80))
    built = small(name, img_size=(96, 80))
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in built.state_dict().items()}
    assert model(torch.randn(1, 3, 96, 80)).shape == (1, 5)
    state, resized = small(name).resize_state_dict(built.state_dict() | small(name, img_size=96).state_dict())
    assert all(small(name).state_dict()[key].shape == state[key].shape for key in resized)


@pytest.mark.parametrize("name", SMALL)
def test_contract_of_timm(name):
    model = small(name)
    x = torch.randn(1, 3, 64, 64)
    features, maps = model.forward_intermediates(x)
    torch.testing.assert_close(model.forward_head(features), model(x))
    assert [fmap.shape[1] for fmap in maps] == [level["num_chs"] for level in model.feature_info]
    backbone = weft.create_model(name, img_size=64, features_only=True, **SMALL[name])
    assert backbone.feature_info.channels() == [fmap.shape[1] for fmap in maps]
    assert isinstance(timm.create_model(f"weft_{name}", img_size=64, **SMALL[name]), type(model))
    model.reset_classifier(3)
    assert model(x).shape == (1, 3)
    program = torch.export.export(weft.fold(model), (x,))
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_maps(name):
    model, x = small(name), torch.randn(3, 64, 64)
    first, second = explain(model, x), explain(weft.fold(model), x)
    for kind in ("rollout", "grad_cam"):
        np.testing.assert_allclose(getattr(second, kind), getattr(first, kind), atol=1e-5)
