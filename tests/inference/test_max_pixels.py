"""One limit on the pixels of an image, `data.max_pixels`, under every verb: by its option, and by the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import weft
from tests.data.pictures import Whole
from tests.helpers import noise_images
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import BadImage, ImageDataset, open_data
from weft.data.source import image_size_hint
from weft.inference import Predictor, explain_files, predict

LIMIT = 1000
LARGE = "cat/large.png"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 900 pixels, and one of 1,600."""
    names = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(12)]
    folder = noise_images(tmp_path_factory.mktemp("data"), *names, size=(30, 30))
    return noise_images(folder, LARGE, size=(40, 40), seed=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as `train --max-pixels 1000` leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    model = weft.create_model("levit_nano_32", num_classes=2).eval()
    save_model_dir(model, folder / "best", label_names=["cat", "dog"])
    (folder / "recipe.yaml").write_text(f"model: levit_nano_32\ndata:\n  max_pixels: {LIMIT}\n")
    return folder


VERBS = {
    "data check": "data check DATA --strict",
    "predict": "predict MODEL DATA",
    "embed": "embed MODEL DATA --out OUT/x.npy",
    "similar": "similar MODEL DATA/cat/1.png DATA",
    "label": "label MODEL DATA",
    "explain": "explain MODEL DATA/cat/1.png DATA/cat/large.png --out OUT/x --no-grad-cam",
    "data review": "data review DATA --run MODEL",
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_the_limit(verb, photos: Path, run: Path, tmp_path: Path, monkeypatch, capsys: Capture) -> None:
    monkeypatch.setattr(explain_files, "_write", lambda *args: None)  # draws for seconds
    model = shutil.copytree(run / "best", tmp_path / "model")  # without the limit of the run
    words = VERBS[verb].replace("MODEL", str(model)).replace("DATA", str(photos)).replace("OUT", str(tmp_path))
    assert main(words.split()) == 0
    capsys.readouterr()
    assert main([*words.replace(f"{tmp_path}/x", f"{tmp_path}/y").split(), "--max-pixels", str(LIMIT)]) == 3
    shown = capsys.readouterr()
    assert LARGE in shown.err + shown.out
    assert "too many pixels (1600, the limit is 1000)" in shown.err or "1 too-many-pixels" in shown.out


def test_evaluate_and_prepare_leave_the_image_out(photos: Path, run: Path, tmp_path: Path, capsys: Capture) -> None:
    for limit, number in (((), 25), (("--max-pixels", str(LIMIT)), 24)):
        command = ["evaluate", str(run / "best"), str(photos), "--split", "all", "--json", "--quiet"]
        if limit:
            assert main([*command, *limit]) == 0
            assert json.loads(capsys.readouterr().out)["n"] == number
        assert main(["data", "prepare", str(photos), str(tmp_path / str(number)), "--json", "--quiet", *limit]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["train"] + summary["val"] == number


def test_the_check_names_the_command_that_trains(photos: Path, capsys: Capture) -> None:
    assert main(["data", "check", str(photos), "--max-pixels", str(LIMIT)]) == 0
    assert f"Trainable: yes, without the bad files: weft train {photos} --max-pixels 1000" in capsys.readouterr().out


def test_a_run_keeps_its_limit(photos: Path, run: Path) -> None:
    large = photos / LARGE
    (refused,) = predict(run, large)
    assert refused.reason == "too-many-pixels"
    (accepted,) = predict(run, large, max_pixels=1600)
    assert accepted.error is None
    with pytest.raises(BadImage, match="the limit is 1000"):
        Predictor.load(run / "best").prepare(large)


def test_all_readers_of_a_dataset_have_its_limit(photos: Path) -> None:
    """As training reads it: the limit of the check is that of the loader, also if a file is replaced later."""
    splits = open_data(photos, max_pixels=LIMIT)
    assert [(bad.key, bad.reason) for bad in splits.bad] == [(LARGE, "too-many-pixels")]
    whole = open_data(photos)
    keys = [*whole.train.keys, *whole.val.keys]
    assert LARGE in keys
    side = whole.train if LARGE in whole.train.keys else whole.val
    side.max_pixels = LIMIT
    with pytest.raises(weft.errors.DataError, match="the limit is 1000"):
        ImageDataset(side, Whole())[side.keys.index(LARGE)]
    with pytest.raises(weft.errors.DataError, match="the limit is 1000"):
        image_size_hint(side)
