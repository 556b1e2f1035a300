"""What is decided for a person, and that it is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.models.families import default_model
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import default_recipe, overrides_of
from weft.train.decisions import Case, fill_in, whole_batches
from weft.train.request import Request


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
    assert Request.of("photos", None, {"epochs": 3}, {"batch_size": None}).leaves_batch_size
    assert not Request.of("photos", "finetune", None, {}).leaves_batch_size
    assert not Request.of("photos", None, {"batch_size": 64}, {}).leaves_batch_size
    assert not Request.of("photos", None, {}, {"batch_size": 64}).leaves_batch_size
    assert not Request.of("digits", None, {}, {}).leaves_batch_size


def test_few_images_are_all_used() -> None:
    recipe, note = whole_batches(Recipe(), Case(num_images=157))
    assert recipe == Recipe(batch_size=52)
    assert note == ("Batch size 52: an epoch uses 156 of 157 training images; with 64, 128. Another: --batch-size N.")
    recipe, note = whole_batches(Recipe(), Case(Request.of("photos", None, {"batch_size": 64}, {}), num_images=157))
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
