"""One step and one epoch: the schedule, what stops a step, and that chance depends on (seed, step) alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import weft
from weft.errors import DivergedError
from weft.recipes import Recipe, load_recipe
from weft.train.loop import Learner, Meter, classification_loss, mean_logits, train_epoch
from weft.train.runtime import Runtime

CPU = Runtime.of("cpu", "fp32")


class Tiny(nn.Module):
    """A classifier of 2x2 images with dropout, so that steps draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.drop(images.flatten(1)))


def learner(epochs: int = 2, steps: int = 10, model: nn.Module | None = None, **settings: object) -> Learner:
    recipe = load_recipe(overrides=[(key.replace("__", "."), value) for key, value in settings.items()])
    torch.manual_seed(0)
    return Learner(model or Tiny(), recipe, CPU, steps, epochs)


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 3, 2, 2, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def test_the_loss_of_two_heads_is_the_mean_of_theirs() -> None:
    first, second = torch.randn(2, 4, 3)
    labels = torch.tensor([0, 1, 2, 0])
    both = classification_loss((first, second), labels, 0.1)
    each = [F.cross_entropy(head, labels, label_smoothing=0.1) for head in (first, second)]
    torch.testing.assert_close(both, (each[0] + each[1]) / 2)
    torch.testing.assert_close(mean_logits((first, second)), (first + second) / 2)
    assert mean_logits(first) is first


@pytest.mark.parametrize("name", ["ceit_nano_32", "cvt_nano_32", "levit_nano_32"])
def test_every_family_learns_a_batch_by_heart(name: str) -> None:
    torch.manual_seed(0)
    model = weft.create_model(name, num_classes=3)
    one = learner(epochs=1, steps=25, model=model, loss__label_smoothing=0, schedule__warmup_epochs=0)
    model.train()
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(6, 3, 32, 32, generator=generator), torch.arange(6) % 3
    losses = [one.learn(images, labels)[0] for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0], losses


def test_warm_up_then_half_a_cosine() -> None:
    one = learner(epochs=10, steps=10, optim__lr=1.0, schedule__warmup_epochs=1, schedule__min_lr=0.1)
    lrs = []
    for images, labels in batches(100):
        lrs.append(one.lr)
        one.learn(images, labels)
    assert lrs[0] == pytest.approx(1e-6)
    assert lrs[5] == pytest.approx(0.5, abs=1e-5)  # half of the warm-up
    assert lrs[10] == pytest.approx(1.0)  # its end
    assert lrs[55] == pytest.approx(0.55)  # half of the cosine: the mean of 1 and 0.1
    assert lrs[99] == pytest.approx(0.1, abs=1e-3)
    assert lrs[10:] == sorted(lrs[10:], reverse=True)


def test_a_short_run_warms_up_for_a_fifth() -> None:
    one = learner(epochs=1, steps=10, optim__lr=1.0, schedule__warmup_epochs=50)
    lrs = []
    for images, labels in batches(10):
        lrs.append(one.lr)
        one.learn(images, labels)
    assert lrs.index(max(lrs)) == 2


def test_a_single_step_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    one = learner(epochs=1, steps=1)
    one.learn(*batches(1)[0])
    assert caplog.records == []


def test_the_no_decay_list_of_the_model_is_kept() -> None:
    model = weft.create_model("ceit_nano_32", num_classes=3)
    one = learner(model=model, optim__weight_decay=0.3)
    decayed = {id(p) for group in one.optimizer.param_groups if group["weight_decay"] == 0.3 for p in group["params"]}
    spared = {name for name, p in model.named_parameters() if id(p) not in decayed}
    assert {"cls_token", "pos_embed", "norm.weight", "head.bias"} <= spared
    assert "head.weight" not in spared
    assert "patch_embed.convs.0.weight" not in spared


def same(first: nn.Module, second: nn.Module) -> None:
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_a_step_draws_from_its_seed_and_number_alone() -> None:
    one, two = learner(seed=3), learner(seed=3)
    two.model.load_state_dict(one.model.state_dict())
    for images, labels in batches(3):
        one.learn(images, labels)
        torch.rand(17)  # somebody else draws in between
        two.learn(images, labels)
    same(one.model, two.model)


def test_the_seed_matters() -> None:
    one, two = learner(seed=3), learner(seed=4)
    two.model.load_state_dict(one.model.state_dict())
    for images, labels in batches(3):
        one.learn(images, labels)
        two.learn(images, labels)
    assert not torch.equal(one.model.fc.weight, two.model.fc.weight)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update(bad: float) -> None:
    one = learner(epochs=2, steps=2)
    one.model.train()
    for images, labels in batches(3):
        one.learn(images, labels)
    before, moments = copy.deepcopy(one.model), copy.deepcopy(one.optimizer.state_dict())
    images, labels = batches(1)[0]
    with pytest.raises(DivergedError, match=r"The loss must be finite; got nan at step 4 \(epoch 2\)"):
        one.learn(images * bad, labels)
    same(one.model, before)
    assert str(one.optimizer.state_dict()) == str(moments)
    assert one.step == 3


class Exploding(torch.autograd.Function):
    """Its value is fine, its gradient is not."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * math.inf


@pytest.mark.parametrize("clip", [0, 1])
def test_a_gradient_that_is_not_finite_stops_before_the_update(clip: float) -> None:
    one = learner(optim__clip_grad=clip)
    before = copy.deepcopy(one.model)
    hook = one.model.fc.register_forward_hook(lambda module, inputs, output: Exploding.apply(output))
    with pytest.raises(DivergedError, match=r"The norm of the gradient must be finite; got (nan|inf) at step 1"):
        one.learn(*batches(1)[0])
    hook.remove()
    same(one.model, before)


def test_gradients_are_clipped() -> None:
    images, labels = batches(1)[0]
    steps = {}
    for clip in (0, 1e-3):
        plain = dict(optim__opt="sgd", optim__momentum=0, optim__lr=1, optim__weight_decay=0, schedule__warmup_epochs=0)
        one = learner(**plain, optim__clip_grad=clip)
        one.model.eval()
        before, lr = parameters_to_vector(one.model.parameters()).detach(), one.lr
        one.learn(images, labels)
        steps[clip] = (parameters_to_vector(one.model.parameters()).detach() - before).norm().item() / lr
    assert steps[1e-3] == pytest.approx(1e-3, rel=0.05)
    assert steps[0] > 0.1


def test_the_average_is_what_is_kept() -> None:
    one = learner(optim__ema_decay=0.9, optim__lr=0.1, schedule__warmup_epochs=0)
    assert one.best_guess is not one.model
    for images, labels in batches(6):
        one.learn(images, labels)
    assert not torch.equal(one.best_guess.fc.weight, one.model.fc.weight)
    plain = learner()
    assert plain.best_guess is plain.model


def test_an_epoch_reports_means_over_images() -> None:
    one = learner(epochs=1, steps=3, optim__lr=1e-9, loss__label_smoothing=0)
    one.model.drop.p = 0.0
    data = batches(3)
    seen: list[Meter] = []
    meter = train_epoch(one, data, seen.append)
    logits = torch.cat([one.model(images) for images, _ in data])
    labels = torch.cat([labels for _, labels in data])
    assert meter.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert meter.top1 == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert [m.step for m in seen] == [1, 2, 3]
    assert seen[-1] == meter
    assert one.model.training


def test_bf16_keeps_the_weights_in_fp32() -> None:
    torch.manual_seed(0)
    one = Learner(Tiny(), Recipe(), Runtime.of("cpu", "bf16"), 10, 1)
    with one.runtime.autocast():
        assert one.model(torch.zeros(1, 3, 2, 2)).dtype == torch.bfloat16
    one.learn(*batches(1)[0])
    assert one.model.fc.weight.dtype == torch.float32
