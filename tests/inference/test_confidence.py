"""Calibrated probabilities and rejected images, from training to export and service."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from tests.train import tiny
from weft.checkpoints import load_model_dir
from weft.checkpoints.confidence import Confidence
from weft.cli import main
from weft.data import ImageDataset, open_data
from weft.errors import CheckpointError, UsageError
from weft.inference import predict
from weft.inference.calibration import SQUARED_FROM, calibrate, fit_temperature
from weft.inference.exports import export_run
from weft.inference.metrics import Evaluation
from weft.inference.predictor import Predictor
from weft.inference.report import write_report
from weft.inference.torch_model import TorchModel
from weft.serve.app import _image_json
from weft.serve.service import load_predictor
from weft.serve.settings import Settings
from weft.train import RunResult, evaluate, train
from weft.train.finish import finish
from weft.train.run import Run


def drawn(count: int, temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose probabilities are right if they are divided by the temperature, and labels drawn from these."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(count, 5))
    probabilities = softmax(logits, axis=1)
    labels = np.array([rng.choice(5, p=row) for row in probabilities])
    return temperature * logits, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_is_found(temperature: float) -> None:
    logits, labels = drawn(4_000, temperature)
    found = calibrate(logits, labels)
    assert found.temperature == pytest.approx(temperature, rel=0.08)
    assert found.ece_after < 3
    if temperature != 1:
        assert found.ece_before > 2 * found.ece_after


def test_few_images_move_the_temperature_little() -> None:
    logits, labels = drawn(4_000, 3.0)
    few = [abs(np.log(fit_temperature(logits[:count], labels[:count]))) for count in (0, 2, 20, 4_000)]
    assert few[0] == 0
    assert few[1] < 0.5
    assert few[-1] == pytest.approx(np.log(3), rel=0.1)


def test_the_squared_error_decides_with_enough_images() -> None:
    logits, labels = drawn(SQUARED_FROM, 3.0)
    wrong = slice(SQUARED_FROM // 100)  # wrong labels, or very certain errors
    logits[wrong], labels[wrong] = [90.0, 0, 0, 0, 0], 1
    squared, loss = (fit_temperature(logits, labels, way) for way in (True, False))
    assert squared == pytest.approx(3, rel=0.2)
    assert loss > 1.3 * squared
    assert calibrate(logits, labels).temperature == squared
    assert calibrate(logits[1:], labels[1:]).temperature == fit_temperature(logits[1:], labels[1:])


ROWS = st.lists(st.tuples(st.floats(0.2, 1, exclude_min=True), st.booleans()), min_size=1, max_size=60)


@settings(deadline=None)
@given(ROWS, st.floats(0, 0.5))
def test_the_threshold_keeps_the_error_on_the_held_out_images(rows: list[tuple[float, bool]], error: float) -> None:
    sure, right = (np.array(column) for column in zip(*rows, strict=True))
    logits = np.log(np.maximum(np.stack([sure, *([(1 - sure) / 5] * 5)], axis=1), 1e-12))
    found = calibrate(logits, np.where(right, 0, 1))
    if all(errors > error * accepted for _, accepted, errors in found.curve):
        with pytest.raises(UsageError, match="the most confident part has"):
            found.rejection(error)
        return
    rejection = found.rejection(error)
    scaled = softmax(logits / found.temperature, axis=1).max(axis=1)
    kept = scaled >= rejection.threshold
    assert kept.sum() == rejection.accepted
    assert (~right[kept]).sum() == rejection.errors <= error * rejection.accepted


def test_no_errors_among_few_images_prove_little() -> None:
    rejection = Confidence(1.0, 43, 0.0, 0.0, [(0.9, 34, 0), (0.4, 43, 3)]).rejection(0.01)
    assert (rejection.threshold, rejection.accepted) == (0.9, 34)
    assert rejection.error.high == pytest.approx(10.2, abs=0.1)
    assert "at most 10.2 % by the 95 % interval" in str(rejection)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise", per_class=20)


class Trained(NamedTuple):
    """A run, how often each image was decoded after its last step, and the evaluation that its report shows."""

    out: Path
    decoded: Counter[str]
    reported: Evaluation


def trained(photos: Path, out: Path, **more: Any) -> Trained:
    results: list[Evaluation] = []
    counts: list[Counter[str]] = []
    with pytest.MonkeyPatch.context() as patch:

        def count_and_finish(run: Run) -> RunResult:
            counts.append(counted(patch))
            return finish(run)

        def write_and_keep(folder: Path, title: str, summary: Any, result: Evaluation, **parts: Any) -> None:
            results.append(result)
            write_report(folder, title, summary, result, **parts)

        patch.setattr("weft.train.finish.write_report", write_and_keep)
        patch.setattr("weft.train.finish.finish", count_and_finish)
        settings = {"optim.lr": 3e-3}
        train(photos, "levit_nano_32", batch_size=12, settings=settings, out=out, quiet=True, **more)
    return Trained(out, counts[0], results[0])


def counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of times that each image is decoded from now on, by key."""
    decoded, original = Counter[str](), ImageDataset._draw

    def count(self: ImageDataset, key: Any) -> Any:
        decoded[self.source.keys[key[1]]] += 1
        return original(self, key)

    patch.setattr(ImageDataset, "_draw", count)
    return decoded


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(photos, tmp_path_factory.mktemp("run") / "run", epochs=3)


@pytest.fixture
def run(whole: Trained) -> Path:
    return whole.out


def test_probabilities_use_the_temperature_everywhere(run: Path, photos: Path, tmp_path: Path) -> None:
    model, classes = load_model_dir(run / "best")
    confidence = model.confidence
    assert confidence.count == 12
    assert confidence.temperature != 1
    predictor = Predictor(TorchModel(model, classes, fold=False))
    image = predictor.prepare(photos / "class1" / "003.png")
    with torch.inference_mode():
        logits = model(predictor.tensor([image]))
    expected = (logits / confidence.temperature).softmax(1).numpy()[0]
    assert predictor.predict([image])[0].probabilities == pytest.approx(expected, abs=1e-6)

    export_run(run, tmp_path / "export", quiet=True)
    file = photos / "class1" / "003.png"
    of_run, of_export = (dict(predict(place, [file], quiet=True)[0].top) for place in (run, tmp_path / "export"))
    assert of_run == pytest.approx(of_export, abs=1e-5)
    assert of_run[classes[int(expected.argmax())]] == pytest.approx(expected.max(), abs=1e-5)
    assert Predictor.load(tmp_path / "export").reject_at(0.9) == predictor.reject_at(0.9)


def test_evaluation_has_calibrated_confidences(run: Path, photos: Path) -> None:
    confidence = load_model_dir(run / "best")[0].confidence
    result = evaluate(run, photos, quiet=True, reject_at_error=0.99)
    rejection = confidence.rejection(0.99)
    assert (result.accepted.images, result.count) == (rejection.accepted, 12)
    assert sorted(result.confidence)[0] >= rejection.threshold  # all are accepted at this error
    record = json.loads(json.dumps(result.as_dict()))
    assert record["accepted"]["images"] == 12
    assert [row["coverage"] for row in record["coverage"]] == [1.0, 0.95, 0.9, 0.8, 0.7, 0.5]
    assert record["coverage"][0]["top1"] == pytest.approx(result.top1)
    order = np.argsort(-result.confidence, kind="stable")
    errors = np.cumsum(~result.is_correct[order]) / np.arange(1, 13)
    assert record["aurc"] == pytest.approx(100 * errors.mean())


def test_after_training_every_image_is_decoded_once(whole: Trained, photos: Path) -> None:
    """Held-out images for calibration, detector, mirrored classes and feature map, training images for the detector."""
    splits = open_data(photos)
    assert whole.decoded == Counter([*splits.val.keys, *splits.train.keys])
    assert whole.decoded.total() == 60
    assert "Map of the features" in (whole.out / "report" / "report.html").read_text()


@pytest.mark.parametrize("limit", [("MAX_IMAGES", 7), ("MAX_LOGITS", 7 * 3 + 2)], ids=["images", "logits"])
def test_of_many_held_out_images_some_calibrate_and_the_report_has_all(limit, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(f"weft.train.held_out.{limit[0]}", limit[1])
    monkeypatch.setattr("weft.train.held_out.MAX_INSPECTED", 5)
    out, decoded, reported = trained(photos, tmp_path / "run", epochs=1)
    model, _ = load_model_dir(out / "best")
    assert (model.confidence.count, model.unknown.threshold.count) == (7, 5)
    assert abs(model.confidence.temperature - 1) > 0.01
    assert reported.confidence == pytest.approx(evaluate(out, photos, quiet=True).confidence, abs=1e-5)
    wrong = [float(sure) for sure in reported.confidence[~reported.is_correct]]
    assert [mistake.probability for mistake in reported.mistakes] == sorted(wrong, reverse=True)
    splits = open_data(photos)
    assert decoded == Counter([*splits.val.keys, *splits.train.keys])
    assert "Map of the features" not in (out / "report" / "report.html").read_text()


def test_an_evaluation_with_a_map_decodes_every_image_once(run, photos, tmp_path, monkeypatch):
    decoded = counted(monkeypatch)
    result = evaluate(run, photos, out=tmp_path / "out", quiet=True)
    assert decoded == Counter(result.keys)
    assert "Map of the features" in (tmp_path / "out" / "report.html").read_text()


def test_the_map_of_an_evaluation_is_of_the_images_also_with_those_of_their_mirror_images(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps: list[np.ndarray] = []
    monkeypatch.setattr("weft.inference.feature_map.feature_map", lambda features, *_: maps.append(features))
    for tta in (False, True):
        evaluate(run, photos, tta=tta, out=tmp_path / str(tta), quiet=True)
    np.testing.assert_allclose(maps[1], maps[0], rtol=1e-5, atol=1e-6)


def test_the_command_line_rejects(run: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [str(path) for path in sorted(photos.rglob("*.png"))[:10]]
    assert main(["predict", str(run), *images, "--json", "--reject-at-error", "99%"]) == 0
    printed = capsys.readouterr()
    assert "Predictions with a probability below" in printed.err
    assert all(row["rejected"] in (True, False) for row in json.loads(printed.out))
    assert main(["predict", str(run), *images, "--csv", "--reject-at-error", "99"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "image,rank,class,probability,unknown,rejected"
    assert main(["evaluate", str(run), str(photos), "--reject-at-error", "99%"]) == 0
    assert "accepted: 12 of 12 images (100.0 %)" in capsys.readouterr().out
    for value, message in (("one", "got 'one'"), ("-1%", "at least 0"), ("100%", "below 100 %")):
        assert main(["predict", str(run), str(photos), "--quiet", f"--reject-at-error={value}"]) == 2
        assert message in capsys.readouterr().err


def test_a_model_without_calibration_says_so(run: Path, photos: Path, tmp_path: Path) -> None:
    config = json.loads((run / "best" / "config.json").read_text())
    shutil.copy(run / "best" / "model.safetensors", tmp_path)
    plain = {key: value for key, value in config.items() if key not in ("confidence", "unknown")}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert Predictor.load(tmp_path).temperature == 1
    with pytest.raises(UsageError, match="needs a model that was calibrated on held-out images"):
        predict(tmp_path, [photos / "class0" / "000.png"], reject_at_error=0.01, quiet=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "confidence": {"temperature": 0}}))
    with pytest.raises(CheckpointError, match=r"config\.json must have the format that weft writes; confidence"):
        Predictor.load(tmp_path)


def test_a_resumed_run_has_the_same_calibration(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "best" / "config.json"
    config = json.loads(file.read_text())
    del config["confidence"], config["unknown"]
    file.write_text(json.dumps(config))
    train(resume=tmp_path / "run", quiet=True)
    assert file.read_text() == (run / "best" / "config.json").read_text()


def test_the_service_rejects(run: Path, photos: Path) -> None:
    predictor = load_predictor(Settings(run=str(run), reject_at_error=0.99))
    image = predictor.predict([predictor.prepare(photos / "class0" / "000.png")])[0]
    fields = _image_json(predictor, "x", image, 3, 0.99)
    assert fields["rejected"] == (fields["top"][0]["probability"] < predictor.reject_at(0.99).threshold)
    assert "rejected" not in _image_json(predictor, "x", image, 3, None)
    for error in (1.5, 1.0):
        with pytest.raises(UsageError, match=rf"reject_at_error must be a number at least 0 and below 1; got {error}"):
            load_predictor(Settings(run=str(run), reject_at_error=error))
