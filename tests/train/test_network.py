"""The network of a recipe: weights to start from, what of it learns, and synchronized BatchNorm."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import weft
from tests.helpers import enliven
from tests.train.conftest import COLOURS, SHORT
from tests.train.tiny import recipe_of
from weft.checkpoints import load_model_dir, save_model_dir
from weft.data import open_data
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.recipes import load_recipe
from weft.train import train
from weft.train.network import build_model, load_start_weights
from weft.train.plan import Plan, make_plan
from weft.train.request import Request

SMALL: dict[str, Any] = {"depth": [1, 1, 1], "attn_bias": False, "pos_embed": True}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a model of arguments and a size of its own."""
    torch.manual_seed(1)
    network = enliven(weft.create_model("levit_nano_32", num_classes=3, img_size=48, **SMALL))
    run = tmp_path_factory.mktemp("start") / "run"
    save_model_dir(network, run / "best", label_names=list(COLOURS))
    shutil.copy(run / "best" / "model.safetensors", run / "weights.safetensors")
    return run


def saved(run: Path, name: str = "best") -> dict[str, torch.Tensor]:
    return load_file(run / name / "model.safetensors")


def is_head(name: str) -> bool:
    return name.startswith("head")


@pytest.mark.parametrize(
    ("part", "classes"),
    [
        ("", list(COLOURS)),
        ("best", ["azure", "green", "red"]),
        ("best/model.safetensors", ["blue", "red"]),
        ("weights.safetensors", ["azure", "green", "red"]),
        ("weights.safetensors", ["blue", "red"]),
    ],
)
def test_a_run_its_model_directory_or_a_file_gives_the_weights(part: str, classes: list[str], start: Path) -> None:
    """A head for other classes is not loaded; without class names, one for another number of classes."""
    network: Any = weft.create_model("levit_nano_32", num_classes=len(classes), img_size=48, **SMALL)
    text = load_start_weights(network, start / part, classes)
    is_kept = classes == list(COLOURS) or (part == "weights.safetensors" and len(classes) == 3)
    assert ("except the head, which has other classes" in text) == (not is_kept)
    for name, value in network.state_dict().items():
        if is_kept or not is_head(name):
            torch.testing.assert_close(value, saved(start)[name], msg=name)
    if not is_kept and len(classes) == 3:
        assert not torch.equal(network.head.linear.weight, saved(start)["head.linear.weight"])


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_another_size_resizes_positions(name: str, tmp_path: Path) -> None:
    """As from 224 to 384 in the papers."""
    small, large, expected = (weft.create_model(name, num_classes=3, img_size=size) for size in (32, 48, 48))
    load_start_weights(large, save_model_dir(enliven(small), tmp_path / "small"))
    weft.load_checkpoint(expected, small.state_dict())
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(large.state_dict()[key], value, msg=key)


@pytest.mark.parametrize("model", [None, "levit_nano_32"])
def test_a_recipe_with_public_weights_starts_from_the_run_and_its_model(
    model: str | None, start: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a named model also with its size and arguments."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    settings = {} if model is None else {"img_size": 48, **{f"model_args.{key}": SMALL[key] for key in SMALL}}
    plan = make_plan(Request(photos, "probe", settings, {"start_from": str(start), "model": model, "device": "cpu"}))
    recipe, said = plan.recipe, list(plan.notes)
    assert (recipe.model, recipe.img_size, recipe.pretrained) == ("levit_nano_32", 48, False)
    assert {key: recipe.model_args[key] for key in SMALL} == SMALL
    plan.initialise(said.append)
    assert f"Weights from {start / 'best' / 'model.safetensors'}." in said
    assert not any("public weights" in text for text in said)
    assert (f"Model levit_nano_32, that of {start}; another: --model NAME." in said) == (model is None)
    for name, value in plan.network.state_dict().items():
        assert is_head(name) or torch.equal(value, saved(start)[name]), name


@pytest.mark.parametrize(
    ("setting", "stays"),
    [
        ({"optim.freeze": "backbone"}, lambda name: not is_head(name)),
        ({"train_mode": "eval", "optim.lr": 1e-3}, lambda name: "running" in name),  # the released way of fine-tuning
    ],
)
def test_what_is_frozen_stays(setting: dict[str, Any], stays: Any, start: Path, photos: Path, tmp_path: Path) -> None:
    arguments: Any = {**SHORT, "model": None, "epochs": 1}
    out = train(photos, start_from=start, out=tmp_path / "run", settings=setting, **arguments).out
    unchanged = {name for name, value in saved(out, "last").items() if torch.equal(value, saved(start)[name])}
    assert {name for name in saved(start) if stays(name)} <= unchanged
    assert "head.linear.weight" not in unchanged


def test_a_backbone_of_large_images_is_trained_at_224_pixels(tmp_path: Path) -> None:
    recipe = load_recipe(None, [("model", "vit_small_patch14_reg4_dinov2.lvd142m")])
    model: Any = build_model(recipe, 3)
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 3)
    save_model_dir(model, tmp_path / "model", label_names=["a", "b", "c"])
    assert load_model_dir(tmp_path / "model")[0].pretrained_cfg["input_size"] == (3, 224, 224)
    other: Any = build_model(dataclasses.replace(recipe, img_size=280), 3)
    assert other.pretrained_cfg["input_size"] == (3, 280, 280)


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "levit_nano_32", "resnet10t"])
def test_synchronized_batchnorm_computes_the_same(name: str, photos: Path) -> None:
    """tf_efficientnet_lite0 is the default network without a connection; its BatchNorm has the activation inside."""
    recipe, two = recipe_of(model=name, batch_size=4, sync_bn=True), Runtime(torch.device("cpu"), "fp32", world=2)
    plan = Plan(recipe, open_data(photos), two)
    before, after = (enliven(dataclasses.replace(plan, runtime=own).network).eval() for own in (two.alone(), two))
    batchnorm = [module for module in after.modules() if isinstance(module, _BatchNorm)]
    assert batchnorm
    assert all(isinstance(module, nn.SyncBatchNorm) for module in batchnorm)
    assert after.state_dict().keys() == before.state_dict().keys()
    images = torch.randn(2, *preprocessing(before)["input_size"])
    with torch.no_grad():
        assert torch.equal(after(images), before(images))
