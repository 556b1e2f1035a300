"""One way to predict: the same bits, order, limits and errors in `predict`, `evaluate`, `explain` and `serve`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import weft
from tests.helpers import NANO, outputs_of
from tests.models.tiny import built
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import eval_transform, open_image
from weft.inference import Predictor, evaluate, predict
from weft.inference.measurement import measure
from weft.inference.predictor import NonFiniteError
from weft.inference.probabilities import ranked
from weft.inference.torch_model import TorchModel

CLASSES = [f"class{number}" for number in range(7)]
TOLERANCE = 1e-5  # of the largest logit: rounding of float32, measured 3e-7 at most


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images per class, of several sizes and modes."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir()
        for copy in range(2):
            pixels = rng.integers(0, 256, (40 + number, 60 + 10 * copy, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{copy}.png")
    return folder


@pytest.fixture(scope="module", params=NANO)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with statistics as of a trained network."""
    torch.manual_seed(0)
    model = built(request.param, num_classes=len(CLASSES)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        model(torch.randn(8, 3, 32, 32))  # moves the statistics of BatchNorm
    return save_model_dir(model.eval(), tmp_path_factory.mktemp("model") / "model", label_names=CLASSES)


def files(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png"))


def test_preparation_equals_the_transform_of_evaluation(run: Path, photos: Path) -> None:
    predictor = Predictor.load(run)
    transform = eval_transform(predictor.cfg)
    expected = torch.stack([transform(open_image(path)) for path in files(photos)])
    from_bytes = predictor.tensor([predictor.prepare(path.read_bytes()) for path in files(photos)])
    assert torch.equal(from_bytes, expected)
    assert torch.equal(predictor.tensor([predictor.prepare(path) for path in files(photos)]), expected)


@pytest.mark.parametrize("batch_size", [1, 14])
def test_predict_has_the_bits_of_the_predictor(run, photos, batch_size):
    predictor = Predictor.load(run)
    prepared = [predictor.prepare(path) for path in files(photos)]
    parts = [prepared[start : start + batch_size] for start in range(0, len(prepared), batch_size)]
    expected = [item.top(CLASSES, len(CLASSES)) for part in parts for item in predictor.predict(part)]
    rows = predict(run, files(photos), top_k=len(CLASSES), batch_size=batch_size)
    assert [row.top for row in rows] == expected


@pytest.mark.parametrize("tta", [False, True])
def test_evaluate_has_the_bits_of_the_unfolded_predictor(run, photos, tta):
    result = evaluate(run, photos, split="all", batch_size=len(files(photos)), tta=tta, quiet=True)
    predictor = Predictor.load(run, fold=False, mirror=tta)
    rows = predictor.predict([predictor.prepare(photos / key) for key in result.keys])
    assert sorted(photos / key for key in result.keys) == files(photos)
    assert result.predicted.tolist() == [int(ranked(row.probabilities)[0]) for row in rows]
    assert result.confidence.tolist() == [float(row.probabilities.max()) for row in rows]


def test_folding_and_batch_size_change_rounding_only(run: Path, photos: Path) -> None:
    folded, unfolded = Predictor.load(run), Predictor.load(run, fold=False)
    images = folded.tensor([folded.prepare(path) for path in files(photos)])
    expected = outputs_of(unfolded.model, images)
    for predictor in (folded, unfolded):
        for size in (1, 5, len(images)):
            logits = torch.cat([outputs_of(predictor.model, part) for part in images.split(size)])
            assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_an_overlay_changes_rounding_only(run: Path, photos: Path) -> None:
    predictor = Predictor.load(run)
    prepared = [predictor.prepare(path) for path in files(photos)]
    pairs = zip(predictor.predict(prepared), predictor.predict(prepared, overlay=True), strict=True)
    for plain, explained in pairs:
        assert np.allclose(plain.probabilities, explained.probabilities, rtol=1e-4)
        assert explained.overlay is not None
        assert (explained.overlay.grid.min(), explained.overlay.grid.max()) == (0, 1)


class Constant(torch.nn.Module):
    """A classifier with the same logits for every image."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits, self.num_classes = torch.tensor(logits), len(logits)
        self.pretrained_cfg = {"input_size": (3, 32, 32), "num_classes": len(logits)}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(images), -1)


def test_ties_are_in_the_order_of_the_classes() -> None:
    logits = [0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0]
    order = [1, 3, 7, 2, 4, 5, 6, 0]
    names = [str(number) for number in range(len(logits))]
    predictor = Predictor(TorchModel(Constant(logits), names))
    blank = predictor.preprocessing.pixels(Image.new("RGB", (32, 32)))
    assert [int(name) for name, _ in predictor.predict([blank])[0].top(names, 8)] == order
    for place, label in enumerate(order):
        batches = [(torch.zeros(1, 3, 32, 32), torch.tensor([label]))]
        result = measure(Constant(logits), batches, names)
        assert (result.top1, result.top5) == (100 * (place == 0), 100 * (place < 5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_outputs_must_be_finite(bad: float, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = weft.create_model("levit_nano_32", num_classes=len(CLASSES)).eval()
    with torch.no_grad():
        next(module for module in reversed(list(model.modules())) if isinstance(module, torch.nn.Linear)).bias[2] = bad
    run = save_model_dir(model, tmp_path / "model", label_names=CLASSES)
    with pytest.raises(NonFiniteError, match="outputs of the model must be finite"):
        predict(run, files(photos)[0])
    with pytest.raises(NonFiniteError):
        evaluate(run, photos, split="all", quiet=True)  # also where the loss of these images is finite
    assert main(["predict", str(run), str(files(photos)[0])]) == 4
    assert "train again" in capsys.readouterr().err
