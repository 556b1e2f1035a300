"""Training on the device: exact resume, dropout as a function of the step, pinned memory, one process of a group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train import tiny
from weft.inference import evaluate
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.recipes import load_recipe
from weft.train.loop import Learner
from weft.train.network import build_model
from weft.train.plan import open_splits

FAMILIES = tuple(tiny.ARGUMENTS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data"))


@pytest.mark.slow_except("fp32-levit_nano_32")
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_killed_run_ends_with_the_same_bits(
    model: str, precision: str, device: str, photos: Path, tmp_path: Path
) -> None:
    more = dict(device=device, precision=precision, deterministic=True, batch_size=4)
    whole = tiny.fresh(tiny.command(photos, tmp_path / "whole", model, **more))
    assert whole.returncode == 0, whole.stderr
    assert tiny.kill_and_resume(photos, tmp_path / "killed", model, **more) >= 2
    tiny.assert_same_run(tmp_path / "whole", tmp_path / "killed")


def learner(model: str, device: str, precision: str = "fp32") -> Learner:
    settings = [("model", model), ("batch_size", 8), ("model_args.drop_path_rate", 0.5), ("optim.lr", 1e-3)]
    recipe, runtime = load_recipe(None, settings), Runtime.of(device, precision)
    torch.manual_seed(0)
    network = build_model(recipe, 10).to(runtime.device)
    made = Learner(network, recipe, runtime, 10, 10, 10)
    made.set_train_mode()
    return made


@pytest.mark.parametrize("model", FAMILIES)
def test_drop_path_depends_on_the_step_alone(model: str, device: str) -> None:
    """The generator of the device is no part of a state: every step seeds it."""
    batch = torch.randn(8, 3, 32, 32).to(device), torch.arange(8).to(device)
    one, other = learner(model, device), learner(model, device)
    first = one.train_step([batch])
    torch.randn(1000, device=device)  # moves the generator on
    assert other.train_step([batch]).loss == pytest.approx(first.loss, rel=1e-6)
    one.step = other.step = 5
    torch.manual_seed(123)
    assert other.train_step([batch]).loss == pytest.approx(one.train_step([batch]).loss, rel=1e-3)


@pytest.mark.parametrize("model", FAMILIES)
def test_bf16_learns_as_fp32(model: str, device: str) -> None:
    batch = torch.randn(8, 3, 32, 32).to(device), torch.arange(8).to(device)
    losses = []
    for precision in ("fp32", "bf16"):
        made = learner(model, device, precision)
        losses.append(made.train_step([batch]).loss)
        assert all(parameter.dtype == torch.float32 for parameter in made.model.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_batches_are_pinned_for_a_gpu(device: str, photos: Path) -> None:
    loaded = load_recipe(None, [("data.source", str(photos)), ("batch_size", 4), ("workers", 0)])
    source = open_splits(loaded).train
    images, labels = next(iter(evaluation_batches(source, learner("levit_nano_32", device).model, 4, 0)))
    assert images.is_pinned() == labels.is_pinned() == (device == "cuda")
    assert Runtime.of(device).put(images).device.type == device


def test_evaluation_on_the_device_is_that_of_the_cpu(device: str, photos: Path, tmp_path: Path) -> None:
    done = tiny.fresh(tiny.command(photos, tmp_path / "run", device=device))
    assert done.returncode == 0, done.stderr
    on_cpu, on_device = (evaluate(tmp_path / "run", str(photos), device=name) for name in ("cpu", device))
    assert on_device.count == on_cpu.count
    assert on_device.loss == pytest.approx(on_cpu.loss, rel=1e-3)


def test_a_group_of_one_process(device: str, photos: Path, tmp_path: Path) -> None:
    more, group = dict(device=device, deterministic=True), {"RANK": "0", "LOCAL_RANK": "0", **tiny.group_of(1)}
    for name, environment in (("group", group), ("alone", {})):
        done = tiny.fresh(tiny.command(photos, tmp_path / name, **more), **environment)
        assert done.returncode == 0, done.stderr
    tiny.assert_same_run(tmp_path / "group", tmp_path / "alone")
