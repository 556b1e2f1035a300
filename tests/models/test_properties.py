"""What must hold for any input: searched by hypothesis, the same search every time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import NANO
from tests.models.tiny import built, lively

MODELS = {name: lively(name) for name in NANO}
# The smallest sides that leave a token: one patch; a stride of 2 thrice, padded; a stem of stride 4, padded.
SMALLEST = {"ceit_nano_32": 4, "cvt_nano_32": 1, "levit_nano_32": 1}
searched = settings(max_examples=25, deadline=None, derandomize=True)


@searched
@given(
    name=st.sampled_from(NANO),
    seed=st.integers(0, 2**31),
    low=st.floats(-10, 10, width=32),
    high=st.floats(-10, 10, width=32),
)
def test_finite_images_give_finite_logits(name, seed, low, high):
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * (high - low) + low
    with torch.inference_mode():
        assert MODELS[name](x).isfinite().all()


@searched
@given(name=st.sampled_from(NANO), height=st.integers(0, 80), width=st.integers(0, 80), batch=st.integers(1, 3))
def test_every_size_from_the_smallest_on(name, height, width, batch):
    """Built at it, or resized to it."""
    size = (SMALLEST[name] + height, SMALLEST[name] + width)
    model, resized = built(name, img_size=size).eval(), built(name)
    resized.set_input_size(size)
    shapes, resized_shapes = (
        {key: value.shape for key, value in each.state_dict().items()} for each in (model, resized)
    )
    assert shapes == resized_shapes
    with torch.inference_mode():
        x = torch.randn(batch, 3, *size)
        assert model(x).shape == (batch, 5)
        maps = model.forward_intermediates(x, intermediates_only=True)
    for level, fmap in zip(model.feature_info, maps, strict=True):
        for side, places in zip(size, fmap.shape[-2:], strict=True):
            assert side // level["reduction"] <= places <= -(-side // level["reduction"])
