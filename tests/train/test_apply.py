"""Evaluation and prediction with what a run left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from tests.train.conftest import COLOURS, PER_CLASS, paint
from weft.checkpoints.resolve import model_dir
from weft.errors import CheckpointError, DataError, UsageError
from weft.train import RunResult, evaluate, predict


@pytest.mark.slow
def test_the_run_is_measured_again_as_it_was(trained: RunResult, photos: Path) -> None:
    result = evaluate(trained.out, photos, quiet=True)
    assert (result.count, result.top1) == (trained.count, trained.top1)
    assert result.loss == pytest.approx(trained.loss, rel=1e-5)
    assert result.classes == list(COLOURS)


@pytest.mark.parametrize(("split", "count"), [("val", 9), ("train", 36), ("all", 45), ("auto", 9)])
def test_splits(split: str, count: int, trained: RunResult, photos: Path) -> None:
    assert evaluate(trained.out / "last", photos, split=split, quiet=True).count == count


def test_other_data_is_measured_whole(trained: RunResult, tmp_path: Path) -> None:
    other = paint(tmp_path / "other", per_class=4, seed=1)
    assert evaluate(trained.out, other, quiet=True).count == 12


def test_one_picture_per_class_is_enough(trained: RunResult, tmp_path: Path) -> None:
    assert evaluate(trained.out, paint(tmp_path / "few", per_class=1, seed=1), quiet=True).count == 3
    with pytest.raises(DataError, match="at least one image; got none"):
        evaluate(trained.out, tmp_path / "few", split="val", quiet=True)


def test_classes_are_matched_by_name(trained: RunResult, tmp_path: Path) -> None:
    some = paint(tmp_path / "some", classes=("red", "green"), per_class=5, seed=1)
    result = evaluate(trained.out, some, quiet=True)
    assert result.top1 == 100
    assert {score.name: score.images for score in result.per_class} == {"blue": 0, "green": 5, "red": 5}


def test_a_class_the_model_does_not_know(trained: RunResult, tmp_path: Path) -> None:
    folder = paint(tmp_path / "photos", per_class=3)
    (folder / "blue").rename(folder / "azure")
    with pytest.raises(DataError, match="azure"):
        evaluate(trained.out, folder, quiet=True)


def test_excluded_images_are_in_no_number(trained: RunResult, tmp_path: Path) -> None:
    folder = paint(tmp_path / "photos", per_class=14, seed=1)
    (folder / "red" / "zero.png").touch()
    (folder / "red" / "text.png").write_text("not a picture")
    result = evaluate(trained.out, folder, quiet=True)
    assert result.count == 42
    assert sorted(key for key, _ in result.excluded) == ["red/text.png", "red/zero.png"]
    assert dict(result.excluded)["red/zero.png"] == "zero-byte"


def test_a_picture_and_its_mirror_image_are_one_to_tta(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    for path in photos.glob("*/*.png"):
        (tmp_path / "turned" / path.parent.name).mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            ImageOps.mirror(image).save(tmp_path / "turned" / path.parent.name / path.name)
    turned = tmp_path / "turned"
    for tta, is_equal in ((True, True), (False, False)):
        there, here = (predict(trained.out, folder, tta=tta) for folder in (turned, photos))
        shares = [[dict(answer.top)["red"] for answer in answers] for answers in (there, here)]
        assert (shares[0] == pytest.approx(shares[1], abs=1e-5)) is is_equal  # float32
        losses = [evaluate(trained.out, folder, split="all", tta=tta, quiet=True).loss for folder in (turned, photos)]
        assert (losses[0] == pytest.approx(losses[1], abs=1e-6)) is is_equal


def test_the_report_tells_of_tta(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    evaluate(trained.out, photos, out=tmp_path / "check", tta=True, quiet=True)
    assert "averaged with those of mirror images" in (tmp_path / "check" / "report.html").read_text()
    assert json.loads((tmp_path / "check" / "evaluation.json").read_text())["tta"] is True


def test_what_evaluate_writes(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "check"
    result = evaluate(trained.out, photos, out=out, quiet=True)
    assert sorted(path.name for path in out.iterdir()) == ["evaluation.json", "report.html"]
    of = {"model": str(trained.out), "data": str(photos), "split": "val", "tta": False}
    assert json.loads((out / "evaluation.json").read_text()) == of | result.as_dict()
    with pytest.raises(UsageError, match="check is neither"):
        evaluate(trained.out, photos, out=out, quiet=True)
    evaluate(trained.out, photos, out=out, force=True, quiet=True)


def test_an_unknown_split(trained: RunResult, photos: Path) -> None:
    with pytest.raises(UsageError, match="split must be one of auto, train, val, test, all; got 'dev'"):
        evaluate(trained.out, photos, split="dev")


def test_a_model_directory_needs_no_run_around_it(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(trained.out / "best", alone)
    assert evaluate(alone, photos, quiet=True).count == len(COLOURS) * PER_CLASS


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist and is neither\. Make one with weft train"):
        model_dir(tmp_path / "nowhere")


def test_predictions_are_right_and_in_order(trained: RunResult, photos: Path) -> None:
    images = [photos / name / "03.png" for name in ("red", "blue", "green", "red")]
    answers = predict(trained.out, images, top_k=2)
    assert [answer.image for answer in answers] == [str(image) for image in images]
    assert [answer.top[0][0] for answer in answers] == ["red", "blue", "green", "red"]
    for answer in answers:
        assert len(answer.top) == 2
        assert 1 >= answer.top[0][1] >= answer.top[1][1] >= 0
    assert answers[0].top == answers[3].top


def test_the_batch_size_does_not_matter(trained: RunResult, photos: Path) -> None:
    one, other = (predict(trained.out, photos, batch_size=size) for size in (1, 32))
    assert len(one) == len(COLOURS) * PER_CLASS
    for single, batched in zip(one, other, strict=True):
        assert single.image == batched.image
        torch.testing.assert_close(
            torch.tensor([share for _, share in single.top]), torch.tensor([share for _, share in batched.top])
        )


def test_all_probabilities_sum_to_one(trained: RunResult, photos: Path) -> None:
    (answer,) = predict(trained.out, photos / "red" / "00.png", top_k=50)
    assert [name for name, _ in answer.top] != []
    assert sum(share for _, share in answer.top) == pytest.approx(1)
    assert sorted(name for name, _ in answer.top) == sorted(COLOURS)


def test_folders_patterns_and_files(trained: RunResult, photos: Path) -> None:
    answers = predict(trained.out, [photos / "red", f"{photos}/*/01.png", str(photos / "blue" / "02.png")])
    names = [Path(answer.image).relative_to(photos).as_posix() for answer in answers]
    assert names == [*(f"red/{n:02}.png" for n in range(PER_CLASS)), *(f"{c}/01.png" for c in COLOURS), "blue/02.png"]
    assert len(predict(trained.out, photos, limit=4)) == 4


def test_pictures_that_cannot_be_read_do_not_stop_the_others(trained: RunResult, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "zero.png").touch()
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    images = [
        tmp_path / "zero.png",
        photos / "red" / "00.png",
        tmp_path / "text.png",
        tmp_path / "gone.png",
        f"{tmp_path}/*.jpg",
        tmp_path / "empty",
    ]
    answers = predict(trained.out, images, batch_size=2)
    assert [answer.reason for answer in answers] == [
        "zero-byte", None, "not-an-image", "missing", "missing", "not-a-file"
    ]  # fmt: skip
    assert answers[1].top[0][0] == "red"
    assert "it is a folder without images" in str(answers[5].error)
    for answer, image in zip(answers, images, strict=True):
        assert answer.image == str(image)
        assert answer.error is None or str(image) in answer.error
    assert answers[0].as_dict() == {"image": answers[0].image, "error": answers[0].error, "reason": "zero-byte"}


def test_top_k_is_at_least_one(trained: RunResult) -> None:
    with pytest.raises(UsageError, match="top_k must be a whole number at least 1; got 0"):
        predict(trained.out, "x.png", top_k=0)


def test_another_size(trained: RunResult, photos: Path) -> None:
    assert evaluate(trained.out, photos, img_size="48x48", quiet=True).count == 9
    (answer,) = predict(trained.out, photos / "red" / "00.png", img_size=64)
    assert len(answer.top) == 3
