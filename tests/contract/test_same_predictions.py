"""One set of images, one result: the network on pixels prepared by Pillow alone, predict, evaluate, serve and exports.

The files are those that differ between readers: an EXIF orientation, CMYK, 16-bit gray, a palette with transparency,
WebP, a thin image. The reference knows nothing of weft's preprocessing.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.helpers import NANO, lively, outputs_of
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.inference import evaluate, predict
from weft.inference.predictor import Predictor
from weft.serve.app import create_app
from weft.serve.settings import Settings

CLASSES = ["10", "2", "owl"]  # an order that sorting by number would change
EXIF_ORIENTATION = 0x0112
PREPROCESSING = {
    "input_size": (3, 32, 32),
    "crop_pct": 0.8,  # 1.0 unless changed; this way the crop matters
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}


def pixels(seed: int, height: int = 30, width: int = 44) -> np.ndarray:
    """Soft random colours, so that rotation, crop and colour order all matter, and resizing changes little else."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def files() -> dict[str, tuple[bytes, Image.Image]]:
    """Name -> (content, the RGB image that a viewer shows)."""
    found: dict[str, tuple[bytes, Image.Image]] = {}

    def add(name: str, image: Image.Image, shown: Callable[[Image.Image], Image.Image], **options: Any) -> None:
        buffer = io.BytesIO()
        image.save(buffer, **options)
        with Image.open(io.BytesIO(buffer.getvalue())) as decoded:
            found[name] = buffer.getvalue(), shown(decoded)

    def rgb(image: Image.Image) -> Image.Image:
        return image.convert("RGB")

    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    turned = Image.fromarray(pixels(0))
    add("exif.jpg", turned, lambda image: rgb(ImageOps.exif_transpose(image)), format="JPEG", exif=exif)
    add("cmyk.jpg", Image.fromarray(pixels(1)).convert("CMYK"), rgb, format="JPEG", quality=95)
    gray = pixels(2)[..., 0]
    deep = Image.fromarray(gray.astype(np.uint16) * 257)
    add("deep.png", deep, lambda _: rgb(Image.fromarray(gray)), format="PNG")
    palette = Image.fromarray(np.dstack([pixels(3), pixels(4)[..., 0] // 128 * 255])).quantize(64)
    add("palette.png", palette, on_white, format="PNG")
    add("web.webp", Image.fromarray(pixels(5)), rgb, format="WEBP", quality=90)
    add("thin.png", Image.fromarray(pixels(6, 16, 190)), rgb, format="PNG")
    return found


def on_white(image: Image.Image) -> Image.Image:
    """An image with transparency on white."""
    below = Image.new("RGBA", image.size, "white")
    below.alpha_composite(image.convert("RGBA"))
    return below.convert("RGB")


def prepared(cfg: dict[str, Any], image: Image.Image) -> torch.Tensor:
    """The input of a network, with the steps that its configuration states, by Pillow and torch alone."""
    size = cfg["input_size"][1]
    short = int(size / cfg["crop_pct"])
    width, height = image.size
    wide, tall = (int(short * width / height), short) if height <= width else (short, int(short * height / width))
    image = image.resize((wide, tall), Image.Resampling.BICUBIC)
    left, top = round((wide - size) / 2), round((tall - size) / 2)
    image = image.crop((left, top, left + size, top + size))
    mean, std = (torch.tensor(cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std


def trained_on(name: str, images: torch.Tensor) -> torch.nn.Module:
    """A network whose BatchNorm statistics are those of the images, so that its features differ between them."""
    model = lively(name, num_classes=len(CLASSES))
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
            module.train()
    with torch.no_grad():
        model(images)
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.running_var.clamp_(min=0.1)  # else channels that hardly vary are amplified a hundredfold
            if getattr(module, "out_features", None) == len(CLASSES):
                module.weight.mul_(8)  # probabilities that differ visibly
    return model.eval()


class Case:
    """A model directory, images in class folders, and the probabilities that every way must give."""

    def __init__(self, name: str, folder: Path) -> None:
        shown = files()
        images = torch.stack([prepared(PREPROCESSING, image) for _, image in shown.values()])
        model = trained_on(name, images)
        model.pretrained_cfg.update(PREPROCESSING)
        with torch.inference_mode():
            probabilities = model(images).softmax(dim=1).numpy()
        self.model = save_model_dir(model, folder / "model", label_names=CLASSES)
        self.images = folder / "images"
        self.expected = dict(zip(shown, probabilities, strict=True))
        for place, (file, (content, _)) in enumerate(shown.items()):
            label = CLASSES[place % len(CLASSES)]
            (self.images / label).mkdir(parents=True, exist_ok=True)
            (self.images / label / file).write_bytes(content)

    def paths(self) -> list[Path]:
        return sorted(self.images.rglob("*.*"), key=lambda path: list(self.expected).index(path.name))

    def check(self, rows: dict[str, dict[str, float]], tolerance: float) -> None:
        """Compare probabilities by class name with the reference."""
        assert rows.keys() == self.expected.keys()
        for file, expected in self.expected.items():
            actual = [rows[file][name] for name in CLASSES]
            np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=file)

    def predicted(self, run: Path, **options: Any) -> dict[str, dict[str, float]]:
        result = predict(run, self.paths(), top_k=len(CLASSES), quiet=True, **options)
        return {Path(row.image).name: dict(row.top) for row in result}


@pytest.fixture(scope="module", params=NANO)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


# Folding changes sums in the last bits; the same limit for an export, which is verified at 1e-4 of the largest logit.
FLOAT = 2e-4


def test_the_images_have_different_results(case):
    """Otherwise nothing below could fail."""
    rows = np.stack(list(case.expected.values()))
    distances = np.abs(rows[:, None] - rows[None]).max(axis=2) + np.eye(len(rows))
    assert distances.min() > 40 * FLOAT


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_predict(case, batch_size):
    case.check(case.predicted(case.model, batch_size=batch_size), FLOAT)


def test_evaluate(case):
    result = evaluate(case.model, case.images, split="all", workers=0, quiet=True)
    labels = [CLASSES.index(path.parent.name) for path in case.paths()]
    expected = np.stack(list(case.expected.values()))
    assert result.count == len(expected)
    assert result.classes == CLASSES
    pairs = sorted(zip(expected.max(axis=1), expected.argmax(axis=1), strict=True))
    actual = sorted(zip(result.confidence, result.predicted, strict=True))
    np.testing.assert_allclose(actual, pairs, rtol=0, atol=FLOAT)
    best = expected.argmax(axis=1)
    wrong = {path.name for path, row, label in zip(case.paths(), best, labels, strict=True) if row != label}
    assert {Path(mistake.key).name for mistake in result.mistakes} == wrong
    for mistake in result.mistakes:
        row = case.expected[Path(mistake.key).name]
        assert mistake.predicted == CLASSES[row.argmax()]
        assert mistake.true == Path(mistake.key).parent.name
    loss = -np.log([row[label] for row, label in zip(expected, labels, strict=True)]).mean()
    assert result.loss == pytest.approx(loss, abs=1e-3)
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (labels, best), 1)
    np.testing.assert_array_equal(result.confusion, confusion)


def test_serve(case):
    async def ask() -> dict[str, dict[str, float]]:
        app = create_app(Settings(run=str(case.model), decoders=1))
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")
        rows = {}
        async with app.router.lifespan_context(app), client:
            for path in case.paths():
                response = await client.post(f"/predict?top_k={len(CLASSES)}", content=path.read_bytes())
                assert response.status_code == 200, response.text
                (answer,) = response.json()["answers"]
                rows[path.name] = {item["class"]: item["probability"] for item in answer["top"]}
        return rows

    case.check(asyncio.run(ask()), FLOAT)


def test_the_command_line(case, capsys):
    arguments = [str(case.model), *map(str, case.paths()), "--top-k", str(len(CLASSES)), "--quiet"]
    assert main(["predict", *arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    case.check(
        {Path(row["image"]).name: {item["class"]: item["probability"] for item in row["top"]} for row in rows}, FLOAT
    )
    assert main(["predict", *arguments, "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    best = {file: CLASSES[row.argmax()] for file, row in case.expected.items()}
    assert {Path(row["image"]).name: row["class"] for row in table if row.get("rank", "1") == "1"} == best


@pytest.mark.slow_except("levit_nano_32-onnx")
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_an_export(case, format, tmp_path):
    """With its own class names and preprocessing; and evaluated as a model is."""
    assert main(["export", str(case.model), str(tmp_path / "export"), "--format", format, "--quiet"]) == 0
    case.check(case.predicted(tmp_path / "export"), FLOAT)
    result = evaluate(tmp_path / "export", case.images, split="all", workers=0, quiet=True)
    expected = np.stack(list(case.expected.values()))
    assert np.sort(result.confidence) == pytest.approx(np.sort(expected.max(axis=1)), abs=FLOAT)


def test_test_time_augmentation_averages_the_logits_of_both_views(case):
    plain = Predictor.load(case.model, quiet=True)
    both = Predictor.load(case.model, mirror=True, quiet=True)
    images = [plain.prepare(path) for path in case.paths()]
    tensor = plain.tensor(images)
    logits = (outputs_of(plain.model, tensor) + outputs_of(plain.model, tensor.flip(-1))) / 2
    actual = np.stack([row.probabilities for row in both.predict(images)])
    np.testing.assert_allclose(actual, logits.softmax(dim=1).numpy(), rtol=0, atol=1e-5)
