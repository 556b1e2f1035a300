"""Networks on the device: equal to the recorded outputs of the released code, and to themselves on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.data.pictures import photo
from tests.gpu.deviation import TOLERANCE, deviation
from tests.helpers import NANO, images, lively
from tests.parity.test_golden import RECORDED
from weft.data import train_transform
from weft.data.colour import Picture
from weft.data.crops import batch_of, normalized
from weft.layers import attention
from weft.layers.attention import attend


@pytest.mark.parametrize("precision", list(TOLERANCE))
@pytest.mark.slow_except(*(f"{name}-fp32" for name in ("CeiT-pytorch", "LeViT_128S", "cvt-13-224x224")))
@pytest.mark.parametrize("theirs", RECORDED)
def test_the_records_are_reproduced(theirs: str, precision: str, device: str) -> None:
    if precision == "tf32" and device == "cpu":
        pytest.skip("a CPU has no TF32")
    difference, is_same_class = deviation(theirs, precision, device)
    assert difference <= TOLERANCE[precision]
    assert is_same_class or precision == "bf16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*NANO, "ceit_tiny_patch16_224", "cvt_13", "levit_128s"])
def test_folded_is_equal(name: str, dtype: torch.dtype, device: str) -> None:
    """Folded on the device, or on the CPU and moved there; in 16 bits a GPU computes the stem in another form."""
    model = lively(name)
    x = images(model, 4).to(device)
    moved = weft.fold(model).to(device, dtype)
    with torch.inference_mode():
        expected = model.to(device)(x)
        folded = weft.fold(model).to(dtype)
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype] * expected.abs().max().item()
        for network in (folded, moved, copy.deepcopy(folded)):
            actual = network(x.to(dtype)).float()
            assert actual.device.type == device
            torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_images_are_normalised_as_on_the_cpu(device: str) -> None:
    transform = train_transform(64, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), erase_prob=0.5)
    picture = Picture(photo(80, 90))
    batch = batch_of([transform.draw(picture) for _ in range(16)], [0] * 16)
    expected, actual = (normalized(batch, transform.mean, transform.std, on) for on in ("cpu", device))
    assert actual.device.type == device
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NANO)
def test_gradients_are_those_of_the_cpu(name: str, device: str) -> None:
    """In float64: in float32, rounding alone changes some gradients of LeViT by more than a percent.

    The CUDA kernel of hardswish has the constants 1/6 and 1/3 in float32 for float64 as well; LeViT amplifies that.
    """
    ours = lively(name, drop_path_rate=0.0).double().train()
    other = copy.deepcopy(ours).to(device)
    x, labels = images(ours, 8).double(), torch.arange(8) % 10
    for model, batch, targets in ((ours, x, labels), (other, x.to(device), labels.to(device))):
        outputs = model(batch)
        heads = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([F.cross_entropy(head, targets) for head in heads]).sum().backward()
    for (key, mine), theirs in zip(ours.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        scale = max(mine.grad.abs().max().item(), 1e-6)
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad, rtol=0, atol=3e-6 * scale, msg=key)


def test_bf16_attention_of_a_gpu_is_fused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain matrix multiplication in bf16 is a choice for CPUs."""
    calls: list[str] = []
    fused = F.scaled_dot_product_attention

    def counted(*args: torch.Tensor, **kwargs: float) -> torch.Tensor:
        calls.append(args[0].device.type)
        return fused(*args, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", counted)
    q, k, v = (torch.randn(2, 3, 50, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    result = attend(q, k, v, 0.125)
    assert calls == (["cuda"] if device == "cuda" else [])
    expected = torch.softmax(q.double() @ k.double().mT * 0.125, dim=-1) @ v.double()
    assert (result.double() - expected).abs().max() <= 0.03
