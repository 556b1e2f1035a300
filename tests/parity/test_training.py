"""In training mode too: the same loss, the same gradient for every parameter, as public packages with the same network.

LeViT against timm's; CvT against transformers', whose deviations are switched on here: exact GELU, and no drop path
(theirs zeroes a whole sample, ours a branch).
"""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import weft
from tests.helpers import enliven

transformers = pytest.importorskip("transformers")


def train_once(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(x)
    logits = getattr(logits, "logits", logits)
    answers = logits if isinstance(logits, tuple) else (logits,)
    loss = sum(F.cross_entropy(answer, y, label_smoothing=0.1) for answer in answers)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        # Where the true gradient is zero (in front of a BatchNorm), both are rounding: compare on the model's scale.
        scale = max(grad.abs().max().item(), 1e-6)
        torch.testing.assert_close(grad, theirs[name], rtol=1e-6, atol=1e-8 * max(1.0, scale), msg=name)


def assert_same_step(ours, theirs):
    for model in (ours, theirs):
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3).step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow_except("levit_128s")
@pytest.mark.parametrize("name", ["levit_128s", "levit_192"])
def test_levit_trains_as_timms(name):
    torch.manual_seed(0)
    ours = enliven(weft.create_model(name, num_classes=10)).double().train()
    theirs = timm.create_model(name, num_classes=10).double().train()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    theirs.set_distilled_training(True)
    x, y = torch.randn(4, 3, 224, 224, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    loss, grads = train_once(ours, x, y)
    their_loss, their_grads = train_once(theirs, x, y)
    torch.testing.assert_close(loss, their_loss, rtol=1e-12, atol=0)
    assert_same_gradients(grads, their_grads)
    for (key, mine), (their_key, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=False):
        if "running" in key:
            assert key == their_key
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert_same_step(ours, theirs)


@pytest.mark.slow
def test_cvt_trains_as_transformers():
    torch.manual_seed(0)
    config = transformers.CvtConfig(num_labels=10, drop_path_rate=[0.0, 0.0, 0.0])
    theirs = enliven(transformers.CvtForImageClassification(config)).double().train()
    ours = weft.create_model("cvt_13", num_classes=10, act_layer="gelu").double().train()
    weft.load_checkpoint(ours, theirs.state_dict())
    x, y = torch.randn(2, 3, 224, 224, dtype=torch.float64), torch.tensor([1, 2])
    loss, grads = train_once(ours, x, y)
    their_loss, their_grads = train_once(theirs, x, y)
    torch.testing.assert_close(loss, their_loss, rtol=1e-12, atol=0)
    # Their gradients, read through the same map as their weights, are ours.
    twin = weft.create_model("cvt_13", num_classes=10, act_layer="gelu").double()
    weft.load_checkpoint(twin, {**theirs.state_dict(), **their_grads})
    assert_same_gradients(grads, {name: p.detach() for name, p in twin.named_parameters()})
