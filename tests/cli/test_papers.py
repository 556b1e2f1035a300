"""`weft models --papers`: the rows of the papers with their commands; `weft evaluate` next to the paper's number."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from tests.helpers import enliven, put_in_cache
from weft.checkpoints.hub import load_public, printed_row
from weft.cli import main
from weft.cli.app import parse
from weft.cli.models import evaluate_command, train_command
from weft.cli.options import run_settings
from weft.models.building import build_described
from weft.models.families import VARIANTS
from weft.models.papers import TABLES, Printed, printed_rows
from weft.recipes import load_recipe

EVERY_ROW = [(table, row) for table in TABLES for row in printed_rows(table)]
TRAINED = {
    (row.recipe, row.builds): pytest.param(table, row, id=f"{row.recipe}-{row.builds}")
    for table, row in EVERY_ROW
    if row.recipe
}


def row_of(paper: str, model: str, table: str = TABLES[0]) -> Printed:
    return next(row for row in printed_rows(table) if (row.paper, row.model) == (paper, model))


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
        (folder / f"{number}").mkdir()
        color = (number % 256, 7 * number % 256, 31 * number % 256)
        Image.new("RGB", (8, 8), color).save(folder / f"{number}" / "image.png")
    return folder


def test_every_row_has_a_command_or_a_reason() -> None:
    for table, row in EVERY_ROW:
        assert bool(train_command(table, row)) == bool(row.recipe)
        assert row.builds or row.note, row
        if row.weights and "own" not in row.weights:
            assert row.builds.replace("_", "-") in row.weights.split()[0].replace("_", "-")


@pytest.mark.parametrize(("table", "row"), TRAINED.values())
def test_every_command_builds_the_network_of_its_row(table: str, row: Printed) -> None:
    given = parse(shlex.split(train_command(table, row))[1:])[1].arguments
    recipe = load_recipe(given.get("recipe"), run_settings(given.get("settings"), given.get("of_recipe")).items())
    assert recipe.model == row.builds
    arguments = dict(recipe.model_args)
    if recipe.img_size is not None and row.builds in VARIANTS:
        arguments["img_size"] = recipe.img_size
    with torch.device("meta"):
        model: Any = build_described(str(recipe.model), arguments)
    assert model.pretrained_cfg["input_size"][1] == row.size


@pytest.mark.parametrize(
    ("paper", "model", "evaluated", "trained"),
    [
        ("LeViT", "LeViT-128S", "levit_128s imagenet/", "imagenet --recipe levit_pretrain --model levit_128s"),
        (
            "CvT",
            "CvT-21 384",
            None,
            "imagenet --recipe cvt_finetune_imagenet --model cvt_21 --from WEIGHTS",
        ),
        ("DeiT", "DeiT-T", "deit_tiny_patch16_224.fb_in1k imagenet/", "imagenet --recipe deit_pretrain"),
        ("CeiT", "CeiT-B, 150 epochs", None, "imagenet --recipe ceit_base_pretrain --epochs 150"),
        ("LeViT", "EfficientNet B0", None, None),
    ],
)
def test_the_commands_of_a_row(paper: str, model: str, evaluated: str | None, trained: str | None) -> None:
    row = row_of(paper, model)
    assert evaluate_command(row) == (f"weft evaluate {evaluated}" if evaluated else "")
    command = train_command("imagenet", row)
    assert command.startswith(f"weft train {trained}") if trained else command == ""


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--papers", "ceit"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert sum(line[:3] == ["CeiT", "CeiT-T", "224"] for line in lines) == 2  # in both tables
    assert "one archive for all CeiT" in out
    assert "weft train DATA --recipe ceit_transfer" in out
    assert main(["models", "--papers", "cvt", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    large = next(row for row in rows if row["model"] == "CvT-W24 384 (22k)" and row["table_of"] == "imagenet")
    assert (large["evaluate"], large["train"]) == ("weft evaluate cvt_w24 imagenet/", "")
    assert large["obstacle"] == "the training on ImageNet-22k is not published"
    assert {row["table_of"] for row in rows} == set(TABLES)
    assert main(["models", "--papers", "cvt", "ceit", "--papers", "CvT*", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [row for row in both if row in rows] == rows
    assert any(row["paper"] == "CeiT" for row in both)


@pytest.mark.slow
def test_public_weights_are_evaluated_next_to_the_paper(
    cache: Path, imagenet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = enliven(timm.create_model("levit_128s")).eval()
    put_in_cache(cache, "timm/levit_128s.fb_dist_in1k", "model.safetensors", published.state_dict())
    assert main(["evaluate", "levit_128s", str(imagenet), "--quiet"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
    difference = float(lines["top-1"].split()[0]) - 76.6
    where = "on ImageNet's validation set (LeViT paper, Table 3)"
    reported = f"76.6 % {where}; measured here: {difference:+.2f} percentage points"
    assert lines["reported top-1"] == reported


def test_the_row_of_public_weights() -> None:
    names = ("levit_256", "deit_tiny_patch16_224", "deit_tiny_patch16_224.fb_in1k", "ceit_base_patch16_224")
    rows = [row for name in names if (row := printed_row(name))]
    assert [(row.paper, row.top1) for row in rows] == [
        ("LeViT", 81.6),
        ("DeiT", 72.2),
        ("DeiT", 72.2),
        ("CeiT", 81.9),
    ]
    assert printed_row("resnet50") is None
    assert printed_row("levit_nano_32") is None


def test_the_preprocessing_of_a_paper(cache: Path) -> None:
    published = timm.create_model("deit_tiny_patch16_224").eval()
    put_in_cache(cache, "timm/deit_tiny_patch16_224.fb_in1k", "model.safetensors", published.state_dict())
    assert load_public("deit_tiny_patch16_224")[0].pretrained_cfg["crop_pct"] == 0.875
