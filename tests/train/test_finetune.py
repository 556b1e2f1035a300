"""Starting from weights: of a run, a model directory, a file; other classes, another size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from tests.train.conftest import SHORT, paint
from weft.errors import CheckpointError, UsageError
from weft.recipes import load_recipe
from weft.train import RunResult, train

ONE = {**SHORT, "epochs": 1}
STILL = {"optim.lr": 1e-9, "schedule.warmup_lr": 0, "schedule.min_lr": 0, "optim.weight_decay": 0}


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "last" / "model.safetensors")


def body(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if not k.startswith("head") and "running" not in k and "num_b" not in k}


@pytest.mark.slow_except("best")
@pytest.mark.parametrize("part", ["", "best", "best/model.safetensors"])
def test_from_a_run_its_directory_or_its_file(part: str, trained: RunResult, photos: Path, tmp_path: Path) -> None:
    result = train(photos, start_from=trained.out / part, out=tmp_path / "run", settings=STILL, **ONE)
    best = load_file(trained.out / "best" / "model.safetensors")
    for name, value in body(weights(result.out)).items():
        torch.testing.assert_close(value, best[name], msg=name)
    assert result.top1 == 100


def test_without_a_model_it_is_that_of_the_run(
    trained: RunResult, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also its size and constructor values."""
    settings = {**STILL, "model_args.attn_bias": False, "model_args.pos_embed": True, "img_size": 48}
    first = train(photos, out=tmp_path / "first", settings=settings, **ONE)
    arguments = {name: value for name, value in {**ONE, "quiet": False}.items() if name not in ("model", "img_size")}
    result = train(photos, start_from=first.out, out=tmp_path / "run", settings=STILL, **arguments)
    assert f"Model {first.model}, that of {first.out}; another: --model NAME." in capsys.readouterr().err
    made, own = (load_recipe(path / "recipe.yaml") for path in (result.out, first.out))
    assert (made.model, made.img_size) == (own.model, own.img_size)
    assert (made.model_args["attn_bias"], made.model_args["pos_embed"]) == (False, True)
    for name, value in body(weights(result.out)).items():
        torch.testing.assert_close(value, load_file(first.out / "best" / "model.safetensors")[name], msg=name)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_recipe_with_public_weights_starts_from_the_run(
    is_named: bool, trained: RunResult, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {**ONE, "quiet": False, "recipe": "probe", "epochs": 0, "model": trained.model if is_named else None}
    result = train(photos, start_from=trained.out, out=tmp_path / "run", **arguments)
    printed = capsys.readouterr().err
    assert f"Weights from {trained.out / 'best' / 'model.safetensors'}" in printed
    assert "public weights" not in printed
    assert (f"Model {trained.model}, that of {trained.out}" in printed) == (not is_named)
    recipe = load_recipe(result.out / "recipe.yaml")
    assert (recipe.model, recipe.pretrained, recipe.head_init) == (trained.model, False, "probe")


def test_other_classes_get_a_new_head(trained: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paint(tmp_path / "photos", classes=("blue", "red"))
    settings = {**STILL, "name": "x"}
    arguments = {**ONE, "quiet": False}
    result = train(folder, start_from=trained.out, out=tmp_path / "run", settings=settings, **arguments)
    assert "except the head, which has other classes." in capsys.readouterr().err
    best = load_file(trained.out / "best" / "model.safetensors")
    for name, value in body(weights(result.out)).items():
        torch.testing.assert_close(value, best[name], msg=name)
    assert weights(result.out)["head.linear.weight"].shape[0] == 2


def test_as_many_classes_with_other_names_get_a_new_head(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    folder = paint(tmp_path / "photos")
    (folder / "blue").rename(folder / "azure")
    result = train(folder, start_from=trained.out, out=tmp_path / "run", settings=STILL, **ONE)
    best = load_file(trained.out / "best" / "model.safetensors")
    assert not torch.allclose(weights(result.out)["head.linear.weight"], best["head.linear.weight"])


@pytest.mark.slow_except("levit_nano_32")
@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_another_size_resizes_positions(name: str, photos: Path, tmp_path: Path) -> None:
    """As from 224 to 384 in the papers."""
    torch.manual_seed(1)
    small = weft.create_model(name, num_classes=3)
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    arguments = {**ONE, "model": name, "img_size": 48}
    result = train(photos, start_from=tmp_path / "small.safetensors", out=tmp_path / "run", settings=STILL, **arguments)
    large = weft.create_model(name, num_classes=3, img_size=48)
    weft.load_checkpoint(large, small.state_dict())
    for key, value in body(large.state_dict()).items():
        torch.testing.assert_close(weights(result.out)[key], value, msg=key)


def test_only_the_head_learns(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    settings = {"optim.freeze": "backbone"}
    result = train(photos, start_from=trained.out, out=tmp_path / "run", settings=settings, **ONE)
    best, now = load_file(trained.out / "best" / "model.safetensors"), weights(result.out)
    changed = {name for name in now if not torch.equal(now[name], best[name])}
    assert changed
    assert all(name.startswith("head") for name in changed), changed


def test_evaluation_mode_keeps_statistics(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    """The released way of fine-tuning."""
    settings = {"train_mode": "eval", "optim.lr": 1e-3}
    result = train(photos, start_from=trained.out, out=tmp_path / "run", settings=settings, **ONE)
    best, now = load_file(trained.out / "best" / "model.safetensors"), weights(result.out)
    for name in now:
        if "running" in name:
            assert torch.equal(now[name], best[name]), name
    assert not torch.equal(now["head.linear.weight"], best["head.linear.weight"])


def test_what_is_refused(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--from must name a run, .*; .*nowhere is none of these"):
        train(photos, start_from=tmp_path / "nowhere", out=tmp_path / "run", **ONE)
    with pytest.raises(CheckpointError, match="ceit"):
        train(photos, start_from=trained.out, out=tmp_path / "run", **{**ONE, "model": "ceit_nano_32"})
    with pytest.raises(UsageError, match=r"freeze: backbone needs trained weights"):
        train(photos, out=tmp_path / "run", settings={"optim.freeze": "backbone"}, **ONE)
    assert not (tmp_path / "run").exists()
