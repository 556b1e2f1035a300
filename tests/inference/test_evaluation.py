"""Evaluation and prediction with what a run left."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from tests.helpers import noise_images
from tests.train.conftest import COLOURS, PER_CLASS, paint
from weft.cli import main
from weft.errors import DataError, UsageError
from weft.train import RunResult, evaluate, predict, train

PROBE = {"head_init": "probe", "epochs": 0}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("runs") / "colours"
    return train(photos, "levit_nano_32", settings=PROBE, out=out, device="cpu", quiet=True)


def test_the_run_is_measured_again_as_it_was(trained: RunResult, photos: Path) -> None:
    result = evaluate(trained.out, photos, quiet=True)
    assert (result.count, result.top1) == (trained.count, trained.top1) == (9, 100)
    assert result.loss == pytest.approx(trained.loss, rel=1e-5)
    assert result.classes == list(COLOURS)
    for split, count in (("val", 9), ("train", 36), ("all", 45)):
        assert evaluate(trained.out / "last", photos, split=split, quiet=True).count == count


def test_one_picture_per_class_is_enough(trained: RunResult, tmp_path: Path) -> None:
    few = paint(tmp_path / "few", per_class=1, seed=1)
    assert evaluate(trained.out, few, img_size="48x48", quiet=True).count == 3
    with pytest.raises(DataError, match="at least one image; got none"):
        evaluate(trained.out, few, split="val", quiet=True)
    with pytest.raises(UsageError, match="split must be one of auto, train, val, test, all; got 'dev'"):
        evaluate(trained.out, few, split="dev")


def test_classes_are_matched_by_name(trained: RunResult, tmp_path: Path) -> None:
    some = paint(tmp_path / "some", classes=("red", "green"), per_class=5, seed=1)
    result = evaluate(trained.out, some, quiet=True)
    assert result.top1 == 100
    assert {score.name: score.images for score in result.per_class} == {"blue": 0, "green": 5, "red": 5}
    (some / "red").rename(some / "azure")
    with pytest.raises(DataError, match="azure"):
        evaluate(trained.out, some, quiet=True)


def test_excluded_images_are_in_no_number(trained: RunResult, tmp_path: Path) -> None:
    folder = paint(tmp_path / "photos", per_class=14, seed=1)
    (folder / "red" / "zero.png").touch()
    (folder / "red" / "text.png").write_text("not a picture")
    result = evaluate(trained.out, folder, quiet=True)
    assert result.count == 42
    assert sorted(key for key, _ in result.excluded) == ["red/text.png", "red/zero.png"]
    assert dict(result.excluded)["red/zero.png"] == "zero-byte"


def test_a_picture_and_its_mirror_image_are_one_to_tta(trained: RunResult, tmp_path: Path) -> None:
    photos = paint(tmp_path / "photos", per_class=4, seed=1)
    turned = Path(shutil.copytree(photos, tmp_path / "turned"))
    for path in turned.glob("*/*.png"):
        with Image.open(path) as image:
            ImageOps.mirror(image).save(path)
    for tta in (True, False):
        there, here = (predict(trained.out, folder, tta=tta) for folder in (turned, photos))
        shares = [[dict(answer.top)["red"] for answer in answers] for answers in (there, here)]
        assert (shares[0] == pytest.approx(shares[1], abs=1e-5)) is tta  # float32


def test_what_evaluate_writes(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "check"
    result = evaluate(trained.out, photos, out=out, tta=True, quiet=True)
    assert sorted(path.name for path in out.iterdir()) == ["evaluation.json", "report.html"]
    of = {"model": str(trained.out), "data": str(photos), "split": "val", "tta": True}
    assert json.loads((out / "evaluation.json").read_text()) == of | result.as_dict()
    assert "averaged with those of mirror images" in (out / "report.html").read_text()
    with pytest.raises(UsageError, match="check is neither"):
        evaluate(trained.out, photos, out=out, quiet=True)
    evaluate(trained.out, photos, out=out, force=True, quiet=True)
    assert json.loads((out / "evaluation.json").read_text())["tta"] is False


def test_predictions_are_right_and_in_the_order_of_files_folders_and_patterns(trained: RunResult, photos: Path) -> None:
    answers = predict(trained.out, [photos / "red", f"{photos}/*/01.png", str(photos / "blue" / "02.png")], img_size=64)
    names = [Path(answer.image).relative_to(photos).as_posix() for answer in answers]
    assert names == [*(f"red/{n:02}.png" for n in range(PER_CLASS)), *(f"{c}/01.png" for c in COLOURS), "blue/02.png"]
    for answer, name in zip(answers, names, strict=True):
        shares = [share for _, share in answer.top]
        assert answer.top[0][0] == name.partition("/")[0]
        assert sorted(label for label, _ in answer.top) == sorted(COLOURS)
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1)
    assert len(predict(trained.out, photos, limit=4, top_k=2)[3].top) == 2


def test_pictures_that_cannot_be_read_do_not_stop_the_others(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "zero.png").touch()
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    reasons = {
        tmp_path / "zero.png": "zero-byte",
        photos / "red" / "00.png": None,
        tmp_path / "text.png": "not-an-image",
        tmp_path / "gone.png": "missing",
        f"{tmp_path}/*.jpg": "missing",
        tmp_path / "empty": "not-a-file",
    }
    answers = predict(trained.out, list(reasons), batch_size=2)
    assert [answer.reason for answer in answers] == list(reasons.values())
    assert answers[1].top[0][0] == "red"
    assert "it is a folder without images" in str(answers[5].error)
    for answer, image in zip(answers, reasons, strict=True):
        assert answer.image == str(image)
        assert answer.error is None or str(image) in answer.error
    assert answers[0].as_dict() == {"image": answers[0].image, "error": answers[0].error, "reason": "zero-byte"}


def test_every_verb_notes_that_the_ends_of_wide_images_are_cut_off(tmp_path: Path, capsys) -> None:
    names = [f"{name}/{number}.png" for name in ("bolt", "nut") for number in range(4)]
    noise_images(tmp_path / "data", *names, size=(20, 100))
    note = re.compile(r"images are wider than the input of \d+x\d+: by a factor of 5\.0")
    assert main(["data", "check", str(tmp_path / "data")]) == 0
    assert note.search(capsys.readouterr().out)
    run = train(tmp_path / "data", "levit_nano_32", settings=PROBE, out=tmp_path / "run").out
    assert note.search(capsys.readouterr().err)
    evaluate(run, tmp_path / "data")
    assert note.search(capsys.readouterr().err)
