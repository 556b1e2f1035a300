"""The teacher: whoever can be one, who cannot and why, and answers that are asked for once."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import weft
from tests.helpers import lively
from tests.train.conftest import COLOURS, SHORT
from weft.checkpoints import save_model_dir
from weft.data import open_data
from weft.errors import CheckpointError, UsageError
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.recipes import load_recipe
from weft.train import RunResult, distillation, train
from weft.train.distillation import Teacher, has_fixed_inputs, open_teacher
from weft.train.objective import Objective

CPU = Runtime.of("cpu")
FIXED = {"augment.crop": "none", "augment.hflip": False, "augment.color_jitter": 0}


def student(name: str = "levit_nano_32", classes: int = 3, **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return weft.create_model(name, num_classes=classes, **more)


@pytest.mark.slow_except("soft-levit_nano_32")
@pytest.mark.parametrize("name", ["levit_nano_32", "ceit_nano_32", "cvt_nano_32"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_every_student_learns_from_a_run(
    name: str, kind: str, trained: RunResult, photos: Path, tmp_path: Path
) -> None:
    settings = {"distill.teacher": str(trained.out), "distill.kind": kind, "augment.mixup": 0.8}
    result = train(photos, out=tmp_path / "run", settings=settings, **{**SHORT, "model": name, "epochs": 1})
    assert result.epochs == 1


@pytest.mark.slow
def test_the_teacher_teaches(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    """With alpha 1 the labels are not looked at: what the student knows, it knows from the teacher."""
    settings = {"distill.teacher": str(trained.out / "best"), "distill.alpha": 1.0, "optim.lr": 2e-3, **FIXED}
    wrong = tmp_path / "wrong"
    names = list(COLOURS)
    for place, name in enumerate(names):
        (wrong / name).mkdir(parents=True)
        for file in (photos / names[(place + 1) % 3]).iterdir():
            (wrong / name / file.name).write_bytes(file.read_bytes())
    result = train(wrong, out=tmp_path / "run", settings=settings, **{**SHORT, "epochs": 8})
    last = (result.out / "metrics.csv").read_text().splitlines()[-1].split(",")
    assert float(last[6]) < 20  # of labels that are all wrong


def test_any_timm_model_may_teach(monkeypatch: pytest.MonkeyPatch, photos: Path, tmp_path: Path) -> None:
    asked = []

    def local(name: str, *, pretrained: bool) -> torch.nn.Module:
        asked.append((name, pretrained))
        return timm.create_model(name, num_classes=3)

    monkeypatch.setattr(distillation, "create_model", local)
    settings = {"distill.teacher": "resnet10t"}
    train(photos, out=tmp_path / "run", settings=settings, **{**SHORT, "epochs": 1})
    assert asked == [("resnet10t", True)]


def test_it_sees_the_same_pixels_as_it_wants_them() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()  # mean and deviation 0.5, one size
    teacher = Teacher(model, preprocessing(student()), CPU)
    mean, std = (torch.tensor(preprocessing(student())[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    images = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(teacher((images - mean) / std), model((images - 0.5) / 0.5), atol=1e-4, rtol=1e-4)
    assert teacher(torch.rand(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("key", ["mean", "std"])
def test_one_difference_in_normalisation_is_enough(key: str) -> None:
    model = lively("ceit_nano_32", num_classes=3).eval()
    own = preprocessing(model)
    theirs = {**own, key: (0.3, 0.4, 0.2)}
    mean, std, own_mean, own_std = (
        torch.tensor(cfg[name]).view(1, 3, 1, 1) for cfg in (theirs, own) for name in ("mean", "std")
    )
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = model((pixels - own_mean) / own_std)
    torch.testing.assert_close(Teacher(model, theirs, CPU)((pixels - mean) / std), expected, atol=1e-4, rtol=1e-4)


def test_of_two_heads_one_learns_from_the_teacher(tmp_path: Path) -> None:
    save_model_dir(student(), tmp_path / "teacher")
    overrides = {"distill.teacher": str(tmp_path / "teacher"), "distill.alpha": 1.0}
    recipe, network = load_recipe(overrides=overrides.items()), student()
    images = torch.randn(4, 3, 32, 32)
    answers = open_teacher(recipe, network, ["a", "b", "c"], CPU)(images)
    Objective(recipe)(network.train()(images), torch.eye(3)[[0, 1, 2, 0]], answers).backward()
    learned = {head: head.linear.weight.grad.abs().sum() > 0 for head in (network.head, network.head_dist)}
    assert learned == {network.head: False, network.head_dist: True}


def test_answers_that_cannot_change_are_asked_for_once(
    trained: RunResult, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    call = Teacher.__call__

    def counted(self: Teacher, images: torch.Tensor, keys: object = ()) -> torch.Tensor:
        asked.append(self.cached_logits is None)
        return call(self, images, keys)

    monkeypatch.setattr(Teacher, "__call__", counted)
    losses = []
    for cache in (True, False):
        asked.clear()
        settings = {"distill.teacher": str(trained.out), "distill.cache": cache, **FIXED}
        out = tmp_path / f"cache{cache}"
        train(photos, out=out, settings=settings, **SHORT)
        assert asked.count(True) == 1 + (3 if cache else 6)  # rehearsal; 36 images by 12: once, or in both epochs
        losses.append([float(line.split(",")[3]) for line in (out / "steps.csv").read_text().splitlines()[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_makes_answers_change() -> None:
    fixed = load_recipe(overrides=FIXED.items())
    assert has_fixed_inputs(fixed)
    varied = {"crop": "shift", "hflip": True, "color_jitter": 0.1, "mixup": 0.8, "cutmix": 1, "erase_prob": 0.1}
    for key, value in [*varied.items(), ("rand_augment", "rand-m9")]:
        assert not has_fixed_inputs(load_recipe(overrides=[*FIXED.items(), (f"augment.{key}", value)])), key


def opened(teacher: str, classes: list[str], **settings: object) -> None:
    recipe = load_recipe(overrides=[("distill.teacher", teacher), *settings.items()])
    open_teacher(recipe, student(classes=len(classes)), classes, CPU)


def test_a_teacher_of_other_classes_is_refused(trained: RunResult, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must have the classes of the dataset; .* has 3, the dataset 2"):
        opened(str(trained.out), ["a", "b"])
    with pytest.raises(UsageError, match=r"in the same order; class 0 of .* is 'blue', of the dataset 'red'"):
        opened(str(trained.out), ["red", "green", "blue"])
    save_model_dir(student(), tmp_path / "nameless")
    opened(str(tmp_path / "nameless"), ["red", "green", "blue"])


def test_what_is_no_teacher(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a model name or a model directory; .* is neither"):
        opened(str(tmp_path), ["a", "b"])
    with pytest.raises(UsageError, match=r"Unknown model 'regnety_16'\. Nearest: "):
        opened("regnety_16", ["a", "b"])


def test_two_heads_answer_in_training_only(trained: RunResult) -> None:
    with pytest.raises(UsageError, match=r"only in training mode; got train_mode eval"):
        opened(str(trained.out), list(COLOURS), train_mode="eval")


def test_a_teacher_is_refused_before_anything_is_written(trained: RunResult, tmp_path: Path) -> None:
    settings = {"distill.teacher": str(trained.out)}
    with pytest.raises(UsageError, match="has 3, the dataset 10"):
        train("digits", out=tmp_path / "run", settings=settings, quiet=True)
    assert not (tmp_path / "run").exists()
    assert open_data("digits").classes[0] == "0"


@pytest.mark.parametrize("names", [["9", "10"], ["0", "1", "10"], ["a", "b"]])
def test_a_teacher_without_names_has_the_order_of_the_dataset(names: list[str], tmp_path: Path) -> None:
    """Numbered classes are in the order of their values in every dataset, as those of the teacher."""
    for name in sorted(names):
        for index in range(2):
            (tmp_path / "data" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (100 * index, len(name), 9)).save(tmp_path / "data" / name / f"{index}.png")
    assert open_data(tmp_path / "data").classes == names
    teacher = save_model_dir(student(classes=len(names)), tmp_path / "teacher")
    opened(str(teacher), names)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224"])
def test_a_student_of_timm_learns_with_both_heads_if_it_has_two(name: str) -> None:
    recipe = load_recipe(overrides=[("distill.teacher", "levit_nano_32")])
    one = timm.create_model(name, num_classes=3, depth=1).train()
    distillation.untrained_teacher(recipe, one, 3, CPU)
    logits = one(torch.zeros(2, 3, 224, 224))
    assert isinstance(logits, tuple) == ("distilled" in name)
