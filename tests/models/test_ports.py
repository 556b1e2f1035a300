"""Networks that articles print: what `weft convert` makes of their weights is resized, exported and explained.

Under timm's contract: test_contract.py. Equal to the networks themselves: tests/checkpoints/test_sources.py, and for
CeiT-pytorch tests/parity/test_golden.py. Folded: tests/deploy/test_fold.py.
"""

import numpy as np
import pytest
import torch

import weft
from tests.models.tiny import PORTS, lively
from weft.interpret import explain


@pytest.mark.parametrize("name", PORTS)
def test_another_size(name):
    model, built = lively(name), lively(name, img_size=(96, 80))
    model.set_input_size((96, 80))
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in built.state_dict().items()}
    assert model(torch.randn(1, 3, 96, 80)).shape == (1, 5)
    own = lively(name).state_dict()
    state, resized = lively(name).resize_state_dict(built.state_dict() | lively(name, img_size=96).state_dict())
    assert all(own[key].shape == state[key].shape for key in resized)


@pytest.mark.parametrize("name", PORTS)
def test_the_folded_network_is_exported_and_has_the_same_maps(name):
    model, x = lively(name), torch.randn(3, 64, 64)
    folded = weft.fold(model)
    program = torch.export.export(folded, (x[None],))
    torch.testing.assert_close(program.module()(x[None]), model(x[None]), rtol=1e-4, atol=1e-5)
    first, second = explain(model, x), explain(folded, x)
    for kind in ("rollout", "grad_cam"):
        np.testing.assert_allclose(getattr(second, kind), getattr(first, kind), atol=1e-5)
