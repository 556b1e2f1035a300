"""The recipes that come with weft: each parses, builds its model, and says what its source says."""

from __future__ import annotations

import csv
import re
import runpy
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from weft.checkpoints.hub import create_model
from weft.recipes import Recipe, dump, load_recipe, recipe_names, recipe_text, settings
from weft.recipes.load import KEYS
from weft.train.schedule import peak_lr

ROOT = Path(__file__).parents[2]
HEAD = ("source:", "run:", "cost:", "reached:")
DEIT = {  # DeiT, table 9; the defaults of the released main.py of DeiT, CeiT and LeViT
    "augment.crop": "resized", "augment.scale": (0.08, 1.0), "augment.ratio": (3 / 4, 4 / 3), "augment.hflip": True,
    "augment.color_jitter": 0.0, "augment.rand_augment": "rand-m9-mstd0.5-inc1", "augment.erase_prob": 0.25,
    "augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.mix_prob": 1.0, "augment.mix_switch": 0.5,
    "loss.label_smoothing": 0.1,
}  # fmt: skip
ADAMW = {"optim.opt": "adamw", "optim.eps": 1e-8, "optim.momentum": 0.9, "optim.beta2": 0.999}
COSINE = {"schedule.kind": "cosine", "schedule.warmup_lr": 1e-6, "schedule.min_lr": 1e-5, "schedule.warmup_epochs": 5}
LEVIT = {**DEIT, **ADAMW, **COSINE, "augment.repeats": 3, "optim.weight_decay": 0.025, "optim.clip_grad": 0.01}
LEVIT |= {"optim.clip_mode": "agc", "precision": "fp32", "evaluate_every": 20}
LEVIT |= {"distill.teacher": "regnety_160.deit_in1k", "distill.kind": "hard"}
LEVIT |= {"distill.alpha": 0.5, "distill.temperature": 1.0}
PRETRAIN = {**DEIT, **ADAMW, **COSINE, "augment.repeats": 3, "optim.weight_decay": 0.05, "optim.clip_grad": 0}
PRETRAIN |= {"batch_size": 1024, "lr": 1e-3, "model_args.drop_path_rate": 0.1}
CVT = {**DEIT, **ADAMW, **COSINE, "augment.repeats": 1, "optim.clip_grad": 0, "epochs": 300}
CVT |= {"model_args.drop_path_rate": 0.1}
CVT_SGD = {"optim.opt": "sgd", "optim.momentum": 0.9, "batch_size": 512, "img_size": 384, "augment.crop": "cut"}
CVT_SGD |= {"lr": 3e-3, "optim.weight_decay": 0, "schedule.warmup_epochs": 0, "optim.clip_grad": 1}

STATED: dict[str, dict[str, Any]] = {
    "ceit_pretrain": {**PRETRAIN, "epochs": 300},
    "ceit_base_pretrain": {**PRETRAIN, "epochs": 100},
    "ceit_finetune_384": {
        **DEIT, **ADAMW, "epochs": 30, "batch_size": 1024, "lr": 5e-6, "schedule.kind": "constant",
        "schedule.warmup_epochs": 0, "optim.weight_decay": 1e-8, "augment.repeats": 3, "train_mode": "train",
    },
    "ceit_transfer": {
        **DEIT, **ADAMW, "epochs": 100, "batch_size": 512, "lr": 5e-4, "schedule.kind": "cosine",
        "schedule.warmup_epochs": 2, "optim.weight_decay": 1e-8, "augment.repeats": 1,
    },
    "cvt_13_pretrain": {**CVT, "batch_size": 2048, "lr": 2e-3, "optim.weight_decay": 0.05},
    "cvt_21_pretrain": {**CVT, "batch_size": 2048, "lr": 2e-3, "optim.weight_decay": 0.1},
    "cvt_w24_384": {
        **CVT, "batch_size": 1024, "lr": 1e-3, "optim.weight_decay": 0.1, "model_args.drop_path_rate": 0.3,
        "img_size": 384,
    },
    "cvt_finetune_imagenet": {**CVT_SGD, "steps": 20_000},
    "cvt_finetune_cifar": {**CVT_SGD, "steps": 10_000},
    "cvt_finetune_small": {**CVT_SGD, "steps": 500},
    "levit_pretrain": {**LEVIT, "epochs": 1000, "batch_size": 8192, "lr": 8e-3},
    "levit_ablation": {**LEVIT, "epochs": 100, "batch_size": 2048, "lr": 2e-3, "model": "levit_128s"},
    "deit_pretrain": {**PRETRAIN, "epochs": 300},
    "deit_distilled": {**PRETRAIN, "epochs": 300, "distill.teacher": "regnety_160.deit_in1k", "distill.kind": "hard"},
    "deit_finetune_384": {
        **DEIT, **ADAMW, "schedule.warmup_epochs": 0, "optim.clip_grad": 0, "epochs": 30, "batch_size": 512, "lr": 5e-6,
        "schedule.min_lr": 5e-6, "optim.weight_decay": 1e-8,
        "augment.repeats": 3,
    },
}  # fmt: skip


def value_of(recipe: Recipe, key: str) -> Any:
    if key == "lr":
        return peak_lr(recipe)
    section, _, name = key.rpartition(".")
    if section == "model_args":
        return recipe.model_args[name]
    return attrgetter(key)(recipe)


@pytest.mark.parametrize("name", STATED)
def test_it_says_what_its_source_says(name: str) -> None:
    recipe = load_recipe(name)
    for key, stated in STATED[name].items():
        assert value_of(recipe, key) == pytest.approx(stated), key


def test_every_paper_recipe_is_in_the_table() -> None:
    assert set(STATED) == {name for name in recipe_names() if name.split("_")[0] in ("ceit", "cvt", "levit", "deit")}


@pytest.mark.parametrize("name", recipe_names())
def test_it_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.model is not None
    with torch.device("meta"):
        model = create_model(recipe.model, num_classes=10, device="meta", **recipe.model_args)
    if recipe.distill.teacher is not None:
        assert model.head_dist is not None


@pytest.mark.parametrize("name", recipe_names())
def test_it_holds_only_differences(name: str) -> None:
    recipe, default = load_recipe(name), Recipe()
    written = yaml.safe_load(recipe_text(name))
    keys = [
        f"{section}.{key}" if f"{section}.{key}" in KEYS else section
        for section, values in written.items()
        for key in (values if isinstance(values, dict) else [""])
    ]
    for key in keys:
        assert value_of(recipe, key) != value_of(default, key), f"{key} is the default"


@pytest.mark.parametrize("name", recipe_names())
def test_its_head_says_where_it_is_from(name: str) -> None:
    lines = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    for field in HEAD:
        assert any(line.startswith(f"# {field}") for line in lines), field
    run = next(line for line in lines if line.startswith("# run:"))
    assert f"--recipe {name}" in run or name == "digits"
    for file in re.findall(r"benchmarks/\S+\.csv", recipe_text(name)):
        assert (ROOT / file).is_file(), file  # no number of ours without a file behind it
    for option in re.findall(r"--set (\S+?)=([^\s;,]+)", " ".join(lines)):
        load_recipe(name, [option])  # what a comment offers can be set


def test_the_page_names_every_recipe_and_every_key() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    for name in recipe_names():
        assert f"`{name}`" in page, name
    pages = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    written = pages["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == written, "run: python docs/settings.py"
    for table in ("models.md", "recipes.md"):
        assert (ROOT / "docs" / table).read_text() == pages["with_table"](table), "run: python docs/settings.py"
    assert all(f"\n### `{row.key}`\n" in written and row.help for row in settings())


def test_cifar10_is_what_was_measured() -> None:
    """The recipe, resolved, is the record of the run whose accuracy its head tells."""
    output = recipe_text("cifar10")
    record = ROOT / re.search(r"benchmarks/cifar10/[\w-]*mixed", output)[0]  # type: ignore[index]
    run = yaml.safe_load(record.with_suffix(".yaml").read_text())
    recipe = yaml.safe_load(dump(load_recipe("cifar10")))

    def of_run(key: str) -> object:
        """The setting; of a section, those that existed when the run was made."""
        now = recipe[key]
        return {name: now[name] for name in run[key]} if isinstance(now, dict) else now

    assert (run["precision"], recipe["precision"]) == ("bf16", "auto")  # which is bf16 on the machine of the record
    kept = [key for key in run if key not in ("data", "environment", "precision", "workers")]
    assert {key: run[key] for key in kept} == {key: of_run(key) for key in kept}
    assert run["environment"]["processes"] == 2
    with record.with_suffix(".csv").open(newline="") as lines:
        best = max(float(row["val_top1"]) for row in csv.DictReader(lines) if row["val_top1"] != "nan")
    assert f"{best:.2f} %" in output
