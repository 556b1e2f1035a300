"""`weft predict --out`: predictions as a CSV file, and copies of the images in one folder per class."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers import lively, noise_images
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.errors import UsageError
from weft.inference import predict, prediction
from weft.inference.prediction import FilePrediction
from weft.inference.prediction_files import table_of, write_predictions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = lively("levit_nano_32", num_classes=3)
    return save_model_dir(network, tmp_path_factory.mktemp("model") / "model", label_names=["cat", "dog", "a/b"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = noise_images(tmp_path / "photos", "x/1.png", "y/1.png", "y/2.jpg")
    (folder / "x" / "broken.png").write_bytes(b"none")
    return folder


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_csv_has_a_row_per_class_of_each_image(model: Path, photos: Path, tmp_path: Path) -> None:
    before = contents(photos)
    result = predict(model, photos, top_k=2, out=tmp_path / "out.csv", quiet=True)
    rows = rows_of(tmp_path / "out.csv")
    good = [row for row in result if row.error is None]
    assert len(rows) == 2 * len(good) == 6
    assert [row["class"] for row in rows] == [name for row in good for name, _ in row.top]
    assert contents(photos) == before
    with pytest.raises(UsageError, match="exists"):
        predict(model, photos, out=tmp_path / "out.csv", quiet=True)
    predict(model, photos, top_k=1, out=tmp_path / "out.csv", force=True, quiet=True)
    assert len(rows_of(tmp_path / "out.csv")) == 3


def test_a_directory_has_a_copy_of_every_image_below_its_class(model: Path, photos: Path, tmp_path: Path) -> None:
    before, out = contents(photos), tmp_path / "out"
    result = predict(model, photos, out=out, quiet=True)
    rows = rows_of(out / "predictions.csv")
    folders = {"cat": "cat", "dog": "dog", "a/b": "a_b"}
    assert [row["class"] for row in rows] == [row.top[0][0] for row in result if row.error is None]
    for row in rows:
        assert row["copy"].partition("/")[0] == folders[row["class"]]
        assert (out / row["copy"]).read_bytes() == Path(row["image"]).read_bytes()
    assert len({row["copy"] for row in rows}) == 3  # two images have the same name
    assert contents(photos) == before


def test_only_directories_of_copies_are_replaced(model: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def assert_refused(message: str, images: Path = photos, out: Path = out, *, force: bool = True) -> None:
        with pytest.raises(UsageError, match=message):
            predict(model, images, out=out, force=force, quiet=True)

    predict(model, photos / "y", out=out, quiet=True)
    assert_refused("must be new or empty", force=False)
    predict(model, photos, out=out, force=True, quiet=True)
    assert len(contents(out)) == 4
    copy = next(out.rglob("*.jpg"))
    for mine in (out / "mine.txt", copy.with_name("mine.jpg")):
        mine.write_text("mine")
        assert_refused(rf"also holds '{mine.relative_to(out).as_posix()}'")
        assert mine.read_text() == "mine"
        mine.unlink()
    copy.unlink()  # a copy that is gone is no obstacle
    predict(model, photos, out=out, force=True, quiet=True)
    assert_refused("must be outside the output directory", next(out.rglob("*.png")))
    assert_refused("also holds 'x'", tmp_path / "none.png", photos)  # images of a user, also with the same classes
    assert_refused("must be outside the data folder", out=photos / "out", force=False)


def test_unknown_and_rejected_images_have_columns_and_folders_of_their_own(photos: Path, tmp_path: Path) -> None:
    paths = [str(photos / name) for name in ("x/1.png", "y/1.png", "y/2.jpg", "x/broken.png")]
    predictions = [
        FilePrediction(paths[0], [("unknown", 0.9)], rejected=False, unknown=False),
        FilePrediction(paths[1], [("unknown", 0.8)], rejected=False, unknown=True),
        FilePrediction(paths[2], [("unknown", 0.4)], rejected=True, unknown=False),
        FilePrediction(paths[3], [], "cannot be read", "damaged"),
    ]
    header, rows = table_of(predictions)
    assert header == ("image", "rank", "class", "probability", "unknown", "rejected")
    assert [row[4:] for row in rows] == [("no", "no"), ("yes", "no"), ("no", "yes")]
    assert table_of([FilePrediction("a", [("b", 1.0)])]) == (header[:4], [("a", "1", "b", "1.0000")])
    write_predictions(tmp_path / "out", paths, predictions, force=False)
    copies = sorted(name for name in contents(tmp_path / "out") if name != "predictions.csv")
    assert copies == ["rejected/2.jpg", "unknown-2/1.png", "unknown/1.png"]  # the second is of a class of this name


def test_nothing_is_written_if_no_image_can_be_read(model, tmp_path, monkeypatch, capsys):
    """And weft says so, for a directory and a file."""
    (tmp_path / "broken.png").write_bytes(b"none")
    for name, image, reason in (("out", "broken.png", "not-an-image"), ("out", "none.png", "missing")):
        (result,) = predict(model, tmp_path / image, out=tmp_path / name)
        assert result.reason == reason
        assert not (tmp_path / name).exists()
        assert f"{tmp_path / name} is not written, because no image could be read." in capsys.readouterr().err
        monkeypatch.setattr(prediction.Predictor, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    assert main(["predict", str(model), str(tmp_path / "none.png"), "--out", str(tmp_path / "out.csv")]) == 3
    assert "out.csv is not written" in capsys.readouterr().err
