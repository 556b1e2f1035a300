"""`weft reproduce`: rows of the papers' tables, what weft can do about them, and one row done."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import weft
from tests.helpers import enliven, lively, put_in_cache
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.errors import CheckpointError, DataError, UsageError
from weft.models.building import build_described
from weft.models.families import VARIANTS
from weft.models.papers import TABLES, Printed, rows_of
from weft.recipes import load_recipe
from weft.study.reproduce import (
    evaluate_row,
    paper_studies,
    papers,
    plan_row,
    recipe_of_row,
    train_row,
    training_speed,
    with_speed,
)
from weft.train import evaluate

EVERY_ROW = [
    pytest.param(table, row, id=f"{row.paper}-{row.table}-{row.model}") for p in papers() for table, row in rows_of(p)
]
TRAINED = list(
    {
        (row.recipe, row.builds): pytest.param(row, id=f"{row.recipe}-{row.builds}")
        for _, row in (row for p in papers() for row in rows_of(p))
        if row.recipe
    }.values()
)


def row_of(paper: str, name: str, table: str = TABLES[0]) -> Printed:
    return next(row for found, row in rows_of(paper, name) if found == table)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache, and no connection to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("WEFT_DATA", raising=False)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "weft"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with ImageNet's number of classes, and one small image in each."""
    folder = tmp_path_factory.mktemp("imagenet")
    for number in range(1000):
        (folder / f"n{number:08}").mkdir()
        color = (number % 256, 7 * number % 256, 31 * number % 256)
        Image.new("RGB", (8, 8), color).save(folder / f"n{number:08}" / "image.png")
    return folder


@pytest.mark.parametrize(("table", "row"), EVERY_ROW)
def test_every_row_has_an_action_or_a_reason(table: str, row: Printed, cache: Path) -> None:
    plan = plan_row(table, row)
    assert (plan.training is None) == bool(plan.obstacle)
    assert (plan.count is None) == (not row.builds)
    if plan.evaluation:
        assert plan.evaluation.top1 == row.top1
        if "own" not in row.weights:
            repo = row.weights.split()[0]
            assert row.builds.replace("_", "-") in repo.replace("_", "-")
    if plan.training:
        assert plan.training.images > 0


@pytest.mark.parametrize("row", TRAINED)
def test_every_recipe_builds_the_network_of_its_row(row: Printed) -> None:
    name, settings = recipe_of_row(row)
    recipe = load_recipe(name, settings.items())
    arguments = dict(recipe.model_args)
    if recipe.img_size is not None and row.builds in VARIANTS:
        arguments["img_size"] = recipe.img_size
    with torch.device("meta"):
        model: Any = build_described(str(recipe.model), arguments)
    assert model.pretrained_cfg["input_size"][1] == row.size


def test_counts_are_compared_as_printed() -> None:
    count = plan_row(TABLES[0], row_of("levit", "LeViT-128S")).count
    assert count is not None
    assert (count.params_percent, count.macs_percent) == (0, 0)
    count = plan_row(TABLES[0], row_of("ceit", "ceit-t")).count
    assert count is not None
    assert count.params_percent == 0
    assert count.macs_percent == pytest.approx(100 * (1.395307008 / 1.2 - 1))


def test_the_list(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "levit"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[1].split() == "3 LeViT-128S 224 76.6 equal download levit_pretrain, 1000 epochs -".split()
    nas = next(line for line in lines if "CvT-13-NAS" in line)
    assert nas.endswith("its configuration was never published")
    assert any(line.startswith("weft study levit-ablation") for line in lines)
    assert "ImageNet: not found; pass --data IMAGENET." in out
    assert main(["reproduce", "cvt", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    large = next(row for row in result["rows"] if row["model"] == "CvT-W24 384 (22k)")
    assert large["training"] is None
    assert large["obstacle"] == "the training on ImageNet-22k is not published"
    assert large["evaluation"]["weights"] == "microsoft/cvt-w24-384-22k"
    studies = {study["name"]: study for study in result["studies"]}
    assert studies["cvt-kv-stride"] == {
        "name": "cvt-kv-stride",
        "title": "The cost of fewer keys and values",
        "variants": 2,
        "command": "weft study cvt-kv-stride",
    }


def test_studies_of_a_paper() -> None:
    of_cvt = ["cvt-embedding", "cvt-kv-stride", "cvt-position", "cvt-projection", "finetune-384", "transfer"]
    assert list(paper_studies("cvt")) == of_cvt
    assert list(paper_studies("deit")) == ["distillation"]
    assert {"ceit-i2t", "finetune-384", "transfer"} < paper_studies("ceit").keys()


def test_details_of_a_row(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.study.reproduce.time_step", lambda recipe, size, *args, **more: size / 100)
    assert main(["reproduce", "levit", "--row", "levit-256", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == "Measuring training steps of LeViT-256 (levit_pretrain).\n"
    for text in (
        "LeViT-256 (LeViT, table 3), 224 pixels",
        "parameters 18.894 M (paper: 18.9 M), multiply-adds 1.127 G (paper: 1.12 G): MACs +0.6%",
        "weft reproduce levit --row LeViT-256 --data IMAGENET --run",
        "expected top-1 81.6 %; weights: timm/levit_256.fb_dist_in1k, downloaded on first use; ImageNet: not found",
        "weft train imagenet --recipe levit_pretrain --model levit_256",
        "1000 epochs, batch 8192, 1,281 M images",
        "about 3,600 hours (150 days) on this cpu: 100.0 images/s, measured at batch 8, without loading images",
        "paper: 3 to 5 days on 32 GPUs",
    ):
        assert text in out


def test_transfer_and_finetuning_rows(cache: Path) -> None:
    plan = plan_row("transfer", row_of("ceit", "CeiT-S 384", "transfer")).training
    assert plan is not None
    assert plan.datasets == ("inat18", "inat19", "cars", "flowers", "pets", "cifar10", "cifar100")
    assert plan.images == 100 * (437_513 + 265_240 + 8_144 + 2_040 + 3_680 + 50_000 + 50_000)
    plan = plan_row(TABLES[0], row_of("cvt", "CvT-21 384"), "data/imagenet").training
    assert plan is not None
    assert (plan.steps, plan.epochs, plan.images, plan.is_finetuning) == (20_000, None, 20_000 * 512, True)
    command = "weft train data/imagenet --recipe cvt_finetune_imagenet --model cvt_21 --from WEIGHTS"
    assert plan.command == command
    plan = plan_row(TABLES[0], row_of("levit", "DeiT-Tiny distilled 1000 epochs")).training
    assert plan is not None
    assert plan.command.endswith("--model deit_tiny_distilled_patch16_224 --epochs 1000")
    for row in (row for _, row in rows_of("levit") if row.table == "1"):
        grafted = plan_row(TABLES[0], row).training
        assert grafted is not None
        assert grafted.command.endswith(f"--model {row.builds} --set model_args.distilled=false")


def test_public_weights_from_the_cache(cache: Path, imagenet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = row_of("levit", "LeViT-128S")
    published = enliven(timm.create_model("levit_128s")).eval()
    put_in_cache(cache, "timm/levit_128s.fb_dist_in1k", "model.safetensors", published.state_dict())
    plan = plan_row(TABLES[0], row).evaluation
    assert plan is not None
    assert plan.status == "cached"
    command = ["reproduce", "levit", "--row", row.model, "--data", str(imagenet), "--run", "--limit", "20"]
    assert main([*command, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    model = weft.create_model("levit_128s", pretrained=True)
    folder = save_model_dir(model, cache.parent / "model")
    expected = evaluate(folder, imagenet, limit=20, quiet=True)
    assert result["action"] == "evaluate"
    assert (result["images"], result["top1"]) == (expected.count, expected.top1)
    assert result["difference"] == pytest.approx(expected.top1 - 76.6)
    assert result["low"] <= result["top1"] <= result["high"]
    assert main([*command, "--weights", str(folder)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith(f"top-1 {expected.top1:.2f} % (95 % interval ")
    assert out[2] == f"paper 76.6 %, difference {expected.top1 - 76.6:+.2f} points"


def test_a_file_of_weights(cache: Path, imagenet: Path) -> None:
    row = row_of("levit", "LeViT-128S")
    save_file(lively("levit_128s").state_dict(), cache.parent / "weights.safetensors")
    result = evaluate_row(row, imagenet, weights=cache.parent / "weights.safetensors", limit=4, quiet=True)
    assert result.weights.endswith("weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weft cannot download the weights of CeiT-T: one archive for all CeiT"):
        evaluate_row(row_of("ceit", "CeiT-T"), imagenet)
    with pytest.raises(UsageError, match=r"EfficientNet B0 must have public weights; weft knows none"):
        evaluate_row(row_of("levit", "EfficientNet B0"), imagenet)
    with pytest.raises(UsageError, match=r"CvT-13-NAS must be a network that weft or timm has; its configuration was"):
        evaluate_row(row_of("cvt", "CvT-13-NAS"), imagenet)


def test_the_weights_of_a_row_are_of_its_network(imagenet: Path, tmp_path: Path) -> None:
    for name, paper, row, message in (
        (
            "levit_128s",
            "levit",
            "LeViT-256",
            r"LeViT-256 must be of levit_256 at 224 pixels; .* has levit_128s at 224 ",
        ),
        ("cvt_13", "cvt", "CvT-13 384", r"CvT-13 384 must be of cvt_13 at 384 pixels; .* has cvt_13 at 224 pixels\."),
    ):
        folder = save_model_dir(lively(name), tmp_path / name)
        with pytest.raises(UsageError, match=message):
            evaluate_row(row_of(paper, row), imagenet, weights=folder, limit=1, quiet=True)


@pytest.mark.slow
def test_weights_at_another_size(cache: Path, imagenet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CvT-13 at 384 pixels is the network at 224 with other weights, and resizes images without a crop."""
    transformers = pytest.importorskip("transformers")
    published = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000))).eval()
    put_in_cache(cache, "microsoft/cvt-13-384", "pytorch_model.bin", published.state_dict())
    seen: list[dict[str, Any]] = []

    def looked_at(model: Path, *args: Any, **more: Any) -> Any:
        seen.append(json.loads((model / "config.json").read_text()))
        return evaluate(model, *args, **more)

    monkeypatch.setattr("weft.study.reproduce.evaluate", looked_at)
    result = evaluate_row(row_of("cvt", "CvT-13 384"), imagenet, limit=2, quiet=True)
    assert result.weights == "microsoft/cvt-13-384"
    cfg = seen[0]["pretrained_cfg"]
    assert (cfg["input_size"], cfg["crop_pct"], cfg["crop_mode"]) == ([3, 384, 384], 1.0, "squash")


def test_without_weights_or_data_the_network_is_counted(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "levit", "--row", "LeViT-128S", "--run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "model": "LeViT-128S",
        "action": "count",
        "reason": "no ImageNet; pass --data IMAGENET",
        "params": 7_777_058,
        "macs": 304_660_832,
        "params_m": 7.8,
        "macs_g": 0.305,
    }
    assert err == "Counted, not evaluated: no ImageNet; pass --data IMAGENET.\n"
    assert main(["reproduce", "ceit", "--row", "CeiT-T", "--run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("parameters 6.357 M (paper: 6.4 M), multiply-adds 1.395 G (paper: 1.2 G): MACs +16.3%")
    assert err == "Counted, not evaluated: no public weights; pass --weights FILE.\n"


def test_training_speed_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(None, [("model", "levit_nano_32"), ("batch_size", 4), ("distill.teacher", "resnet10t")])
    speed = training_speed(recipe, 7200, "cpu", num_classes=10)
    assert (speed.device, speed.batch_size) == ("cpu", 4)
    assert speed.images_per_second > 0
    assert speed.hours == pytest.approx(2 / speed.images_per_second)
    tried = []

    def too_large(recipe: object, size: int, *args: object, with_teacher: bool) -> float:
        tried.append(size)
        return float("inf")

    monkeypatch.setattr("weft.study.reproduce.time_step", too_large)
    plan = plan_row(TABLES[0], row_of("levit", "LeViT-256"))
    with pytest.raises(UsageError, match=r"levit_256 needs more memory for a training step of 2 images on this cpu"):
        with_speed(plan, "cpu")
    assert tried == [8, 4, 2]


def test_training_gets_the_recipe_of_the_row(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()

    def train(data: Any, **arguments: Any) -> Any:
        calls.append((data, arguments))
        return SimpleNamespace(top1=12.5, count=8, out=Path(arguments["out"]))

    monkeypatch.setattr("weft.train.train", train)
    words = ["reproduce", "ceit", "--row", "CeiT-B, 150 epochs", "--data", "photos", "--run", "--train"]
    assert main([*words, "--set", "optim.lr=1e-3", "--batch-size", "8"]) == 0
    data, arguments = calls[0]
    assert (data, arguments["recipe"], arguments["start_from"]) == ("photos", "ceit_base_pretrain", None)
    assert arguments["settings"] == {
        "model": "ceit_base_patch16_224",
        "epochs": "150",
        "optim.lr": "1e-3",
        "batch_size": "8",
    }
    assert arguments["out"] == "runs/reproduce-ceit-ceit-b-150-epochs"
    assert capsys.readouterr().out.startswith("CeiT-B, 150 epochs: top-1 12.50 % of 8 images; paper: 82.5 %")
    with pytest.raises(UsageError, match=r"CeiT-T 384 is fine-tuned from trained weights; got none"):
        train_row(row_of("ceit", "CeiT-T 384"), "photos")
    with pytest.raises(UsageError, match=r"EfficientNet B0 must have a recipe; weft has none"):
        train_row(row_of("levit", "EfficientNet B0"), "photos")


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["levitt"], "Unknown paper 'levitt'. Nearest: levit, ", UsageError.exit_code),
        (["levit", "--row", "LeViT-128Z"], "Unknown row of LeViT 'LeViT-128Z'. Nearest: LeViT-128, ", 2),
        (["levit", "--run"], "--run belongs to --row; got no --row.", UsageError.exit_code),
        (["levit", "--row", "LeViT-256", "--train"], "--train belongs to --run; got no --run.", 2),
        (["levit", "--row", "LeViT-256", "--run", "--train"], "--run needs ImageNet for this", DataError.exit_code),
        (["cvt", "--row", "CvT-13 (22k)", "--run"], "CvT-13 (22k) is only fine-tuned. Use weft train.", 2),
        (["cvt", "--row", "CvT-13-NAS", "--run"], "CvT-13-NAS must be a network that weft or timm has", 2),
    ],
)
def test_invalid_arguments(
    words: list[str], message: str, code: int, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Counted" not in err
