"""Images to label next, and proposed labels."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from weft.checkpoints import load_model_dir
from weft.cli import main
from weft.errors import CheckpointError, DataError, UsageError
from weft.inference import evaluate, predict
from weft.machine.runtime import Runtime
from weft.recipes import dump, load_recipe
from weft.runs.directory import FINGERPRINT
from weft.train import RunResult, label, labelling, train
from weft.train.labelling import UNCERTAIN_SHARE, choose

COLOURS = {"bee": (120, 130, 90), "dog": (110, 120, 130)}
PROBE = {"head_init": "probe", "epochs": 0, "batch_size": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


def paint(folder: Path, seed: int, per_class: int) -> Path:
    """Noisy images of two colours."""
    random = np.random.default_rng(seed)
    for name in ("bee", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = np.clip(np.array(COLOURS[name]) + random.normal(0, 60, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("label")
    data = paint(folder / "data", 0, 12)
    return train(data, model="levit_nano_32", settings=PROBE, out=folder / "run", device="cpu", quiet=True)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("more") / "more", 1, 10)


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
    monkeypatch.setattr(labelling, "MAX_SIMILARITIES", 3 * 25)
    assert choose(points, uncertain(40), known, 10) == whole


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_no_image_is_chosen_twice_and_never_more_than_there_are(budget: int) -> None:
    chosen = choose(np.ones((4, 3)), uncertain(4), np.ones((2, 3)), budget)
    assert sorted(chosen) == sorted(set(chosen))
    assert len(chosen) == min(budget, 4)


def test_labels_are_those_of_predict_and_the_files_stay(run: RunResult, unlabelled: Path, tmp_path: Path) -> None:
    def state() -> dict[str, str]:
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in unlabelled.rglob("*.png")}

    before = state()
    result = label(run.out, unlabelled, num=6, min_probability=0.6, out=tmp_path / "out", quiet=True)
    assert state() == before
    rows = [*result.next, *result.proposed, *result.rest]
    assert sorted(row.image for row in rows) == sorted(before)
    expected = {p.image: p.top[0] for p in predict(run.out, unlabelled, top_k=1, quiet=True)}
    for row in rows:
        name, probability = expected[row.image]
        assert row.probability == pytest.approx(probability, abs=1e-4)  # calibrated
        assert row.label == name or row.probability == pytest.approx(0.5, abs=1e-3)
    assert len(result.next) == 6
    assert all(row.probability >= 0.6 for row in result.proposed)
    assert all(row.probability < 0.6 for row in result.rest)
    assert "held-out images" in result.check


def test_tables_with_the_images_of_the_run_are_data_for_training(
    run: RunResult, unlabelled: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "out"
    arguments = ["label", str(run.out), str(unlabelled), "--num", "4", "--min-probability", "0.5", "--out", str(out)]
    assert main([*arguments, "--quiet"]) == 0
    assert "proposed labels: 16 images" in capsys.readouterr().out
    header, *rows = csv.reader((out / "proposed.csv").read_text().splitlines())
    assert header == ["path", "label", "probability", "action", "split"]
    assert {tuple(row[3:]) for row in rows[:16]} == {("accept", "train")}
    assert sorted(row[0] for row in rows[16:]) == sorted(map(str, Path(run.data).rglob("*.png")))
    assert all(row[1] == Path(row[0]).parent.name for row in rows[16:])
    again = train(out / "proposed.csv", model="levit_nano_32", settings=PROBE, out=tmp_path / "again", quiet=True)
    assert again.count == run.count  # no accuracy on labels that the model itself proposed
    assert evaluate(again.out, run.data, quiet=True).count == run.count
    # in next.csv the labels are empty: training refuses it until a person has written them
    with pytest.raises(DataError, match=r"must name an image and its class; row 2 .* Fill it in, or delete"):
        train(out / "next.csv", model="levit_nano_32", settings=PROBE, out=tmp_path / "refused", quiet=True)
    header, *rows = csv.reader((out / "next.csv").read_text().splitlines())
    assert [row[1] for row in rows[:4]] == [""] * 4
    assert {row[3] for row in rows[:4]} == {"label"}
    lines = [header, *([row[0], "wasp", *row[2:]] for row in rows[:4]), *rows[4:]]
    (out / "next.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    wasps = train(out / "next.csv", model="levit_nano_32", settings=PROBE, out=tmp_path / "wasps", quiet=True)
    assert load_model_dir(wasps.out / "best")[1] == ["bee", "dog", "wasp"]
    assert main([*arguments, "--quiet"]) == 2
    assert main([*arguments, "--quiet", "--force"]) == 0


def test_images_of_the_run_are_left_out(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    both = tmp_path / "both"
    shutil.copytree(unlabelled / "bee", both / "bee")
    source = Path(run.data)
    shutil.copytree(source / "dog", both / "known")
    assert main(["label", str(run.out), str(both), "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["labelled"] == 12
    assert sum(len(result[name]) for name in ("next", "proposed", "rest")) == 10
    for model in (run.out, run.out / "best"):
        with pytest.raises(DataError, match="all 24 are among the images of the run"):
            label(model, source, quiet=True)
        assert "held-out images" in label(model, unlabelled, num=1, quiet=True).check


def test_it_works_without_the_images_of_the_run(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    copy, images = shutil.copytree(run.out, tmp_path / "run"), shutil.copytree(unlabelled, tmp_path / "images")
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run.data), str(tmp_path / "gone")))
    shutil.copy(next(Path(run.data).rglob("*.png")), images / "known.png")
    result = label(copy, images, num=3, out=tmp_path / "out")
    assert (len(result.next), result.check, result.labelled) == (3, "", 1)
    err = capsys.readouterr().err
    assert "already labelled is unknown" not in err
    assert "The images of the run are not used: " in err
    assert len((tmp_path / "out" / "next.csv").read_text().splitlines()) == 4
    (copy / FINGERPRINT).unlink()
    assert label(copy, images, num=3).labelled == 0
    assert "Which images are already labelled is unknown" in capsys.readouterr().err


def test_the_precision_is_that_of_the_run_unless_it_is_emulated_here(
    run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    assert main(["label", str(run.out), str(bad), str(unlabelled), "--quiet"]) == 3
    assert "bad.png" in capsys.readouterr().err
    with pytest.raises(DataError, match="At least one image must be readable"):
        label(run.out, bad, quiet=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a folder without images"):
        label(run.out, tmp_path / "empty", quiet=True)
    with pytest.raises(UsageError, match=r"num must be a whole number at least 1; got 0"):
        label(run.out, unlabelled, num=0, quiet=True)
    with pytest.raises(UsageError, match=r"The output must be a directory; .*label.csv' is the name of a file"):
        label(run.out, unlabelled, out=tmp_path / "label.csv", quiet=True)
    with pytest.raises(UsageError, match=r"min_probability must be a number above 0 and at most 1; got 1\.5"):
        label(run.out, unlabelled, min_probability=1.5, quiet=True)
    config = json.loads((run.out / "best" / "config.json").read_text())
    shutil.copytree(run.out / "best", tmp_path / "nameless")
    del config["label_names"]
    (tmp_path / "nameless" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="Labels are class names"):
        label(tmp_path / "nameless", unlabelled, quiet=True)
