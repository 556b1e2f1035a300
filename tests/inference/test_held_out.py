"""An evaluation leaves out the images that the model was trained on, wherever they are by now."""

from __future__ import annotations

import csv
import gzip
import shutil
from pathlib import Path

import pytest

from tests.helpers import noise_images
from weft.checkpoints import load_model_dir, save_model_dir
from weft.data import SplitPlan, open_data
from weft.data.fingerprint import Fingerprint, fingerprint
from weft.errors import CheckpointError, DataError
from weft.inference import evaluate
from weft.inference.arguments import InferenceOptions
from weft.inference.inputs import images_of, open_labelled
from weft.recipes import load_recipe
from weft.train import RunResult, train
from weft.train.plan import open_splits

Capture = pytest.CaptureFixture[str]
NAMES = ("cat", "dog")
COUNT = 10  # images of a class


def paint(folder: Path, count: int, seed: int) -> Path:
    names = [f"{name}/{seed}-{number}.png" for name in NAMES for number in range(count)]
    return noise_images(folder, *names, seed=seed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("trained")
    settings = {"head_init": "probe", "epochs": 0}
    return train(
        paint(folder / "data", COUNT, 0), model="levit_nano_32", settings=settings, out=folder / "run", quiet=True
    )


def data_of(run: RunResult) -> Path:
    return run.out.parent / "data"


def test_the_data_of_the_run(run: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluate(run.out, data_of(run), quiet=True).count == run.count == 4
    monkeypatch.chdir(run.out)
    assert evaluate(".", "../data", quiet=True).count == run.count
    assert evaluate("best", "../data", quiet=True).count == run.count


def test_a_copy_of_the_data_with_other_names(run: RunResult, tmp_path: Path, capsys: Capture) -> None:
    for path in data_of(run).rglob("*.png"):
        for folder, name in (("copied", path.name), ("renamed", f"renamed {path.name}")):
            (tmp_path / folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / folder / path.parent.name / name)
    for folder in ("copied", "renamed"):
        result = evaluate(run.out, tmp_path / folder)
        assert (result.count, result.top1) == (run.count, pytest.approx(run.top1))
        assert "Evaluating the held-out images: 4 images." in capsys.readouterr().err


def test_without_hashes_images_are_found_by_name_and_size_which_is_said(run, tmp_path, capsys):
    """As of a run on many images, of which only the headers were read."""
    shutil.copytree(run.out, tmp_path / "run")
    file = tmp_path / "run" / "images.tsv.gz"
    Fingerprint.read(file).without_hashes.write(file)
    shutil.copytree(data_of(run), tmp_path / "copied")
    assert evaluate(tmp_path / "run", tmp_path / "copied").count == run.count
    note = "are found by name and size; renamed ones are not."
    assert note in capsys.readouterr().err
    for path in (tmp_path / "copied").rglob("*.png"):
        path.rename(path.with_name(f"renamed {path.name}"))
    assert evaluate(tmp_path / "run", tmp_path / "copied").count == 2 * COUNT
    assert note in capsys.readouterr().err
    assert evaluate(run.out, tmp_path / "copied").count == run.count
    assert note not in capsys.readouterr().err


def test_added_images_are_evaluated_too(run: RunResult, tmp_path: Path, capsys: Capture) -> None:
    data = paint(shutil.copytree(data_of(run), tmp_path / "data"), 3, 1)
    assert evaluate(run.out, data).count == run.count + 6
    assert "Evaluating the images that the model was not trained on: 10 images." in capsys.readouterr().err


def test_other_images_at_the_path_of_the_training_data(run: RunResult, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(run.out, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(data_of(run)), str(tmp_path / "data")))
    assert evaluate(tmp_path / "run", paint(tmp_path / "data", 3, 1)).count == 6
    assert "Evaluating all images: 6 images." in capsys.readouterr().err


def test_training_images_alone_are_refused(run: RunResult, tmp_path: Path) -> None:
    lines = Fingerprint.read(run.out / "images.tsv.gz").lines
    with (tmp_path / "table.csv").open("w", newline="") as file:
        rows = [(data_of(run) / line.split("\t")[2], line.split("\t")[1]) for line in lines if line.startswith("train")]
        csv.writer(file).writerows([("path", "label"), *rows])
    with pytest.raises(DataError, match=r"needs images that the model was not trained on; .*table\.csv has none"):
        evaluate(run.out, tmp_path / "table.csv", quiet=True)
    assert evaluate(run.out, tmp_path / "table.csv", split="all", quiet=True).count == len(rows)


def test_training_images_among_those_that_are_asked_for(run: RunResult, tmp_path: Path, capsys: Capture) -> None:
    evaluate(run.out, data_of(run), split="all")
    assert "The model was trained on 16 of these images, so the accuracy is too high." in capsys.readouterr().err
    shutil.copytree(data_of(run), tmp_path / "data" / "val")
    paint(tmp_path / "data" / "train", 2, 1)
    evaluate(run.out, tmp_path / "data")
    assert "The model was trained on 16 of these images, so the accuracy is too high." in capsys.readouterr().err
    evaluate(run.out, data_of(run), split="train")
    assert "too high" not in capsys.readouterr().err


def test_a_model_without_its_run_says_so_unless_a_split_is_asked_for(run, tmp_path, capsys):
    model, names = load_model_dir(run.out / "best")
    alone = save_model_dir(model, tmp_path / "model", label_names=names)
    shutil.copytree(run.out, tmp_path / "run")
    within = save_model_dir(model, tmp_path / "run" / "best" / "copy", label_names=names)
    evaluate(alone, data_of(run))
    assert "which images it was trained on is not known" in capsys.readouterr().err
    evaluate(alone, data_of(run), split="val")
    assert "not known" not in capsys.readouterr().err
    evaluate(within, data_of(run))
    err = capsys.readouterr().err
    assert "not known" not in err
    assert "Evaluating the held-out images: 4 images." in err


def test_a_name_is_no_file_of_the_run_that_it_is_typed_in(run: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.out)
    assert images_of(Path("levit_128s")) is None
    assert images_of(Path("best")) is not None


@pytest.mark.parametrize("text", ["1\ncat\ntrain\tcat", "many\ncat", "1\ncat\n\n"])
def test_a_damaged_list_of_images(text: str, run: RunResult, tmp_path: Path) -> None:
    shutil.copytree(run.out, tmp_path / "run")
    (tmp_path / "run" / "images.tsv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(CheckpointError, match=r"images\.tsv\.gz must list the images of the run; .* Restore it\."):
        evaluate(tmp_path / "run", data_of(run), quiet=True)


def test_a_copy_on_both_sides_is_held_out(tmp_path: Path) -> None:
    data = paint(tmp_path / "data", COUNT, 0)
    splits = open_data(data)
    shutil.copy(data / splits.train.keys[0], data / splits.val.keys[0])
    splits = open_data(data)
    recorded = fingerprint(splits)
    assert recorded.sides_of(splits.train)[0] == "train"  # the same name
    assert recorded.sides_of(splits.val)[0] == "val"
    for number, path in enumerate(sorted(data.rglob("*.png"))):
        path.rename(path.with_name(f"{number}.png"))
    renamed = open_data(data)
    sides = [*recorded.sides_of(renamed.train), *recorded.sides_of(renamed.val)]
    assert sides.count("val") == len(splits.val) + 1


def test_training_and_evaluation_split_by_the_seed_of_the_data(tmp_path: Path) -> None:
    """`data.seed` decides the split where it is set, so that runs with other seeds hold out the same images."""
    data = paint(tmp_path / "photos", 20, 0)

    def held_out(**settings: object) -> tuple[list[str], list[str]]:
        overrides = [("data.source", str(data)), *((key.replace("__", "."), value) for key, value in settings.items())]
        recipe = load_recipe(None, overrides)
        trained = open_splits(recipe)
        evaluated = open_labelled(data, trained.classes, len(trained.classes), InferenceOptions(), recipe)
        return list(trained.val.keys), list(evaluated.val.keys)

    expected = {seed: list(open_data(data, SplitPlan(seed=seed)).val.keys) for seed in (1, 2, 3)}
    assert expected[1] != expected[3] != expected[2]
    for seed in (1, 2):
        assert held_out(seed=seed) == (expected[seed], expected[seed])
        assert held_out(seed=seed, data__seed=3) == (expected[3], expected[3])


def test_the_test_split_is_read_only_when_it_is_asked_for(run: RunResult, tmp_path: Path, capsys: Capture) -> None:
    """Its labels are all wrong here: no measure of the validation set sees them."""
    for seed, (side, count) in enumerate((("Train", 6), ("Val", 3), ("Test", 2)), start=10):
        paint(tmp_path / "data" / side, count, seed)
    rows = [
        (f"data/{path.relative_to(tmp_path / 'data')}", path.parent.name, path.parts[-3])
        for path in sorted((tmp_path / "data").rglob("*.png"))
    ]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "label", "split"), *rows])
    for data in (tmp_path / "data", tmp_path / "table.csv"):
        capsys.readouterr()
        assert evaluate(run.out, data).count == 6
        assert "weft evaluate RUN DATA --split test." in capsys.readouterr().err
        assert evaluate(run.out, data, split="test", quiet=True).count == 4
        assert evaluate(run.out, data, split="all", quiet=True).count == 18
    with pytest.raises(DataError, match="--split test needs a dataset with a test split; this one has no split"):
        evaluate(run.out, data_of(run), split="test", quiet=True)
