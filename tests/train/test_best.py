"""What a run says and keeps where top-1 misleads: rare classes, and classes that are mirror images of each other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from tests.train.conftest import SHORT
from weft.cli import main
from weft.errors import UsageError
from weft.inference.measurement import measure
from weft.inference.metrics import Evaluation
from weft.train import linear_probe, run, train
from weft.train.linear_probe import Balance, balanced_score
from weft.train.mirrored_classes import mirrored_pairs, mirrored_text

SCRIPT = [(90.0, 50.0, 0.4), (80.0, 70.0, 0.5), (85.0, 60.0, 0.3), (70.0, 55.0, 0.6), (60.0, 50.0, 0.7)]


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted(Evaluation):
    """Evaluations with the top-1, balanced accuracy and loss of a script."""

    script: tuple[float, float, float] = (0.0, 0.0, 0.0)
    top1 = property(lambda self: self.script[0])
    balanced_accuracy = property(lambda self: self.script[1])
    loss = property(lambda self: self.script[2])


def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(SCRIPT)

    def evaluate(*args: Any, **kwargs: Any) -> Evaluation:
        return Scripted(**vars(measure(*args, **kwargs)), script=next(numbers))

    monkeypatch.setattr(run, "measure", evaluate)


@pytest.mark.parametrize(("best", "epoch", "stopped_after"), [("top1", 1, 3), ("balanced", 2, 4), ("loss", 3, 5)])
def test_the_measure_chooses_the_best_model_and_ends_the_run(
    best: str, epoch: int, stopped_after: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch)
    settings = {"best": best, "patience": 2}
    result = train(photos, out=tmp_path / "run", settings=settings, **{**SHORT, "epochs": 5})
    assert (result.best_epoch, result.epochs) == (epoch, stopped_after)
    assert result.top1 == SCRIPT[epoch - 1][0]


def test_the_measure_does_not_change_on_resume(photos: Path, tmp_path: Path) -> None:
    train(photos, out=tmp_path / "run", **{**SHORT, "epochs": 1})
    with pytest.raises(UsageError, match="best"):
        train(resume=tmp_path / "run", settings={"best": "loss"}, override=True, quiet=True)


def test_the_penalty_of_a_probe_is_chosen_by_classes_that_count_the_same() -> None:
    random = np.random.default_rng(0)
    labels = np.array([0] * 36 + [1] * 4)
    rows = random.normal(0, 1, (40, 3)) + labels[:, None]
    model = LogisticRegression().fit(rows, labels)
    losses = [log_loss(labels[labels == k], model.predict_proba(rows[labels == k]), labels=[0, 1]) for k in (0, 1)]
    assert balanced_score(model, rows, labels) == pytest.approx(-(losses[0] + losses[1]) / 2)
    assert balanced_score(model, rows[:36], labels[:36]) == pytest.approx(-losses[0])  # no image of the other class


def test_the_balance_of_a_run_decides_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []
    monkeypatch.setattr(linear_probe, "balanced_score", lambda model, rows, labels: scored.append(len(rows)) or 0.0)
    views, labels = np.random.default_rng(0).normal(size=(30, 2, 4)), np.arange(30) % 3
    linear_probe.fit(views, labels, 3)
    assert not scored
    for balance in (Balance(is_weighted=True), Balance(is_chosen_by_class=True)):
        scored.clear()
        linear_probe.fit(views, labels, 3, balance=balance)
        assert set(scored) == {12}  # six images of a fold, and their mirror images


def features(mirror: dict[int, int], per_class: int = 20, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Features of four classes; the mirror images of a class look like those of the class that `mirror` names."""
    random = np.random.default_rng(0)
    centres, labels = 3 * random.normal(0, 1, (4, 8)), np.repeat(np.arange(4), per_class)
    seen = [labels, np.array([mirror.get(label, label) for label in labels.tolist()])]
    return np.stack([centres[one] + random.normal(0, noise, (len(labels), 8)) for one in seen]), labels


def test_classes_that_are_mirror_images_are_found() -> None:
    pairs = mirrored_pairs(*features({1: 3, 3: 1}))
    assert [(pair.first, pair.second) for pair in pairs] == [(1, 3)]
    assert pairs[0].changed > 0.9 * pairs[0].images == 36
    text = mirrored_text(pairs, ["cup", "left", "pot", "right"])
    assert "left and right" in text
    assert "--set augment.hflip=false" in text


@pytest.mark.parametrize("mirror", [{}, {1: 3}, {0: 1, 1: 2, 2: 0}], ids=["none", "one-way", "cycle"])
def test_other_classes_are_not(mirror: dict[int, int]) -> None:
    assert mirrored_pairs(*features(mirror)) == []


def test_chance_is_not_taken_for_mirror_images() -> None:
    for seed in range(50):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 2, 30)
        assert mirrored_pairs(random.normal(0, 1, (2, 30, 8)), labels) == []
    assert mirrored_pairs(np.zeros((2, 4, 8)), np.array([0, 1, 0, 1])) == []
    assert mirrored_text([], []) == ""


def draw(folder: Path) -> Path:
    """Images of a blue square, at the left or at the right."""
    random = np.random.default_rng(0)
    for name, left in (("left", 2), ("right", 22)):
        (folder / name).mkdir(parents=True)
        for number in range(50):
            pixels, top = random.integers(90, 160, (32, 32, 3), dtype=np.uint8), int(random.integers(2, 20))
            pixels[top : top + 9, left : left + 9] = (30, 60, 230)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


def test_a_run_on_mirrored_classes_names_the_setting_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = draw(tmp_path / "data")
    probe = ["--model", "levit_nano_32", "--epochs", "0", "--set", "head_init=probe", "--quiet"]
    assert main(["train", str(data), "--out", str(tmp_path / "one"), *probe]) == 0
    assert "--set augment.hflip=false" in capsys.readouterr().out
    report = (tmp_path / "one" / "report" / "report.html").read_text(encoding="utf-8")
    assert "left and right" in report
    assert (
        main(["train", str(data), "--out", str(tmp_path / "two"), *probe, "--set", "augment.hflip=false", "--json"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["top1"] == 100
    assert result["notes"] == []


def test_the_last_lines_of_a_run_on_rare_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    for name, number in (("normal", 76), ("rare", 4)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(number):
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                tmp_path / "data" / name / f"{i}.png"
            )
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "data"), "--out", str(out), "--model", "levit_nano_32", "--epochs", "2"]) == 0
    printed = capsys.readouterr()
    assert "balanced accuracy: 50.00 % (mean recall of the classes)" in printed.out
    assert "1 class is never predicted: rare (1 image)." in printed.out
    assert "balanced 50.00 %" in printed.err
    assert main(["evaluate", str(out), str(tmp_path / "data"), "--quiet"]) == 0
    assert "1 class is never predicted: rare (1 image)." in capsys.readouterr().out
