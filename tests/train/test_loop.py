"""One step and one epoch: the schedule, what stops a step, and that chance depends on (seed, step) alone."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import weft
from tests.train.tiny import recipe_of
from weft.machine.runtime import Runtime
from weft.recipes import Recipe
from weft.train.loop import Learner, Meter, StepResult, train_epoch

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
    torch.manual_seed(0)
    return Learner(model or Tiny(), recipe_of(**settings), CPU, steps, steps * epochs, 3)


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 3, 2, 2, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.slow_except("levit_nano_32")
@pytest.mark.parametrize("name", ["ceit_nano_32", "cvt_nano_32", "levit_nano_32"])
def test_every_family_overfits_a_batch(name: str) -> None:
    torch.manual_seed(0)
    model = weft.create_model(name, num_classes=3)
    one = learner(epochs=1, steps=25, model=model, loss__label_smoothing=0, schedule__warmup_epochs=0)
    model.train()
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(6, 3, 32, 32, generator=generator), torch.arange(6) % 3
    losses = [one.train_step([(images, labels)]).loss for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0], losses


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
    one, same_seed, other_seed = learner(seed=3), learner(seed=3), learner(seed=4)
    for images, labels in batches(3):
        one.train_step([(images, labels)])
        torch.rand(17)  # somebody else draws in between
        same_seed.train_step([(images, labels)])
        other_seed.train_step([(images, labels)])
    same(one.model, same_seed.model)
    assert not torch.equal(one.model.fc.weight, other_seed.model.fc.weight)


class Exploding(torch.autograd.Function):
    """Its value is fine, its gradient is not."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * math.inf


@pytest.mark.parametrize(("bad", "clip"), [(math.nan, 0), (math.inf, 0), ("gradient", 0), ("gradient", 1)])
def test_a_loss_or_gradient_that_is_not_finite_moves_nothing(bad: float | str, clip: float) -> None:
    one = learner(epochs=2, steps=2, optim__ema_decay=0.9, optim__clip_grad=clip)
    one.set_train_mode()
    for images, labels in batches(3):
        assert one.train_step([(images, labels)]).is_finite
    before, average = copy.deepcopy(one.model), copy.deepcopy(one.eval_model)
    moments = copy.deepcopy(one.optimizer.state_dict())
    images, labels = batches(1)[0]
    if bad == "gradient":
        one.model.fc.register_forward_hook(lambda module, inputs, output: Exploding.apply(output))
    result = one.train_step([(images if bad == "gradient" else images * bad, labels)])
    assert not result.is_finite
    assert math.isfinite(result.loss) == (bad == "gradient")
    assert not math.isfinite(result.grad_norm)
    same(one.model, before)
    same(one.eval_model, average)
    assert str(one.optimizer.state_dict()) == str(moments)
    assert one.step == 4


def test_gradients_are_clipped() -> None:
    images, labels = batches(1)[0]
    steps = {}
    for clip in (0, 1e-3):
        plain = dict(optim__opt="sgd", optim__momentum=0, optim__lr=1, optim__weight_decay=0, schedule__warmup_epochs=0)
        one = learner(**plain, optim__clip_grad=clip)
        one.model.eval()
        before, lr = parameters_to_vector(one.model.parameters()).detach(), one.lr_at(0)
        one.train_step([(images, labels)])
        steps[clip] = (parameters_to_vector(one.model.parameters()).detach() - before).norm().item() / lr
    assert steps[1e-3] == pytest.approx(1e-3, rel=0.05)
    assert steps[0] > 0.1


def test_the_average_is_what_is_kept() -> None:
    one = learner(optim__ema_decay=0.9, optim__lr=0.1, schedule__warmup_epochs=0)
    assert one.eval_model is not one.model
    for images, labels in batches(6):
        one.train_step([(images, labels)])
    assert not torch.equal(one.eval_model.fc.weight, one.model.fc.weight)
    plain = learner()
    assert plain.eval_model is plain.model


def test_an_epoch_reports_means_over_images() -> None:
    one = learner(epochs=1, steps=3, optim__lr=1e-9, loss__label_smoothing=0)
    one.model.drop.p = 0.0
    data = batches(3)
    seen: list[int] = []
    meter = Meter(steps=3)

    def on_step(meter: Meter, result: StepResult) -> None:
        seen.append(meter.step)

    train_epoch(one, [([batch], ()) for batch in data], meter, on_step)
    logits = torch.cat([one.model(images) for images, _ in data])
    labels = torch.cat([labels for _, labels in data])
    assert meter.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert meter.top1 == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert seen == [1, 2, 3]
    assert meter.seen == meter.count == 24
    assert one.model.training


def test_parts_of_a_step_add_up_to_it() -> None:
    whole, parted = learner(optim__opt="sgd", optim__lr=0.1), learner(optim__opt="sgd", optim__lr=0.1)
    for one in (whole, parted):
        one.model.drop.p = 0.0
    for images, labels in batches(3):
        first = whole.train_step([(images, labels)])
        second = parted.train_step([(images[:4], labels[:4]), (images[4:], labels[4:])])
        assert second.loss == pytest.approx(first.loss, rel=1e-6)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    torch.testing.assert_close(whole.model.fc.weight, parted.model.fc.weight)


def test_bf16_keeps_the_weights_in_fp32() -> None:
    torch.manual_seed(0)
    one = Learner(Tiny(), Recipe(), Runtime.of("cpu", "bf16"), 10, 10, 3)
    with one.runtime.autocast():
        assert one.model(torch.zeros(1, 3, 2, 2)).dtype == torch.bfloat16
    one.train_step([batches(1)[0]])
    assert one.model.fc.weight.dtype == torch.float32


def test_earlier_blocks_learn_slower() -> None:
    model = weft.create_model("ceit_nano_32", num_classes=3)
    one = learner(model=model, optim__layer_decay=0.5, optim__lr=1.0, schedule__warmup_epochs=0)
    one.set_train_mode()
    one.train_step([(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0]))])
    of = {id(p): group["lr"] for group in one.optimizer.param_groups for p in group["params"]}
    rates = [of[id(block.attn.qkv.weight)] for block in model.blocks]
    assert of[id(model.head.weight)] == 1.0
    for before, after in itertools.pairwise(rates):
        assert before == pytest.approx(after / 2)


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lamb", "lion", "muon"])
def test_the_state_of_every_optimizer_is_restored_by_the_names_of_the_weights(opt: str) -> None:
    """Also into other groups of weights: without weight decay there is one, with it there are two."""
    one = learner(optim__opt=opt, optim__weight_decay=0.1, optim__ema_decay=0.9)
    for batch in batches(3):
        one.train_step([batch])
    tensors, plain = one.state()
    other = learner(optim__opt=opt, optim__weight_decay=0.0, optim__ema_decay=0.9)
    assert len(other.optimizer.param_groups) < len(one.optimizer.param_groups)
    other.restore({name: tensor.clone() for name, tensor in tensors.items()}, plain, one.step)
    restored, values = other.state()
    assert values == plain
    assert other.step == 3
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(restored[name], tensor), name
        assert restored[name].dtype == tensor.dtype, name
    other = learner(optim__opt=opt, optim__weight_decay=0.1, optim__ema_decay=0.9)
    other.restore({name: tensor.clone() for name, tensor in tensors.items()}, plain, one.step)
    batch = batches(1, seed=1)[0]
    assert one.train_step([batch]) == other.train_step([batch])
    assert torch.equal(one.model.fc.weight, other.model.fc.weight)


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lamb", "lion", "muon"])
@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_every_optimiser_learns_with_every_clipping(opt: str, mode: str) -> None:
    one = learner(steps=30, optim__opt=opt, optim__clip_mode=mode, optim__clip_grad=0.1, optim__lr=0.02)
    one.model.drop.p = 0.0
    batch = batches(1)[0]
    losses = [one.train_step([batch]).loss for _ in range(30)]
    assert losses[-1] < 0.97 * losses[0], losses
