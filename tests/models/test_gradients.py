"""Analytic gradients of small blocks against finite differences, in float64."""

import pytest
import torch

from tests.helpers import enliven
from weft.grid import Grid
from weft.layers.activation import activation
from weft.models.ceit import network as ceit
from weft.models.cvt import network as cvt
from weft.models.levit import network as levit

ACT = activation("hard_swish")
BLOCKS = {
    "LeFF": (lambda: ceit.LeFF(4, 8, 3, norm=True, final_act=False, pass_cls=True), (5, 4), [(2, 2)]),
    "LCA": (
        lambda: ceit.LayerwiseClassAttention(4, 3, 2, 2.0, qkv_bias=True, embed=True),
        (3, 4),
        [],
    ),
    "ConvAttention": (
        lambda: cvt.ConvAttention(4, 2, True, 3, 2, True, 0.5, num_prefix=1, drop_rate=0.0),
        (10, 4),
        [(3, 3)],
    ),
    "Attention": (lambda: levit.Attention(4, 2, 2, 2.0, Grid(2, 3), levit.linear_bn, ACT, True), (6, 4), []),
    "AttentionDownsample": (
        lambda: levit.AttentionDownsample(4, 6, 2, 2, 4.0, Grid(3, 2), levit.linear_bn, ACT, True),
        (6, 4),
        [],
    ),
}


@pytest.mark.slow_except("Attention-False")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_those_of_finite_differences(name, training):
    build, shape, args = BLOCKS[name]
    block = enliven(build()).double().train(training)
    tokens = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    parameters = list(block.parameters())

    def run(tokens, *values):
        with torch.no_grad():
            state = {key: buffer.clone() for key, buffer in block.named_buffers()}
        names = [key for key, _ in block.named_parameters()]
        return torch.func.functional_call(block, {**dict(zip(names, values, strict=True)), **state}, (tokens, *args))

    assert torch.autograd.gradcheck(run, (tokens, *parameters), atol=1e-6, rtol=1e-4)
