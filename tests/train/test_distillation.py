"""The teacher: who can be one, who cannot and why, and logits that are computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import weft
from tests.helpers import lively
from tests.train import tiny
from tests.train.conftest import COLOURS, SHORT
from weft.checkpoints import save_model_dir
from weft.data import open_data
from weft.errors import CheckpointError, UsageError
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.recipes import load_recipe
from weft.train import distillation, train
from weft.train.distillation import Teacher, is_cached, open_teacher
from weft.train.objective import Objective

CPU = Runtime.of("cpu")
FIXED = {"augment.crop": "none", "augment.hflip": False, "augment.color_jitter": 0}
SMALL = {"depth": [1, 1, 1]}


def student(classes: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return weft.create_model("levit_nano_32", num_classes=classes, **SMALL)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_dir(student(), tmp_path_factory.mktemp("teacher") / "model", label_names=list(COLOURS))


@pytest.mark.slow_except("soft-levit_nano_32")
@pytest.mark.parametrize("name", ["levit_nano_32", "ceit_nano_32", "cvt_nano_32"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_every_student_learns_from_a_model(name: str, kind: str, teacher: Path, photos: Path, tmp_path: Path) -> None:
    settings = {"distill.teacher": str(teacher), "distill.kind": kind, "augment.mixup": 0.8}
    result = train(photos, out=tmp_path / "run", settings=settings, **{**SHORT, "model": name, "epochs": 1})
    assert result.epochs == 1


def test_logits_that_cannot_change_are_computed_once_of_any_timm_model(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, computed = [], []

    def public(name: str, *, pretrained: bool) -> torch.nn.Module:
        asked.append((name, pretrained))
        torch.manual_seed(0)
        network = timm.create_model(name, num_classes=3)
        network.register_forward_pre_hook(lambda _, given: computed.append(len(given[0])))
        return network

    monkeypatch.setattr(distillation, "create_model", public)
    losses = []
    for cache in (True, False):
        computed.clear()
        settings = {"distill.teacher": "resnet10t", "distill.cache": cache, "model_args.depth": [1, 1, 1], **FIXED}
        out = train(photos, out=tmp_path / f"cache{cache}", settings=settings, **SHORT).out
        assert computed == [12] * (1 + (3 if cache else 6))  # rehearsal; 36 images by 12: once, or in both epochs
        losses.append(tiny.losses(out))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert asked == [("resnet10t", True)] * 2


def test_any_augmentation_changes_the_logits_which_are_then_not_cached() -> None:
    assert is_cached(load_recipe(overrides=FIXED.items()))
    assert not is_cached(load_recipe(overrides=[*FIXED.items(), ("distill.cache", False)]))
    varied = {"crop": "shift", "hflip": True, "color_jitter": 0.1, "mixup": 0.8, "cutmix": 1, "erase_prob": 0.1}
    for key, value in [*varied.items(), ("rand_augment", "rand-m9")]:
        assert not is_cached(load_recipe(overrides=[*FIXED.items(), (f"augment.{key}", value)])), key


@pytest.mark.parametrize(
    ("name", "theirs", "size"),
    [
        ("vit_tiny_patch16_224", {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, 224),
        ("ceit_nano_32", {"mean": (0.3, 0.4, 0.2)}, 32),
        ("ceit_nano_32", {"std": (0.3, 0.4, 0.2)}, 32),
    ],
)
def test_the_teacher_gets_the_pixels_in_its_own_normalisation(name: str, theirs: dict[str, Any], size: int) -> None:
    model = lively(name, num_classes=3) if name.startswith("ceit") else timm.create_model(name, num_classes=3).eval()
    own, pixels = preprocessing(model), torch.rand(2, 3, size, size)
    given = {**own, **theirs}

    def normalised(cfg: dict[str, Any]) -> torch.Tensor:
        mean, std = (torch.tensor(cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
        return (pixels - mean) / std

    with torch.no_grad():
        expected = model(normalised(own))
    teacher = Teacher(model, given, CPU)
    torch.testing.assert_close(teacher(normalised(given)), expected, atol=1e-4, rtol=1e-4)
    if size == 224:  # which is its only one
        assert teacher(torch.rand(2, 3, 32, 32)).shape == (2, 3)


def opened(teacher: str | Path, classes: list[str], student_: Any = None, **settings: Any) -> Teacher:
    recipe = load_recipe(overrides=[("distill.teacher", str(teacher)), *settings.items()])
    return open_teacher(recipe, student_ or student(len(classes)), classes, CPU)


def test_of_two_heads_one_learns_from_the_teacher(teacher: Path) -> None:
    network, images = student(), torch.randn(4, 3, 32, 32)
    logits = opened(teacher, list(COLOURS), network)(images)
    recipe = load_recipe(overrides={"distill.teacher": str(teacher), "distill.alpha": 1.0}.items())
    Objective(recipe)(network.train()(images), torch.eye(3)[[0, 1, 2, 0]], logits).backward()
    assert network.head.linear.weight.grad.abs().sum() == 0
    assert network.head_dist.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224"])
def test_a_student_of_timm_learns_with_both_heads_if_it_has_two(name: str) -> None:
    recipe = load_recipe(overrides=[("distill.teacher", "levit_nano_32")])
    one = timm.create_model(name, num_classes=3, depth=1).train()
    distillation.untrained_teacher(recipe, one, 3, CPU)
    logits = one(torch.zeros(2, 3, 224, 224))
    assert isinstance(logits, tuple) == ("distilled" in name)


@pytest.mark.parametrize(
    ("teacher_", "classes", "settings", "message"),
    [
        ("", ["a", "b"], {}, r"must have the classes of the dataset; .* has 3, the dataset 2"),
        ("", ["red", "green", "blue"], {}, r"in the same order; class 0 of .* is 'blue', of the dataset 'red'"),
        ("", list(COLOURS), {"train_mode": "eval"}, "only in training mode; got train_mode eval"),
        ("..", ["a", "b"], {}, "a model name or a model directory; .* is neither"),
        ("regnety_16", ["a", "b"], {}, r"Unknown model 'regnety_16'\. Nearest: "),
    ],
    ids=["other classes", "another order", "two heads in evaluation mode", "no model", "no name"],
)
def test_what_is_no_teacher(teacher_: str, classes: list[str], settings: Any, message: str, teacher: Path) -> None:
    name = teacher_ if teacher_.startswith("regnety") else teacher / teacher_
    with pytest.raises((UsageError, CheckpointError), match=message):
        opened(name, classes, **settings)


@pytest.mark.parametrize("names", [["9", "10"], ["0", "1", "10"], ["a", "b"]])
def test_a_teacher_without_names_has_the_order_of_the_dataset(names: list[str], tmp_path: Path) -> None:
    """Numbered classes are in the order of their values in every dataset, as those of the teacher."""
    for name in sorted(names):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (8, 8), (100 * index, len(name), 9)).save(tmp_path / "data" / name / f"{index}.png")
    assert open_data(tmp_path / "data").classes == names
    opened(save_model_dir(student(len(names)), tmp_path / "teacher"), names)
