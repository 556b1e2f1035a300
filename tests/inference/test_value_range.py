"""Images of more than 8 bits per channel: one value range, that of the training data, in every way to use a model."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import weft.models.registry  # registers weft's models with timm
from tests.helpers import noise_images
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.config import read_config
from weft.cli import main
from weft.data import SplitPlan, open_data, open_image
from weft.data.prepare import prepare_data
from weft.data.preprocessing import Pixels
from weft.deploy import opening
from weft.deploy.model import Outputs
from weft.errors import CheckpointError, UsageError
from weft.inference import Predictor, evaluate, predict
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.models.contract import preprocessing
from weft.serve import decoding
from weft.train.plan import make_plan
from weft.train.request import Request

WHITE = 4095  # of 12 bits
KINDS = ("000.png", "001.tif", "002.png")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gray images of 12 bits in files of 16 and 32: one of each class is dark, and has less than a tenth of white."""
    folder, rng = tmp_path_factory.mktemp("data") / "scans", np.random.default_rng(0)
    for name in ("ill", "well"):
        (folder / name).mkdir(parents=True)
        for file, top in zip(KINDS, (WHITE + 1, WHITE + 1, 400), strict=True):
            values = rng.integers(0, top, (40, 40))
            Image.fromarray(values.astype(np.int32 if file.endswith("tif") else np.uint16)).save(folder / name / file)
    return folder


def planned(scans: Path, **settings: Any) -> Any:
    given = {"model": "levit_nano_32", "epochs": 1, "batch_size": 2, "device": "cpu", **settings}
    return make_plan(Request(str(scans), None, given, {}))


@pytest.fixture(scope="module")
def model(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory of a plan, as a run saves it."""
    path = tmp_path_factory.mktemp("model") / "model"
    return save_model_dir(planned(scans).network.eval(), path, label_names=["ill", "well"])


def test_every_way_to_open_an_image_gives_the_same_pixels(scans, model, monkeypatch):
    splits, predictor = open_data(scans), Predictor.load(model)
    source = SourcePart(splits.train, splits.val)
    tensors = torch.cat([images for images, _ in evaluation_batches(source, load_model_dir(model)[0], 2, 0)])
    graph = SimpleNamespace(has_features=True, run=lambda images: Outputs(np.zeros((1, 2), np.float32)))
    monkeypatch.setattr(opening, "run_file", lambda *_, info, **__: vars(graph).update(info=info) or graph)
    artefact = {"input": (3, 32, 32), "format": "onnx", "precision": "fp32"}
    export = opening._opened(model, {**read_config(model), "artefact": artefact}, None).info
    crop = pickle.loads(pickle.dumps(predictor.preprocessing))  # as it is sent to a decoder of the service
    for tensor, key in zip(tensors, source.keys, strict=True):
        pixels = predictor.prepare(scans / key)
        values = np.asarray(Image.open(scans / key)).astype(float) * 255 / WHITE
        levels = np.asarray(predictor.preprocessing.crop(Image.fromarray(np.rint(values).astype(np.uint8)))).astype(int)
        assert np.abs(pixels.values - levels).max() <= 1
        assert torch.equal(predictor.tensor([pixels])[0], tensor)
        served = decoding._decode_image((scans / key).read_bytes(), crop, 10**6)
        assert isinstance(served, Pixels)
        assert np.array_equal(served.values, pixels.values)
    assert preprocessing(export)["value_range"] == [0, WHITE]


def test_training_images_use_the_value_range(scans: Path) -> None:
    plan = planned(scans, **{"augment.crop": "none", "augment.color_jitter": 0, "augment.hflip": False})
    images, _ = plan.batches.dataset[0, plan.batches.dataset.source.keys.index("ill/000.png")]
    assert 0.4 < float((images * 0.225 + 0.45).mean()) < 0.6
    assert plan.recipe.data.value_range == (0, WHITE)
    assert any(f"Black is 0 and white is {WHITE:,}" in note for note in plan.notes)


def test_the_value_range_does_not_depend_on_split_or_choice(scans: Path) -> None:
    ranges = {
        open_data(scans, SplitPlan(seed=seed, val_fraction=share)).value_range
        for seed in range(3)
        for share in (0.3, 0.7)
    }
    ranges |= {open_data(scans, SplitPlan(folds=3, fold=fold)).value_range for fold in (1, 2, 3)}
    assert ranges == {(0, WHITE)}


def test_a_given_value_range_replaces_that_of_the_data(scans: Path, tmp_path: Path) -> None:
    plan = planned(scans, **{"data.value_range": [0, 1023]})
    path = save_model_dir(plan.network.eval(), tmp_path / "m", label_names=["ill", "well"])
    assert read_config(path)["pretrained_cfg"]["value_range"] == [0, 1023]
    with pytest.raises(UsageError, match=r"ascending; got \[1023, 0\]"):
        planned(scans, **{"data.value_range": [1023, 0]})


def test_images_of_8_bits_leave_the_value_range_open(tmp_path: Path) -> None:
    noise_images(tmp_path / "data", *(f"{name}/{number}.png" for name in ("ill", "well") for number in range(3)))
    plan = planned(tmp_path / "data")
    assert plan.recipe.data.value_range is None
    assert "value_range" not in json.loads(
        (save_model_dir(plan.network.eval(), tmp_path / "m") / "config.json").read_text(encoding="utf-8")
    )


def test_timm_reads_a_model_with_a_value_range(model: Path) -> None:
    assert timm.create_model(f"local-dir:{model}", pretrained=True).num_classes == 2


@pytest.mark.parametrize("value_range", [[4095, 0], [0, 0], [0], ["a", "b"], [0, 2**40], None])
def test_a_value_range_that_is_none_is_refused(model: Path, tmp_path: Path, value_range: Any) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | {"value_range": value_range}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="value_range"):
        read_config(tmp_path)


def test_a_model_without_a_value_range_notes_images_that_become_black(scans, tmp_path, capsys):
    network = weft.create_model("levit_nano_32", num_classes=2)
    path = save_model_dir(network.eval(), tmp_path / "m", label_names=["ill", "well"])
    predict(path, [scans / "ill" / "000.png"])
    assert "1 of 1 images of more than 8 bits per channel become nearly black" in capsys.readouterr().err
    refused = predict(path, [scans / "ill" / "001.tif"], quiet=True)[0]
    assert refused.reason == "integer-pixels"
    assert "stores no value range" in str(refused.error)


def test_evaluation_notes_images_of_another_bit_depth(model, tmp_path, capsys):
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
        for number in range(2):
            values = np.random.default_rng(number).integers(0, 65536, (40, 40)).astype(np.uint16)
            Image.fromarray(values).save(tmp_path / name / f"{number}.png")
    evaluate(model, tmp_path)
    assert "lose their bright parts" in capsys.readouterr().err


def test_prepared_images_give_the_value_range_of_the_originals(scans: Path, tmp_path: Path) -> None:
    prepare_data(scans, tmp_path / "shards", 40, quiet=True)
    prepared = open_data(tmp_path / "shards")
    assert prepared.value_range == (0, WHITE)
    source = SourcePart(prepared.train, prepared.val)
    levels = sorted(np.asarray(open_image(source.read(i).data)).mean() for i in range(len(source)))
    assert levels[1] < 20  # the dark images
    assert 120 < levels[2] < levels[-1] < 135


def test_check_says_the_value_range(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(scans), "--quiet"]) == 0
    assert f"Black is 0 and white is {WHITE:,}" in capsys.readouterr().out
    assert main(["data", "check", str(scans), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value_range"] == [0, WHITE]
