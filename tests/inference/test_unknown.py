"""Images that show none of the classes are detected, by runs and their exports, in every verb."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from sklearn.metrics import roc_auc_score
from torch import nn

from tests.helpers import lively
from tests.models.tiny import settings_of
from tests.train.conftest import paint
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.unknown import (
    FILE,
    OriginalClassifier,
    Threshold,
    UnknownDetector,
    read_detector,
    unit_length,
)
from weft.cli import main
from weft.deploy import export
from weft.errors import CheckpointError, DataError, UsageError
from weft.inference import Predictor, evaluate, predict
from weft.inference.calibration import calibration_lines
from weft.inference.unknown import compare_scores, scores_of_files, set_threshold
from weft.recipes import load_recipe
from weft.report import markup
from weft.runs.directory import PUBLIC_CLASSIFIER
from weft.train import train
from weft.train.linear_probe import fit
from weft.train.unknown import _original_classifier


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that show no colour of the classes: noise and stripes."""
    folder, rng = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    stripes = np.indices((40, 40)).sum(0)[..., None] % 2 * [[[255] * 3]]
    for number in range(12):
        values = rng.integers(0, 256, (40, 40, 3)) if number % 2 else stripes
        Image.fromarray(values.astype(np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module", params=["levit_nano_32", pytest.param("ceit_nano_32", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, noise: Path) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    paint(folder / "data", 12)
    train(
        folder / "data",
        model=request.param,
        epochs=2,
        batch_size=12,
        out=folder / "run",
        unknown_images=str(noise),
        settings={"data.val_fraction": 0.34, **settings_of(request.param)},
        quiet=True,
    )
    return folder / "run"


def blobs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of three classes, their labels, and features of a fourth class."""
    rng = np.random.default_rng(seed)
    centres, labels = 4 * np.eye(4, 16, dtype=np.float32), np.arange(90) % 3
    features, other = (rng.normal(size=(count, 16)).astype(np.float32) for count in (90, 60))
    return centres[labels] + features, labels, centres[3] + other


def test_scores_tell_another_class_from_those_of_the_training_images() -> None:
    features, labels, other = blobs()
    seen, held_out = features[:60], features[60:]
    probe = fit(np.stack([seen, seen], 1), labels[:60], 3)

    def probabilities(rows: np.ndarray) -> np.ndarray:
        shares = np.exp(rows @ probe.weight.T + probe.bias)
        return shares / shares.sum(1, keepdims=True)

    mean = seen.mean(0)
    plain = UnknownDetector(mean, unit_length(seen - mean))
    # a classifier of 4 classes, of which the fourth resembles no training image
    original = OriginalClassifier(np.eye(4, 16, dtype=np.float32), np.zeros(4, np.float32), np.array([1, 1, 1, 0.0]))
    for detector in (plain, UnknownDetector(mean, unit_length(seen - mean), original)):
        known, unknown = (detector.scores(rows, probabilities(rows)) for rows in (held_out, other))
        assert roc_auc_score(np.r_[np.ones(30), np.zeros(60)], np.r_[known, unknown]) > 0.95


def test_similarities_of_the_original_classes_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    file, features = tmp_path / PUBLIC_CLASSIFIER, rng.normal(size=(20, 8)).astype(np.float32)
    save_file({"weight": rng.normal(size=(101, 8)).astype(np.float16), "bias": np.zeros(101, np.float32)}, file)
    whole = _original_classifier(tmp_path, features)
    monkeypatch.setattr("weft.train.unknown.ROWS", 30)
    blocks = _original_classifier(tmp_path, features)
    assert whole is not None
    assert blocks is not None
    np.testing.assert_allclose(blocks.known, whole.known, rtol=1e-5)
    assert 0 < whole.known.min() < whole.known.max() <= 1


def test_the_threshold_without_other_images_keeps_95_percent() -> None:
    known = np.random.default_rng(0).normal(size=200)
    threshold = set_threshold(known)
    assert threshold.unknown <= 10
    assert threshold.count == 200
    assert threshold.auroc is None
    assert set_threshold(known[:1]).unknown == 0
    assert np.abs(known - threshold.value).min() > 1e-4  # rounding in an export moves no image across it


def test_other_images_set_the_threshold() -> None:
    rng = np.random.default_rng(0)
    known, other = rng.normal(2, 1, 500), rng.normal(-2, 1, 300)
    threshold = set_threshold(known, other)
    assert -1 < threshold.value < 1
    assert threshold.value not in known
    assert threshold.value not in other
    counts = tuple(int((scores < threshold.value).sum()) for scores in (known, other))
    assert (threshold.unknown, threshold.other_unknown) == counts
    assert threshold.auroc == compare_scores(known, other, threshold.value).auroc > 0.99
    assert set_threshold(known, known).auroc == 0.5


def test_a_detector_is_read_as_it_was_written(tmp_path: Path) -> None:
    features, *_ = blobs()
    original = OriginalClassifier(*(np.ones(shape, np.float32) for shape in ((5, 16), (5,), (5,))))
    fitted = UnknownDetector(features.mean(0), unit_length(features), original, set_threshold(features[:, 0]))
    (tmp_path / FILE).write_bytes(fitted.serialized())
    record = Threshold(**fitted.record())
    found = read_detector(tmp_path, record)
    assert found is not None
    assert found.threshold == record
    assert found.serialized() == fitted.serialized()
    assert read_detector(tmp_path, None) is None
    (tmp_path / FILE).write_bytes(fitted.serialized()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        read_detector(tmp_path, record)


def test_a_run_has_a_threshold_of_its_other_images(run: Path, noise: Path) -> None:
    record = json.loads((run / "best" / "config.json").read_text())["unknown"]
    assert record["other_count"] == 12
    predictor = Predictor.load(run, quiet=True)
    scores = scores_of_files(predictor, noise, 5)
    assert int((scores < record["value"]).sum()) == record["other_unknown"]
    rows = predict(run, noise, quiet=True)
    assert sum(bool(row.unknown) for row in rows) == record["other_unknown"]
    assert rows[0].as_dict()["unknown"] in (True, False)
    model = load_model_dir(run / "best")[0]
    (_, calibration), (name, value) = calibration_lines(model)
    before, after = model.confidence.ece_before, model.confidence.ece_after
    assert calibration.endswith(f" error {before:.1f} points before, {after:.1f} after (cross-validated)")
    assert name == "images of no class"
    assert value.startswith(f"threshold {record['value']:.2f}; AUROC {record['auroc']:.3f}; unknown are ")
    assert f"{record['other_unknown']} of 12 other images" in value
    report = (run / "report" / "report.html").read_text()
    assert f"<dt>calibration</dt><dd>{markup.escaped(calibration)}</dd>" in report
    assert f"<dt>images of no class</dt><dd>{markup.escaped(value)}</dd>" in report


@pytest.mark.parametrize("other", ["none", "empty", "no_images"])
def test_other_images_are_checked_before_training(run, other, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_images").mkdir()
    (tmp_path / "no_images" / "x.jpg").write_bytes(b"no image")
    monkeypatch.setattr("weft.train.plan.make_plan", lambda *args, **kwargs: pytest.fail("the data were read"))
    monkeypatch.setattr("weft.inference.evaluation.Predictor.load", lambda *args, **kwargs: pytest.fail("loaded"))
    data = load_recipe(run / "recipe.yaml").data.source
    with pytest.raises(DataError, match=f"{other} has none that can be read"):
        train(data, unknown_images=str(tmp_path / other), out=tmp_path / "run", quiet=True)
    with pytest.raises(DataError, match=f"{other} has none that can be read"):
        evaluate(run, data, unknown_images=tmp_path / other, quiet=True)
    assert main(["train", str(data), "--unknown-images", str(tmp_path / other), "--quiet"]) == 3


def test_evaluate_measures_other_images(run: Path, noise: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((run / "best" / "config.json").read_text())["unknown"]
    data = run.parent / "data"
    result = evaluate(run, data, unknown_images=noise, quiet=True).unknown
    assert result is not None
    assert result.auroc == pytest.approx(record["auroc"])
    assert (result.unknown, result.other_unknown) == (record["unknown"], record["other_unknown"])
    assert main(["evaluate", str(run), str(data), "--unknown-images", str(noise), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unknown"]["other"] == 12


def test_training_says_that_other_images_are_not_used(noise, tmp_path, capsys):
    """A network without a linear classifier has no detector."""
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    paint(tmp_path / "data", 4)
    train(
        tmp_path / "data", network, img_size=32, epochs=1, batch_size=8, unknown_images=str(noise), out=tmp_path / "run"
    )
    assert f"Unknown images are not detected, and {noise} is not used: Sequential" in capsys.readouterr().err


def test_other_images_without_a_detector_are_refused_before_the_evaluation(noise, tmp_path, monkeypatch) -> None:
    save_model_dir(lively("levit_nano_32", num_classes=3), tmp_path / "net", label_names=["a", "b", "c"])
    monkeypatch.setattr("weft.inference.evaluation.open_labelled", lambda *args: pytest.fail("the data were read"))
    with pytest.raises(UsageError, match="Unknown images are detected by a model"):
        evaluate(tmp_path / "net", noise, unknown_images=noise, quiet=True)


@pytest.mark.slow_except("levit_nano_32-openvino")
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_exports_detect_the_same_images(run: Path, noise: Path, format: str, tmp_path: Path) -> None:
    model, names = load_model_dir(run / "best")
    export(model, tmp_path / "x", format=format, label_names=names, quiet=True)
    ours, exported = Predictor.load(run, quiet=True), Predictor.load(tmp_path / "x", quiet=True)
    assert exported.detector is not None
    np.testing.assert_allclose(scores_of_files(exported, noise, 5), scores_of_files(ours, noise, 5), atol=1e-3)
    pixels = [exported.prepare(path) for path in sorted(noise.iterdir())[:2]]
    with_maps = exported.predict(pixels, overlay=True)
    assert [row.unknown for row in with_maps] == [row.unknown for row in exported.predict(pixels)]


def test_the_detector_stays_with_a_saved_model(run: Path, noise: Path, tmp_path: Path) -> None:
    model, names = load_model_dir(run / "best")
    save_model_dir(model, tmp_path / "copy", label_names=names)
    rows = [row.as_dict() for row in predict(tmp_path / "copy", noise, quiet=True)]
    assert rows == [row.as_dict() for row in predict(run, noise, quiet=True)]
    (tmp_path / "copy" / FILE).unlink()
    with pytest.raises(
        CheckpointError, match=r"unknown\.safetensors must exist: .* the file is missing. Copy it again"
    ):
        predict(tmp_path / "copy", noise, quiet=True)
    (tmp_path / "copy" / FILE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="sha256"):
        predict(tmp_path / "copy", noise, quiet=True)
