"""Extension of a run: the classifier that training on all images at once finds, without the old images."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weft.checkpoints import load_model_dir
from weft.cli import main
from weft.errors import CheckpointError, DataError, UsageError
from weft.inference import Predictor, evaluate
from weft.recipes import Recipe, dump, load_recipe
from weft.runs.directory import FEATURES
from weft.train import RunResult, train
from weft.train.extend import extended_recipe
from weft.train.request import Request
from weft.train.stored_features import StoredFeatures

COLOURS = {"ant": (90, 110, 120), "bee": (120, 130, 90), "cat": (130, 100, 100), "dog": (110, 120, 130)}
PROBE = {"head_init": "probe", "epochs": 0, "batch_size": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes of noisy images, of one colour each; all differ."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "all"
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(np.array(colour) + random.normal(0, 60, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{name}{number:02}.png")
    return folder


def part(images: Path, folder: Path, *classes: str) -> Path:
    for name in classes:
        shutil.copytree(images / name, folder / name)
    return folder


@pytest.fixture(scope="module", params=["cvt_nano_32", "levit_nano_32"])
def first(request: pytest.FixtureRequest, images: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run on two of the classes, whose images no longer exist."""
    folder = tmp_path_factory.mktemp("first")
    data = part(images, folder / "data", "bee", "dog")
    result = train(data, model=request.param, settings=PROBE, out=folder / "run", device="cpu", quiet=True)
    shutil.rmtree(data)
    return result


def outputs(run: Path, images: Path) -> tuple[np.ndarray, list[str]]:
    predictor = Predictor.load(run, fold=False, quiet=True)
    files = sorted(images.rglob("*.png"))
    return np.stack(
        [p.probabilities for p in predictor.predict([predictor.prepare(f) for f in files])]
    ), predictor.classes


def test_it_equals_training_on_all_classes_at_once(
    images: Path, first: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.train.linear_probe.STRENGTHS", (0.1,))  # the folds differ with the order of the images
    more = part(images, tmp_path / "more", "ant", "cat")
    extended = train(more, extend=first.out, out=tmp_path / "extended", quiet=True)
    recipe = first.out / "recipe.yaml"
    whole = train(images, recipe=recipe, out=tmp_path / "whole", quiet=True)
    probabilities, classes = outputs(extended.out, images)
    expected, names = outputs(whole.out, images)
    assert classes == ["bee", "dog", "ant", "cat"]
    np.testing.assert_allclose(probabilities[:, [classes.index(name) for name in names]], expected, atol=0.02)
    assert (extended.top1, extended.count) == (pytest.approx(whole.top1), whole.count)
    old = evaluate(first.out, part(images, tmp_path / "old", "bee", "dog"), split="val", quiet=True)
    assert extended.extension is not None
    assert (extended.extension.before, extended.extension.old_count) == (pytest.approx(old.top1), old.count)
    after = evaluate(extended.out, tmp_path / "old", split="val", quiet=True)
    assert extended.extension.after == pytest.approx(after.top1)
    new = evaluate(extended.out, more, quiet=True)
    assert (extended.extension.new, extended.extension.new_count) == (pytest.approx(new.top1), new.count)


def test_unknown_images_are_those_that_training_on_all_classes_finds(
    images: Path, first: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.train.linear_probe.STRENGTHS", (0.1,))  # the folds differ with the order of the images
    other = tmp_path / "other"
    other.mkdir()
    for number in range(8):
        Image.new("RGB", (32, 32), (0, 30 * number, 255)).save(other / f"{number}.png")
    more = part(images, tmp_path / "more", "ant", "cat")
    extended = train(more, extend=first.out, other=other, out=tmp_path / "extended", quiet=True)
    whole = train(images, recipe=first.out / "recipe.yaml", other=other, out=tmp_path / "whole", quiet=True)
    files = [*sorted(images.rglob("*.png")), *sorted(other.iterdir())]
    scores = []
    for run in (extended, whole):
        predictor = Predictor.load(run.out, quiet=True)
        prepared = [predictor.prepare(file) for file in files]
        scores.append(predictor.scores(predictor.array(prepared)))
    np.testing.assert_allclose(*scores, atol=0.05)
    thresholds = [json.loads((run.out / "best" / "config.json").read_text())["unknown"] for run in (extended, whole)]
    assert [row["other_count"] for row in thresholds] == [8, 8]
    assert thresholds[0]["value"] == pytest.approx(thresholds[1]["value"], abs=0.3)

    shutil.rmtree(other)  # the next extension has only the features, and no images of no class
    (next_class := tmp_path / "next" / "elk").mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (32, 32), (255, 40 * number, 0)).save(next_class / f"{number}.png")
    again = train(next_class.parent, extend=whole.out, out=tmp_path / "again", quiet=True)
    assert json.loads((again.out / "best" / "config.json").read_text())["unknown"]["other_count"] == 0


def test_all_other_weights_stay(images: Path, first: RunResult, tmp_path: Path) -> None:
    """Also BatchNorm in the head of LeViT."""
    extended = train(part(images, tmp_path / "more", "ant"), extend=first.out, out=tmp_path / "run", quiet=True)
    before, after = (load_model_dir(run / "best")[0] for run in (first.out, extended.out))
    linear = {f"{name}.{kind}" for name, m in after.named_modules() if getattr(m, "out_features", 0) == 3
              for kind in ("weight", "bias")}  # fmt: skip
    state = before.state_dict()
    for name, value in after.state_dict().items():
        if name not in linear:
            torch.testing.assert_close(value, state[name], rtol=0, atol=0)


def test_the_result_is_a_usual_run(images: Path, first: RunResult, tmp_path: Path, capsys) -> None:
    more = part(images, tmp_path / "more", "cat")
    out = tmp_path / "run"
    arguments = ["train", str(more), "--extend", str(first.out), "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "new classes: cat" in printed.out
    assert "old held-out images before: " in printed.out
    assert "old held-out images after: " in printed.out
    assert f"{FEATURES}: features of " in printed.err
    assert main([*arguments, "--quiet"]) == 2  # taken
    assert json.loads((out / "extension.json").read_text())["classes"] == ["cat"]
    assert [row["epoch"] for row in csv.DictReader((out / "metrics.csv").read_text().splitlines())] == ["0"]
    assert "old held-out images after" in (out / "report" / "report.html").read_text()
    assert main(["evaluate", str(out), str(more), "--quiet"]) == 0
    again = train(recipe=out / "recipe.yaml", out=tmp_path / "again", quiet=True)
    np.testing.assert_array_equal(outputs(again.out, images)[0], outputs(out, images)[0])
    ant = part(images, tmp_path / "ant", "ant")
    twice = train(ant, extend=out, out=tmp_path / "twice", quiet=True)
    assert outputs(twice.out, images)[1] == ["bee", "dog", "cat", "ant"]
    with pytest.raises(CheckpointError, match=r"state"):
        train(resume=out, quiet=True)


def test_new_images_of_old_classes_are_added_and_copies_left_out(
    images: Path, first: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = part(images, tmp_path / "more", "bee", "dog", "ant")
    before = StoredFeatures.read(first.out / FEATURES)
    extra = sorted((more / "ant").glob("*.png"))[:2]
    for file in extra:
        shutil.move(file, more / "bee" / f"new-{file.name}")
    wrong = next((more / "dog").glob("*.png"))
    shutil.copy(wrong, more / "ant" / "wrong.png")
    train(more, extend=first.out, out=tmp_path / "run")
    err = " ".join(capsys.readouterr().err.split())
    assert f"Left out: {len(before.labels) + 1} of " in err
    assert "1 of them in another class" in err
    assert "(dog, now ant)" in err
    assert "More images of classes of the run: bee 2." in err
    after = StoredFeatures.read(tmp_path / "run" / FEATURES)
    assert len({bytes(row) for row in after.hashes}) == len(after.hashes) == 36  # all but those of the cat
    np.testing.assert_array_equal(after.labels[: len(before.labels)], before.labels)


def test_groups_of_the_run_that_the_new_images_do_not_have(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = part(images, tmp_path / "data", "bee", "dog")
    run = train(data, model="levit_nano_32", settings=PROBE, group=r"bee\d|dog\d", out=tmp_path / "run", quiet=True)
    more = part(images, tmp_path / "more", "ant")
    extended = train(more, extend=run.out, out=tmp_path / "extended")
    assert "The new images are in no groups, since those of the run do not apply." in capsys.readouterr().err
    stored = StoredFeatures.read(extended.out / FEATURES)
    assert {"bee0", "dog0", ""} <= set(stored.groups.tolist())
    new = evaluate(extended.out, more, quiet=True)  # split as the extension split it
    assert extended.extension is not None
    assert (new.count, new.top1) == (extended.extension.new_count, pytest.approx(extended.extension.new))
    with pytest.raises(DataError, match="matches none of 12"):
        train(more, extend=run.out, group="kennel", out=tmp_path / "refused", quiet=True)


def test_new_images_of_a_group_of_the_run_are_on_its_side(images: Path, tmp_path: Path) -> None:
    """Groups are the last digits of the names."""

    def digits(run: RunResult, side: bool) -> set[str]:
        stored = StoredFeatures.read(run.out / FEATURES)
        return set(stored.groups[stored.is_held_out == side].tolist())

    def only(name: str, digit: str) -> Path:
        (folder := tmp_path / f"{name}{digit}" / name).mkdir(parents=True)
        for file in (images / name).glob(f"*{digit}.png"):
            shutil.copy(file, folder)
        return folder.parent

    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more", "ant")
    run = train(data, model="levit_nano_32", settings=PROBE, group=r"(\d)\.png", out=tmp_path / "run", quiet=True)
    extended = train(more, extend=run.out, out=tmp_path / "extended", quiet=True)
    assert (digits(extended, False), digits(extended, True)) == (digits(run, False), digits(run, True))
    assert extended.extension is not None
    assert evaluate(extended.out, more, quiet=True).count == extended.extension.new_count > 0
    trained, held_out = only("cat", min(digits(run, False))), only("cat", min(digits(run, True)))
    with pytest.raises(DataError, match=r"'cat' of .* has only held-out images"):
        train(held_out, extend=run.out, out=tmp_path / "refused", quiet=True)
    result = train(trained, extend=run.out, out=tmp_path / "cat", quiet=True)
    assert result.extension is not None
    assert result.extension.new_count == 0


def test_groups_on_another_side_of_a_given_split_are_named(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more/train", "ant")
    run = train(data, model="levit_nano_32", settings=PROBE, group=r"(\d)\.png", out=tmp_path / "run", quiet=True)
    train(more.parent, extend=run.out, out=tmp_path / "extended")
    assert "The new data's own split has groups on another side than the run" in capsys.readouterr().err


def test_class_names_are_matched_in_any_unicode_form(images: Path, tmp_path: Path) -> None:
    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more", "ant", "cat")
    (data / "bee").rename(data / "caf\u00e9")
    (more / "ant").rename(more / "cafe\u0301")
    run = train(data, model="levit_nano_32", settings=PROBE, out=tmp_path / "run", quiet=True)
    extended = train(more, extend=run.out, out=tmp_path / "extended", quiet=True)
    assert load_model_dir(extended.out / "best")[1] == ["caf\u00e9", "dog", "cat"]
    (more / "cat").rename(more / "c\nt")
    with pytest.raises(DataError, match="must have no control characters"):
        train(more, extend=run.out, out=tmp_path / "refused", quiet=True)


def test_the_precision_is_that_of_the_run(images: Path, tmp_path: Path) -> None:
    """Features in another precision are not used."""
    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more", "ant")
    settings = {"out": tmp_path / "run", "precision": "bf16", "device": "cpu"}
    run = train(data, model="levit_nano_32", settings=PROBE, **settings, quiet=True)
    shutil.rmtree(data)
    extended = train(more, extend=run.out, out=tmp_path / "extended", quiet=True)
    assert load_recipe(extended.out / "recipe.yaml").precision == "bf16"


def test_a_recipe_file_is_laid_over_that_of_the_run(tmp_path: Path) -> None:
    run, file, more = tmp_path / "run", tmp_path / "recipe.yaml", str(tmp_path)
    run.mkdir()
    old = {"model": "levit_nano_32", "pretrained": True, "optim.freeze": "backbone", "precision": "bf16", "seed": 3}
    (run / "recipe.yaml").write_text(dump(load_recipe(None, [*old.items(), ("data.source", "old"), ("epochs", 2)])))

    def extended(recipe: Path | None, settings: dict[str, Any], given: dict[str, Any]) -> Recipe:
        return extended_recipe(Request.of(more if given else None, recipe, settings, given))

    first = extended(None, {"loss.class_weights": "balanced", "data.max_bad": 0.5}, {"extend": str(run), "seed": 7})
    assert (first.seed, first.precision, first.data.source, first.epochs) == (7, "bf16", more, 0)
    file.write_text(dump(first))
    assert extended(file, {}, {}) == first
    file.write_text("seed: 9\nloss:\n  class_weights: balanced\n")
    other = extended(file, {}, {"extend": str(run)})
    assert (other.seed, other.precision, other.loss.class_weights) == (9, "bf16", "balanced")
    with pytest.raises(UsageError, match="logit_adjustment"):
        extended(file, {"loss.logit_adjustment": 1}, {"extend": str(run)})


def test_without_features_the_images_are_those_that_the_run_had(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more", "ant")
    run = train(data, model="levit_nano_32", settings=PROBE, out=tmp_path / "run", quiet=True)
    before = StoredFeatures.read(run.out / FEATURES)
    (run.out / FEATURES).unlink()
    for file in (images / "cat").glob("*.png"):
        shutil.copy(file, data / "bee")
    next((data / "dog").glob("*.png")).unlink()
    extended = train(more, extend=run.out, out=tmp_path / "extended")
    assert f"23 of the 24 images of the run are in {data}; 12 others there are left out." in " ".join(
        capsys.readouterr().err.split()
    )
    after = StoredFeatures.read(extended.out / FEATURES).chosen(np.arange(23))
    sides = dict(zip(before.keys.tolist(), before.is_held_out.tolist(), strict=True))
    assert dict(zip(after.keys.tolist(), after.is_held_out.tolist(), strict=True)).items() < sides.items()
    shutil.rmtree(data)
    part(images, data, "cat", "ant")
    (data / "cat").rename(data / "bee")
    (data / "ant").rename(data / "dog")
    with pytest.raises(DataError, match=r"none of the training images of .* is in"):
        train(more, extend=run.out, out=tmp_path / "refused", quiet=True)


def test_the_images_of_the_first_run_are_split_as_it_split_them(images: Path, tmp_path: Path) -> None:
    """By default, an extended run is evaluated on the held-out images of the data that it extends."""
    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more", "ant")
    settings = {**PROBE, "data.val_fraction": 0.4}
    first = train(data, model="levit_nano_32", settings=settings, out=tmp_path / "first", quiet=True)
    second = train(more, extend=first.out, out=tmp_path / "second", quiet=True)
    third = train(part(images, tmp_path / "c", "cat"), extend=second.out, out=tmp_path / "third", quiet=True)
    for run in (second, third):
        assert evaluate(run.out, data, quiet=True).count == first.count == 10
        assert evaluate(run.out, more, quiet=True).count == 5


def test_an_evaluation_accepts_the_bad_files_that_training_accepted(images: Path, tmp_path: Path) -> None:
    data = part(images, tmp_path / "data", "bee", "dog")
    for number in range(8):
        (data / "bee" / f"bad{number}.png").write_bytes(b"no image")
    settings = {**PROBE, "data.max_bad": 0.5}
    run = train(data, model="levit_nano_32", settings=settings, out=tmp_path / "run", quiet=True)
    assert evaluate(run.out, data, quiet=True).count == run.count
    with pytest.raises(DataError, match=r"At most 0\.1 of the files may be bad"):
        evaluate(run.out, part(data, tmp_path / "other", "bee", "dog"), quiet=True)


def test_nothing_new_is_refused(images: Path, first: RunResult, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all .* are already in the run"):
        train(part(images, tmp_path / "d", "bee", "dog"), extend=first.out, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"img_size": 48}, "keeps its img_size"),
        ({"model": "ceit_nano_32"}, "keeps its model"),
        ({"epochs": 2}, "does not support epochs"),
        ({"folds": 3}, "does not support folds"),
        ({"start_from": "x"}, "does not support start_from"),
        ({"from_scratch": True}, "from_scratch does not apply"),
        ({"max_time": "1h"}, "max_time does not apply"),
        ({"stop_after": 1}, "stop_after does not apply"),
        ({"override": True}, "--override changes settings of a run that is resumed"),
        ({"resume": "x"}, "Omit one of them"),
    ],
)
def test_settings_that_do_not_apply(
    arguments: dict, message: str, images: Path, first: RunResult, tmp_path: Path
) -> None:
    more = part(images, tmp_path / "more", "ant")
    if "start_from" in arguments:
        arguments = {"start_from": first.out}
    with pytest.raises(UsageError, match=message):
        train(more, extend=first.out, out=tmp_path / "run", quiet=True, **arguments)
    assert not (tmp_path / "run").exists()


def test_the_recipe_of_digits_does_not_apply(first: RunResult, tmp_path: Path) -> None:
    result = train("digits", extend=first.out, limit=20, out=tmp_path / "run", quiet=True)
    assert result.extension is not None
    assert result.extension.classes == [str(digit) for digit in range(10)]


def test_the_old_run_is_not_overwritten(images: Path, first: RunResult, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stays as it is"):
        train(part(images, tmp_path / "more", "ant"), extend=first.out, out=first.out, force=True, quiet=True)


def test_data_and_runs_that_cannot_be_used(images: Path, first: RunResult, tmp_path: Path) -> None:
    more = part(images, tmp_path / "more", "ant")
    with pytest.raises(CheckpointError, match="--extend must name a run directory"):
        train(more, extend=first.out / "best", out=tmp_path / "run", quiet=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must contain images"):
        train(tmp_path / "empty", extend=first.out, out=tmp_path / "run", quiet=True)
    (tmp_path / "bad" / "new").mkdir(parents=True)
    (tmp_path / "bad" / "new" / "x.png").write_bytes(b"no image")
    with pytest.raises(DataError):
        train(tmp_path / "bad", extend=first.out, out=tmp_path / "run", quiet=True)
    copy = tmp_path / "copy"
    shutil.copytree(first.out, copy)
    (copy / FEATURES).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"is damaged\. Remove it"):
        train(more, extend=copy, out=tmp_path / "run", quiet=True)
    (copy / FEATURES).unlink()
    with pytest.raises(DataError, match=r"features of its images must be stored, or its images must exist"):
        train(more, extend=copy, out=tmp_path / "run", quiet=True)


def test_features_are_computed_from_the_old_images_if_they_exist(images: Path, tmp_path: Path) -> None:
    """A run that trained its layers stores no features."""
    data, more = part(images, tmp_path / "data", "bee", "dog"), part(images, tmp_path / "more", "ant")
    settings = {"batch_size": 8, "augment.color_jitter": 0}
    run = train(data, model="levit_nano_32", epochs=1, settings=settings, out=tmp_path / "run", quiet=True)
    assert not (run.out / FEATURES).exists()
    extended = train(more, extend=run.out, out=tmp_path / "extended", quiet=True)
    assert extended.extension is not None
    assert extended.extension.before == pytest.approx(run.top1)
    assert (extended.out / FEATURES).exists()


def test_stored_features_of_other_weights_are_not_used(images: Path, first: RunResult, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(first.out, copy)
    stored = StoredFeatures.read(copy / FEATURES)
    StoredFeatures(**{**vars(stored), "network": "other"}).write(copy / FEATURES)
    with pytest.raises(DataError, match="belongs to other weights"):
        train(part(images, tmp_path / "more", "ant"), extend=copy, out=tmp_path / "run", quiet=True)
