"""Images to label next, and proposed labels."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.train.conftest import paint
from weft.cli import main
from weft.data import open_data
from weft.errors import CheckpointError, DataError, UsageError
from weft.inference import predict
from weft.machine.runtime import Runtime
from weft.recipes import dump, load_recipe
from weft.runs.directory import FINGERPRINT
from weft.train import RunResult, label, labelling, train
from weft.train.labelling import UNCERTAIN_SHARE, choose

TWO = ("blue", "red")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("label")
    settings = {"head_init": "probe", "epochs": 0, "model_args.depth": [1, 1, 1]}
    data = paint(folder / "data", 12, TWO)
    return train(data, model="levit_nano_32", settings=settings, out=folder / "run", device="cpu", quiet=True)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("more") / "more", 10, TWO, seed=1)


def uncertain(number: int) -> np.ndarray:
    return np.full((number, 2), 0.5)


def test_uncertain_images_are_chosen_before_certain_ones() -> None:
    rng = np.random.default_rng(0)
    margin = rng.permutation(20) / 20
    probabilities = np.stack([(1 + margin) / 2, (1 - margin) / 2], axis=1)
    chosen = choose(rng.normal(size=(20, 4)), probabilities, np.empty((0, 4)), 5)
    assert chosen[0] == margin.argmin()  # without labelled images the least certain one is first
    assert set(chosen) <= set(np.argsort(margin)[: int(20 * UNCERTAIN_SHARE)].tolist())


def test_chosen_images_differ_from_each_other_and_from_labelled_ones() -> None:
    """Of groups of equal images, one is labelled: one image of each other group is chosen first."""
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 4))
    chosen = choose(np.eye(5)[groups], uncertain(20), np.eye(5)[[2]], 10)
    others = set(groups[:10].tolist()) - {2}  # at equal margins the candidates are the first half
    assert len(others) >= 3
    assert set(groups[chosen[: len(others)]].tolist()) == others


def test_similarities_in_blocks_choose_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    points, known = rng.normal(size=(40, 6)), rng.normal(size=(25, 6))
    whole = choose(points, uncertain(40), known, 10)
    monkeypatch.setattr(labelling, "MAX_VALUES", 3 * 25)
    assert choose(points, uncertain(40), known, 10) == whole


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_no_image_is_chosen_twice_and_never_more_than_there_are(budget: int) -> None:
    chosen = choose(np.ones((4, 3)), uncertain(4), np.ones((2, 3)), budget)
    assert sorted(chosen) == sorted(set(chosen))
    assert len(chosen) == min(budget, 4)


def test_labels_are_those_of_predict_and_the_files_stay(run: RunResult, unlabelled: Path, tmp_path: Path) -> None:
    before = {str(path): path.read_bytes() for path in unlabelled.rglob("*.png")}
    predictions = predict(run.out, unlabelled, top_k=1, quiet=True)
    limit = float(np.median([prediction.top[0][1] for prediction in predictions]))
    result = label(run.out, unlabelled, num=6, min_probability=limit, out=tmp_path / "out", quiet=True)
    assert {str(path): path.read_bytes() for path in unlabelled.rglob("*.png")} == before
    rows = {row.image: row for row in [*result.next, *result.proposed, *result.rest]}
    assert sorted(rows) == sorted(before)
    for prediction in predictions:
        name, probability = prediction.top[0]
        assert rows[prediction.image].probability == pytest.approx(probability, abs=1e-4)  # calibrated
        assert rows[prediction.image].label == name or probability == pytest.approx(0.5, abs=1e-3)
    assert len(result.next) == 6
    assert min(row.probability for row in result.proposed) >= limit > max(row.probability for row in result.rest)
    assert "held-out images" in result.check


def test_probabilities_in_blocks_are_the_same(run: RunResult, unlabelled: Path, monkeypatch) -> None:
    whole = label(run.out, unlabelled, num=6, quiet=True)
    monkeypatch.setattr(labelling, "MAX_VALUES", 3 * len(TWO))
    blocks = label(run.out, unlabelled, num=6, quiet=True)
    assert [row.image for row in blocks.next] == [row.image for row in whole.next]
    assert blocks.check == whole.check
    probabilities = [{row.image: row.probability for row in result.rest} for result in (blocks, whole)]
    assert probabilities[0] == pytest.approx(probabilities[1])


def test_the_tables_are_data_for_training(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    """They also list the images of the run. Training refuses the empty labels of next.csv until they are written."""
    out = tmp_path / "out"
    arguments = ["label", str(run.out), str(unlabelled), "--num", "4", "--min-probability", "0.5", "--out", str(out)]
    assert main([*arguments, "--quiet"]) == 0
    assert "proposed labels: 16 images" in capsys.readouterr().out
    header, *rows = csv.reader((out / "proposed.csv").read_text().splitlines())
    assert header == ["path", "label", "probability", "action", "split"]
    assert {tuple(row[3:]) for row in rows[:16]} == {("accept", "train")}
    assert sorted(row[0] for row in rows[16:]) == sorted(map(str, Path(run.data).rglob("*.png")))
    assert all(row[1] == Path(row[0]).parent.name for row in rows[16:])
    assert len(open_data(out / "proposed.csv").val) == run.count  # no accuracy on labels that the model proposed

    with pytest.raises(DataError, match=r"must name an image and its class; row 2 .* Fill it in, or delete"):
        open_data(out / "next.csv")
    header, *rows = csv.reader((out / "next.csv").read_text().splitlines())
    assert {(row[1], row[3]) for row in rows[:4]} == {("", "label")}
    lines = [header, *([row[0], "green", *row[2:]] for row in rows[:4]), *rows[4:]]
    (out / "next.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    assert open_data(out / "next.csv").classes == ["blue", "green", "red"]
    assert main([*arguments, "--quiet"]) == 2
    assert main([*arguments, "--quiet", "--force"]) == 0


def test_images_of_the_run_are_left_out(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(unlabelled / "blue", tmp_path / "both" / "blue")
    shutil.copytree(Path(run.data) / "red", tmp_path / "both" / "known")
    assert main(["label", str(run.out), str(tmp_path / "both"), "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["labelled"] == 12
    assert sum(len(result[name]) for name in ("next", "proposed", "rest")) == 10
    for model in (run.out, run.out / "best"):
        with pytest.raises(DataError, match="all 24 are among the images of the run"):
            label(model, run.data, quiet=True)


def test_the_images_of_the_run_may_be_gone(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    copy, images = shutil.copytree(run.out, tmp_path / "run"), shutil.copytree(unlabelled, tmp_path / "images")
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run.data), str(tmp_path / "gone")))
    shutil.copy(next(Path(run.data).rglob("*.png")), images / "known.png")
    result = label(copy, images, num=3, out=tmp_path / "out")
    assert (len(result.next), result.check, result.labelled) == (3, "", 1)
    assert "The images of the run are not used: " in capsys.readouterr().err
    assert len((tmp_path / "out" / "next.csv").read_text().splitlines()) == 4
    (copy / FINGERPRINT).unlink()
    assert label(copy, images, num=3).labelled == 0
    assert "Which images are already labelled is unknown" in capsys.readouterr().err


def test_the_precision_is_that_of_the_run_unless_it_is_emulated_here(
    run: RunResult, tmp_path: Path, monkeypatch
) -> None:
    mixed = shutil.copytree(run.out, tmp_path / "run")
    recipe = load_recipe(mixed / "recipe.yaml")
    (mixed / "recipe.yaml").write_text(dump(dataclasses.replace(recipe, precision="bf16")))
    monkeypatch.setattr(labelling, "bf16_note", lambda *_: None)
    assert (labelling._precision_of(mixed, "cpu"), labelling._precision_of(run.out, "cpu")) == ("bf16", "fp32")
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "of", lambda device: SimpleNamespace(device=torch.device("mps")))
        assert labelling._precision_of(mixed, "auto") == "fp32"
    monkeypatch.setattr(labelling, "bf16_note", lambda *_: "This processor emulates bf16.")
    assert labelling._precision_of(mixed, "cpu") == "fp32"


def test_bad_input(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    bad, nameless = tmp_path / "bad.png", shutil.copytree(run.out / "best", tmp_path / "nameless")
    bad.write_bytes(b"no image")
    (tmp_path / "empty").mkdir()
    config = json.loads((nameless / "config.json").read_text())
    del config["label_names"]
    (nameless / "config.json").write_text(json.dumps(config))
    for model, images, more, error, message in (
        (run.out, bad, {}, DataError, "At least one image must be readable"),
        (run.out, tmp_path / "empty", {}, DataError, "a folder without images"),
        (run.out, unlabelled, {"num": 0}, UsageError, "num must be a whole number at least 1; got 0"),
        (run.out, unlabelled, {"out": tmp_path / "label.csv"}, UsageError, "label.csv' is the name of a file"),
        (run.out, unlabelled, {"min_probability": 1.5}, UsageError, "min_probability must be .*; got 1.5"),
        (nameless, unlabelled, {}, CheckpointError, "Labels are class names"),
    ):
        with pytest.raises(error, match=message):
            label(model, images, quiet=True, **more)
    assert main(["label", str(run.out), str(bad), str(unlabelled), "--quiet"]) == 3
    assert "bad.png" in capsys.readouterr().err
