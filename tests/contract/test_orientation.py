"""EXIF orientation in every verb: a file that says how to turn it gives what the turned pixels give, to the bit.

PNG files, so that both forms have exactly the same pixels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers import lively
from weft.checkpoints import save_model_dir
from weft.cli.app import VERBS
from weft.data import ImageDataset, image_size, open_data, open_image, train_transform
from weft.data.decode import image_info
from weft.data.prepare import prepare_data
from weft.inference import embed, evaluate, predict, similar
from weft.inference.explain_files import explain_run
from weft.serve.app import create_app
from weft.serve.settings import Settings
from weft.train.data_review import review
from weft.train.labelling import label

CLASSES = ["left", "right"]
ORIENTATION = 0x0112
# EXIF value -> how a camera stored upright pixels under it: the inverse of what a viewer does.
STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels, -1),
}


def upright(number: int) -> np.ndarray:
    """Soft random colours, wider than high."""
    coarse = np.random.default_rng(number).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((48, 36), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Class folders with upright files, and with the same images stored under every orientation."""
    root = tmp_path_factory.mktemp("oriented")
    for number in range(14):
        value = 2 + number % 7
        name = f"{CLASSES[number % 2]}/{number:02}.png"
        for form in ("upright", "turned"):
            (root / form / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = upright(number)
        Image.fromarray(pixels).save(root / "upright" / name)
        exif = Image.Exif()
        exif[ORIENTATION] = value
        Image.fromarray(np.ascontiguousarray(STORED[value](pixels))).save(root / "turned" / name, exif=exif)
    return root / "upright", root / "turned"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = lively("levit_nano_32", num_classes=2)
    return save_model_dir(network, tmp_path_factory.mktemp("oriented-model") / "model", label_names=CLASSES)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.png"))


# Ways to read a folder: functions of the folder, a model directory and a directory for output.


def decoded(folder, *_):
    return [np.asarray(open_image(path)) for path in files(folder)]


def sizes(folder, *_):
    return [(image_size(path), image_info(path).size) for path in files(folder)]


def predictions(folder, model, *_):
    return [row.top for row in predict(model, files(folder), quiet=True)]


def evaluation(folder, model, *_):
    return evaluate(model, folder, split="all", workers=0, quiet=True).confidence


def features(folder, model, *_):
    return embed(model, files(folder), quiet=True).features


def similarities(folder, model, *_):
    rows, _ = similar(model, files(folder)[0], files(folder), quiet=True)
    return [(Path(row.image).name, row.similarity) for row in rows]


def heatmaps(folder, model, out):
    explain_run(model, files(folder), out, grad_cam=False, quiet=True)
    return [value for path in sorted(out.glob("*.npz")) for value in np.load(path).values()]


def labels(folder, model, *_):
    result = label(model, files(folder), num=4, min_probability=0.9, quiet=True)
    return [Path(row.image).name for row in (*result.next, *result.proposed, *result.rest)]


def findings(folder, model, *_):
    return [(Path(row.path).name, row.problem, row.proposed) for row in review(folder, run=model, quiet=True).findings]


def shards(folder, model, out):
    prepare_data(folder, out, 32, quiet=True)
    splits = open_data(out)
    return [np.asarray(open_image(side.read(i).data)) for side in (splits.train, splits.val) for i in range(len(side))]


def training_images(folder, *_):
    source = open_data(folder).train
    dataset = ImageDataset(source, train_transform(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    return torch.stack([dataset[i][0] for i in range(len(source))]).numpy()


def served(folder, model, *_):
    async def ask() -> list[Any]:
        app = create_app(Settings(run=str(model), decoders=1))
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), client:
            replies = [await client.post("/predict", content=path.read_bytes()) for path in files(folder)]
        return [reply.json()["answers"][0]["top"] for reply in replies]

    return asyncio.run(ask())


WAYS = {
    "data": (decoded, sizes, shards, findings),
    "train": (training_images,),
    "predict": (predictions,),
    "evaluate": (evaluation,),
    "embed": (features,),
    "similar": (similarities,),
    "explain": (heatmaps,),
    "label": (labels,),
    "serve": (served,),
}
# Verbs that read images by one of the ways above, or none.
OTHERS = {"compare", "study", "convert", "export", "bench", "push", "info", "models", "recipes", "doctor"}


def test_every_verb_that_reads_images_is_here() -> None:
    assert WAYS.keys() | OTHERS == set(VERBS)


@pytest.mark.parametrize("way", [way for ways in WAYS.values() for way in ways])
def test_a_turned_file_is_the_upright_one(way, both, model, tmp_path):
    one, other = (way(folder, model, tmp_path / folder.name) for folder in both)
    assert len(one) > 0
    np.testing.assert_equal(other, one)
