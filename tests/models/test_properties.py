"""What must hold for any input: searched by hypothesis, the same search every time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import weft
from tests.helpers import NANO, lively

MODELS = {name: lively(name, num_classes=5) for name in NANO}
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
    size = (SMALLEST[name] + height, SMALLEST[name] + width)
    model = weft.create_model(name, img_size=size, num_classes=5).eval()
    with torch.inference_mode():
        x = torch.randn(batch, 3, *size)
        assert model(x).shape == (batch, 5)
        for level, fmap in zip(
            model.feature_info, model.forward_intermediates(x, intermediates_only=True), strict=True
        ):
            for side, places in zip(size, fmap.shape[-2:], strict=True):
                assert side // level["reduction"] <= places <= -(-side // level["reduction"])


@searched
@given(name=st.sampled_from(NANO), order=st.permutations(range(4)))
def test_order_of_a_batch_changes_nothing(name, order):
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(MODELS[name](x[list(order)]), MODELS[name](x)[list(order)], rtol=1e-4, atol=1e-5)


@searched
@given(name=st.sampled_from(NANO), seed=st.integers(0, 2**31))
def test_saved_and_loaded_is_the_same_to_the_bit(name, seed):
    torch.manual_seed(seed)
    model = weft.create_model(name, num_classes=5).eval()
    twin = weft.create_model(name, num_classes=5).eval()
    twin.load_state_dict(load(save(model.state_dict())), strict=True)
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(model(x), twin(x))


@searched
@given(name=st.sampled_from(NANO), height=st.integers(8, 60), width=st.integers(8, 60))
def test_resizing_there_at_once_or_at_construction_agrees_in_shape(name, height, width):
    resized = weft.create_model(name, num_classes=5)
    resized.set_input_size((height, width))
    built = weft.create_model(name, num_classes=5, img_size=(height, width))
    assert {key: value.shape for key, value in resized.state_dict().items()} == {
        key: value.shape for key, value in built.state_dict().items()
    }
