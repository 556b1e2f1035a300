"""QuickGELU and the MLP with its factors in the weights are what timm computes, values and gradients."""

from __future__ import annotations

import pytest
import torch
from timm.layers import Mlp
from timm.layers.activations import QuickGELU as Plain

from weft.layers.activation import QuickGELU, QuickMlp, fold_mlp


def test_the_activation():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(QuickGELU()(x), Plain()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_folded", [False, True])
def test_the_mlp(is_folded):
    torch.manual_seed(0)
    ours = QuickMlp(6, 24, 0.0).double()
    theirs = Mlp(6, 24, act_layer=Plain).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = theirs(x)
    if is_folded:
        torch.testing.assert_close(fold_mlp(ours)(x), expected, rtol=1e-12, atol=1e-12)
        return
    answer = ours(x)
    torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(answer.square().sum(), [x, *ours.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *theirs.parameters()])
    for grad, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-10)
