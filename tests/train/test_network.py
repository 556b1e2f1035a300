"""The network of a recipe: weights to start from, what of it learns, and synchronized BatchNorm."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import FrozenBatchNormAct2d, create_norm, create_norm_act
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import weft
from tests.helpers import baselines, enliven
from tests.train.conftest import COLOURS, SHORT
from weft.checkpoints import save_model_dir
from weft.errors import CheckpointError, UsageError
from weft.train import train
from weft.train.network import load_start_weights, synchronized
from weft.train.plan import make_plan
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


def test_weights_that_do_not_fit_are_refused(start: Path, photos: Path, tmp_path: Path) -> None:
    for more, error, message in (
        ({"start_from": tmp_path / "nowhere"}, CheckpointError, "--from must name a run, .*nowhere is none of these"),
        ({"start_from": start, "model": "ceit_nano_32"}, CheckpointError, "ceit"),
        ({"settings": {"optim.freeze": "backbone"}}, UsageError, "freeze: backbone needs trained weights"),
        ({"settings": {"sync_bn": True}}, UsageError, "sync_bn needs GPUs; .* --set sync_bn=false"),
    ):
        with pytest.raises(error, match=message):
            train(photos, out=tmp_path / "run", **{**SHORT, **more})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


CHANNELS = 32
ON_CUDA = ("inplaceabn", "iabn")  # a package of its own
NORMS: dict[str, Callable[[int], nn.Module]] = {
    **{f"norm {name}": kind for name, kind in create_norm._NORM_MAP.items()},
    **{f"norm and act {name}": kind for name, kind in create_norm_act._NORM_ACT_MAP.items() if name not in ON_CUDA},
    "norm and act frozen": FrozenBatchNormAct2d,
}
IMAGES = {"1d": (4, CHANNELS), "2d": (4, CHANNELS, 5, 7), "last": (4, 5, 7, CHANNELS)}


def assert_same_outputs(network: nn.Module, images: torch.Tensor) -> None:
    """In evaluation mode, with norm layers far from the identity."""
    torch.manual_seed(0)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5) if name.endswith(("weight", "var")) else tensor.uniform_(-0.5, 0.5)
    after = synchronized(copy.deepcopy(network)).eval()
    left = [name for name, module in after.named_modules() if isinstance(module, _BatchNorm)]
    assert all(isinstance(after.get_submodule(name), nn.SyncBatchNorm) for name in left)
    assert after.state_dict().keys() == network.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(after(images), network.eval()(images))


@pytest.mark.parametrize("kind", NORMS)
def test_synchronized_norm_layers_compute_the_same(kind: str) -> None:
    layer = NORMS[kind](CHANNELS)
    name = type(layer).__name__
    is_last = name.startswith(("LayerNorm", "RmsNorm", "SimpleNorm")) and "2d" not in name
    shape = "last" if is_last else "1d" if name.endswith("1d") else "2d"
    assert_same_outputs(nn.Sequential(layer), torch.randn(IMAGES[shape]))


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "levit_128s", "resnet18"])
def test_synchronized_networks_compute_the_same(name: str) -> None:
    """tf_efficientnet_lite0 is the default network without a connection; its BatchNorm has the activation inside."""
    size = 224 if name.startswith("levit") else 32
    assert_same_outputs(timm.create_model(name, num_classes=4), torch.randn(2, 3, size, size))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(row["name"] for row in baselines()))
def test_every_baseline_computes_the_same(name: str) -> None:
    network = timm.create_model(name, num_classes=4)
    assert_same_outputs(network, torch.randn(1, *network.pretrained_cfg["input_size"]))
