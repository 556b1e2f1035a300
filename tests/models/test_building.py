"""Networks are built without random values where weights replace all of them."""

from __future__ import annotations

import pytest
import torch

from weft.models.building import NoRandomInit


@pytest.mark.filterwarnings("ignore:mean is more than 2 std")
@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (-0.04, 0.04), (0.03, 2.0)])
def test_rejection_sampling_ends_without_random_values(bounds: tuple[float, float]) -> None:
    weight = torch.full((4, 4), float("nan"))  # as uninitialised memory may be
    with NoRandomInit():
        torch.nn.init.trunc_normal_(weight, std=0.02 if bounds[0] < 1 else 1.0, a=bounds[0], b=bounds[1])
    assert bool(weight.isfinite().all())
