"""Series of images are on one side of every split of a run, and a run keeps the split that it began with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.train.tiny import killed_after, paint, run, settings
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.data.fingerprint import Fingerprint
from weft.data.groups import GroupError, read_groups
from weft.errors import CheckpointError
from weft.inference import evaluate, info
from weft.recipes import load_recipe
from weft.train import series as module
from weft.train import train

CLIPS, FRAMES = 5, 5  # of each of three classes


def write_clips(folder: Path) -> Path:
    """Write clips of noise: the frames of a clip differ little. The end of a name has the number of clip and frame."""
    random = np.random.default_rng(0)
    for number in range(3):
        (folder / f"class{number}").mkdir(parents=True)
        for clip in range(CLIPS):
            pixels = random.integers(0, 120, (20, 24, 3)) + 60 * number
            for frame in range(FRAMES):
                noisy = np.clip(pixels + random.normal(0, 5, pixels.shape), 0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(folder / f"class{number}" / f"{random.integers(10**9)}_{clip}{frame}.png")
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips") / "data")


def clips_by_side(out: Path) -> dict[str, set[str]]:
    """Return the clips of each side of a run."""
    sides: dict[str, set[str]] = {"train": set(), "val": set()}
    for side, name, key, _ in Fingerprint.read(out / "images.tsv.gz").cells:
        sides[side].add(f"{name} {Path(key).stem.split('_')[1][0]}")
    return sides


@pytest.fixture(scope="module")
def finished(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(clips, tmp_path_factory.mktemp("finished") / "run")


def test_each_clip_is_on_one_side_and_its_frames_are_a_series(finished: Path) -> None:
    sides = clips_by_side(finished)
    assert not sides["train"] & sides["val"]
    assert len(sides["val"]) == 3
    series = read_groups(finished / "series.csv")
    assert len(series) == 3 * CLIPS * FRAMES
    assert len({(Path(key).parent.name, Path(key).stem.split("_")[1][0], one) for key, one in series.items()}) == 15
    assert all(Path(one).stem.split("_")[1][0] == Path(key).stem.split("_")[1][0] for key, one in series.items())
    assert load_recipe(finished / "recipe.yaml").data.group is None  # as the user left it


def test_a_resumed_run_has_the_split_and_the_bits_of_an_uninterrupted_one(
    clips: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after(2):
        run(clips, tmp_path / "run")
    monkeypatch.setattr(module, "find_series", None)  # they are not looked for again
    train(resume=tmp_path / "run", quiet=True)
    for name in ("series.csv", "images.tsv.gz", "best/model.safetensors", "last/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes(), name


@pytest.mark.parametrize("split", ["auto", "val"])
def test_an_evaluation_uses_the_images_that_were_held_out(
    clips: Path, finished: Path, split: str, tmp_path: Path
) -> None:
    held_out = [key for side, _, key, _ in Fingerprint.read(finished / "images.tsv.gz").cells if side == "val"]
    moved = shutil.copytree(clips, tmp_path / "moved") if split == "auto" else clips
    assert sorted(evaluate(finished, moved, split=split, quiet=True).keys) == sorted(held_out)


def test_every_fold_holds_out_whole_clips(clips: Path, tmp_path: Path) -> None:
    out = run(clips, tmp_path / "run", epochs=1, **{"data.folds": 3})
    held_out = []
    for folder in (out, out / "folds" / "2", out / "folds" / "3"):
        sides = clips_by_side(folder)
        assert not sides["train"] & sides["val"]
        held_out += sides["val"]
    assert len(held_out) == len(set(held_out)) == 3 * CLIPS


@pytest.mark.parametrize(
    ("more", "group"),
    [({"data.group": "none"}, "none"), ({"data.limit": 70}, None), ({"data.group": r"_(\d)"}, r"_(\d)")],
)
def test_series_are_not_looked_for_where_the_user_decides(
    clips: Path, tmp_path: Path, more: dict[str, Any], group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_series", None)
    out = run(clips, tmp_path / "run", epochs=1, **more)
    assert load_recipe(out / "recipe.yaml").data.group == group
    assert not (out / "series.csv").exists()


def test_a_split_of_the_data_stays(clips: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(clips, data / "train")
    shutil.copytree(clips, data / "val")
    assert clips_by_side(run(data, tmp_path / "run", epochs=1))["val"] == clips_by_side(tmp_path / "run")["train"]


def test_a_corrected_file_of_series_is_used(clips: Path, finished: Path, tmp_path: Path) -> None:
    corrected = tmp_path / "corrected.csv"
    corrected.write_text((finished / "series.csv").read_text())
    out = run(clips, tmp_path / "run", epochs=1, **{"data.group": str(corrected)})
    assert clips_by_side(out) == clips_by_side(finished)


def test_images_without_series_are_split_as_without_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = paint(tmp_path / "data")
    for name, group in (("default", None), ("none", "none"), ("asked", "similar")):
        train(data, settings=settings(epochs=1, **{"data.group": group}), out=tmp_path / name)
        assert "series of" not in capsys.readouterr().err
    sides = [list(Fingerprint.read(tmp_path / name / "images.tsv.gz").lines) for name in ("default", "none", "asked")]
    assert sides[0] == sides[1] == sides[2]
    assert load_recipe(None, []).data.group is None


def test_series_are_written_to_a_file_that_train_reads(
    clips: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "series.csv"
    assert main(["data", "check", str(clips), "--series", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Series of similar images: 15, of 5 images at most; 75 of 75 images are in one." in printed
    assert f"weft train {clips} --group {file}" in printed
    assert read_groups(file) == read_groups(finished / "series.csv")
    assert main(["data", "check", str(clips), "--series", str(file)]) == 2
    assert "--series must name a new file" in capsys.readouterr().err
    data = paint(tmp_path / "data")
    assert main(["data", "check", str(data), "--series", str(file), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["series"] == {}
    assert len(file.read_text().splitlines()) == 49
    assert main(["data", "check", str(data), "--series", str(data / "x.csv")]) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image,series\na,1\n", "must be a CSV file with the columns image and group"),
        ("image,group\nothers/1.jpg,1\n", "must name the groups of images of the data, such as 'class0/"),
    ],
)
def test_a_file_of_other_images_is_refused(clips: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(GroupError, match=words):
        run(clips, tmp_path / "run", **{"data.group": str(tmp_path / "other.csv")})


def test_a_split_of_the_data_that_parts_series_is_noted(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    for path in clips.rglob("*.png"):
        place = data / ("val" if path.stem[-1] == "0" else "train") / path.relative_to(clips)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    train(data, settings=settings(epochs=1), out=tmp_path / "run")
    assert "15 held-out images are similar to training images, of 15" in capsys.readouterr().err
    assert not (tmp_path / "run" / "series.csv").exists()


def test_classes_of_two_series_are_held_out(tmp_path: Path) -> None:
    """Each of the two has half of the images, which is more than the share to hold out."""
    data = write_clips(tmp_path / "data")
    for path in data.rglob("*.png"):
        if path.stem[-2] not in "01":
            path.unlink()
    sides = clips_by_side(run(data, tmp_path / "run", epochs=1, batch_size=4))
    assert len(sides["train"]) == len(sides["val"]) == 3


def test_a_run_that_starts_from_another_has_its_split(clips: Path, finished: Path, tmp_path: Path) -> None:
    """No image that the first one was trained on is held out by the second."""
    alone = run(clips, tmp_path / "alone", epochs=1, **{"data.group": "none"})
    for start in (finished, finished / "last", alone):
        out = run(clips, tmp_path / start.name / "run", epochs=1, start_from=str(start))
        cells = [list(Fingerprint.read(folder / "images.tsv.gz").cells) for folder in (out, finished)]
        assert (cells[0] == cells[1]) == (start != alone)
        assert (out / "series.csv").exists() == (start != alone)


@pytest.mark.parametrize("more", [{"data.train_fraction": 0.5}, {"data.limit": 40, "data.group": "similar"}])
def test_series_are_those_of_the_whole_dataset(
    clips: Path, finished: Path, tmp_path: Path, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that uses a part of the images holds out whole clips too, and says so of the images that it uses."""
    train(clips, settings=settings(epochs=1, **more), out=tmp_path / "run")
    sides = clips_by_side(tmp_path / "run")
    assert not sides["train"] & sides["val"]
    number = len(list(Fingerprint.read(tmp_path / "run" / "images.tsv.gz").cells))
    assert f"{number} images in {len(sides['train'] | sides['val'])} series" in capsys.readouterr().err
    assert read_groups(tmp_path / "run" / "series.csv") == read_groups(finished / "series.csv")


def test_another_image_moves_no_other(clips: Path, finished: Path, tmp_path: Path) -> None:
    data = shutil.copytree(clips, tmp_path / "data")
    pixels = np.random.default_rng(1).integers(0, 255, (20, 24, 3), np.uint8)
    Image.fromarray(pixels).save(data / "class0" / "000_90.png")
    before, after = clips_by_side(finished), clips_by_side(run(data, tmp_path / "run", epochs=1))
    assert after["val"] - {"class0 9"} == before["val"]


def test_decisions_are_those_for_the_new_split(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With few series, fewer images are for training than by a random split."""
    data = shutil.copytree(clips, tmp_path / "data")
    for path in data.rglob("*.png"):
        if path.stem[-2] not in "01":
            path.unlink()
    train(data, settings={"model": "levit_nano_32", "epochs": 1}, out=tmp_path / "run")
    printed = capsys.readouterr().err
    assert "15 images in 3 classes for training, 15 held out: a split by groups" in printed
    assert "Batch size 15: the training set has 15 images." in printed


@pytest.mark.parametrize("name", ["similar", "none"])
def test_a_column_of_the_table_does_not_replace_the_series(clips: Path, tmp_path: Path, name: str) -> None:
    """It is a rule only if the user says so."""
    rows = [f"image,label,{name}", *(f"{path},{path.parent.name},one" for path in sorted(clips.rglob("*.png")))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    sides = clips_by_side(run(tmp_path / "table.csv", tmp_path / "run", epochs=1))
    assert not sides["train"] & sides["val"]
    with killed_after(1):
        run(tmp_path / "table.csv", tmp_path / "again", epochs=1)
    train(resume=tmp_path / "again", quiet=True)
    assert clips_by_side(tmp_path / "again") == sides


def test_a_file_of_groups_is_repeated_by_the_recipe(clips: Path, tmp_path: Path) -> None:
    rows = [f"{path.relative_to(clips)},{path.parent.name} {path.stem[-2] in '012'}" for path in clips.rglob("*.png")]
    (tmp_path / "own.csv").write_text("\n".join(["image,group", *rows]))
    out = run(clips, tmp_path / "run", epochs=1, **{"data.group": str(tmp_path / "own.csv")})
    again = train(recipe=out / "recipe.yaml", out=tmp_path / "again", quiet=True).out
    assert clips_by_side(again) == clips_by_side(out)
    assert len(clips_by_side(out)["val"]) > 3


def test_a_file_beside_the_runs_is_not_one_of_theirs(tmp_path: Path) -> None:
    data = paint(tmp_path / "data")
    (tmp_path / "series.csv").write_text("episode,season\n1,2\n")
    with killed_after(1):
        run(data, tmp_path / "runs" / "one")
    train(resume=tmp_path / "runs" / "one", quiet=True)
    assert evaluate(tmp_path / "runs" / "one", data, quiet=True).groups is None


@pytest.mark.parametrize("kind", ["missing", "changed"])
def test_a_resumed_run_needs_its_series(clips: Path, finished: Path, tmp_path: Path, kind: str) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    file = out / "series.csv"
    file.unlink() if kind == "missing" else file.write_text("image,group\n")
    with pytest.raises(CheckpointError, match=rf"series\.csv must be the file that the run wrote, .* it \w+ {kind}"):
        train(resume=out, quiet=True)


@pytest.mark.parametrize("split", ["auto", "val", "train"])
def test_moved_images_keep_their_sides_and_groups(clips: Path, finished: Path, split: str, tmp_path: Path) -> None:
    moved = shutil.copytree(clips, tmp_path / "moved")
    here, there = (evaluate(finished, data, split=split, quiet=True) for data in (clips, moved))
    assert there.keys == here.keys
    assert there.interval == here.interval
    assert len(set(there.groups or ())) == len(clips_by_side(finished)[split.replace("auto", "val")])


def test_a_fold_is_evaluated_on_the_images_that_it_held_out(clips: Path, tmp_path: Path) -> None:
    out = run(clips, tmp_path / "run", epochs=1, **{"data.folds": 3})
    for folder in (out / "folds" / "2", out / "folds" / "2" / "best"):
        held_out = {
            key for side, _, key, _ in Fingerprint.read(out / "folds" / "2" / "images.tsv.gz").cells if side == "val"
        }
        result = evaluate(folder, clips, quiet=True)
        assert set(result.keys) == held_out
        assert result.groups is not None


def test_other_groups_are_said_only_of_images_in_groups(clips: Path, finished: Path, tmp_path: Path) -> None:
    assert "% of 15 held-out images in 3 groups that were held out" in str(info(finished))
    data = paint(tmp_path / "data")
    out = run(data, tmp_path / "run", epochs=1, **{"data.group": "similar"})
    assert "(95 % CI" in str(info(out).accuracy)


@pytest.mark.parametrize("bits", ["int32", "few of 16"])
def test_images_of_more_bits_are_in_series(tmp_path: Path, bits: str) -> None:
    data, random = tmp_path / "data", np.random.default_rng(0)
    for number in range(2):
        (data / f"class{number}").mkdir(parents=True)
        for clip in range(CLIPS):
            pixels = random.integers(0, 400, (20, 24)) + 50 * number
            for frame in range(FRAMES):
                noisy = np.clip(pixels + random.normal(0, 10, pixels.shape), 0, 511)
                image = Image.fromarray(noisy.astype(np.int32 if bits == "int32" else np.uint16))
                image.save(data / f"class{number}" / f"{random.integers(10**9)}_{clip}{frame}.tiff")
    sides = clips_by_side(run(data, tmp_path / "run", epochs=1, batch_size=8))
    assert not sides["train"] & sides["val"]
    assert len(set(read_groups(tmp_path / "run" / "series.csv").values())) == 2 * CLIPS


def test_series_of_large_images_are_found_by_public_weights_at_hand(
    clips: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if training starts from random weights, so that all runs are split alike; small images by their pixels."""
    built = list[str]()

    def read(*args: Any, **keywords: Any) -> tuple[list[np.ndarray], np.ndarray]:
        keys, labels = args[1].dataset.source.keys, args[1].dataset.source.labels
        clip = np.array([3 * int(Path(key).stem[-2]) + label for key, label in zip(keys, labels, strict=True)])
        return [np.eye(3 * CLIPS)[clip][:, None].astype(np.float32)], np.array(labels)

    def create(name: str, **_: Any) -> Any:
        built.append(name)
        return create_model("levit_nano_32")

    monkeypatch.setattr(module, "read_features", read)
    monkeypatch.setattr(module, "create_model", create)
    monkeypatch.setattr(module, "is_cached", lambda name: name == "tf_efficientnet_lite0")
    run(clips, tmp_path / "small", epochs=1)
    assert not built
    monkeypatch.setattr(module, "SMALL_SIDE", 20)
    out = run(clips, tmp_path / "large", epochs=1)
    assert built == ["tf_efficientnet_lite0"]
    assert clips_by_side(out) == clips_by_side(finished)
