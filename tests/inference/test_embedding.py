"""Features of image files, the most similar images, and the map of a report."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.helpers import NANO, enliven
from tests.train.conftest import paint
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.data import eval_transform, open_image
from weft.errors import DataError, UsageError
from weft.inference import Predictor, embed, evaluate, similar
from weft.inference import feature_map as maps
from weft.inference.features import FeatureReader, classifiers, logits_of
from weft.inference.torch_model import torch_model
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.report.pages import Lead, Section, write_page

CPU = Runtime.of("cpu")
COLOURS = ("blue", "green", "red")
EXPORT = Path(__file__).parents[1] / "compat" / "data" / "levit_nano_32" / "onnx-fp32"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data") / "colours", per_class=8)


def saved(name: str, folder: Path, label_names: list[str]) -> Path:
    """Save a network that was not trained."""
    torch.manual_seed(0)
    network = enliven(weft.create_model(name, num_classes=len(label_names)))
    return save_model_dir(network, folder, label_names=label_names)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its classes are not those of the images."""
    return saved("levit_nano_32", tmp_path_factory.mktemp("models") / "levit_nano_32", list("abcd"))


@pytest.fixture(scope="module")
def colour_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("levit_nano_32", tmp_path_factory.mktemp("models") / "colours", list(COLOURS))


@pytest.mark.parametrize("name", NANO)
def test_features_are_the_inputs_of_the_classifiers(name: str, colours: Path, tmp_path: Path) -> None:
    """The classifiers of the network, applied to the features, return its logits."""
    model = saved(name, tmp_path / "model", list("abcd"))
    result = embed(model, colours, batch_size=5, quiet=True)
    assert result.images == sorted(str(path) for path in colours.rglob("*.png"))
    predictor = Predictor.load(model, fold=False, quiet=True)
    network = torch_model(predictor.model).network
    tensors = torch.stack([eval_transform(preprocessing(network))(open_image(Path(p))) for p in result.images])
    with torch.inference_mode():
        expected = network(tensors)
    torch.testing.assert_close(torch.from_numpy(logits_of(network, result.features)), expected, rtol=1e-4, atol=1e-5)
    assert result.features.shape[1] == sum(layer.in_features for layer in classifiers(network))


def test_the_second_time_they_come_from_the_cache(model: Path, colours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embed(model, colours, quiet=True)
    monkeypatch.setattr("weft.inference.features._features", None)  # the network cannot run
    second = embed(model, colours, batch_size=3, quiet=True)
    np.testing.assert_array_equal(first.features, second.features)
    with pytest.raises(TypeError):
        embed(model, colours, img_size=48, quiet=True)


def test_files_of_features(model: Path, colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "features.npy"
    words = ["embed", str(model), str(colours), "--out", str(out), "--quiet"]
    assert main([*words, "--normalize", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    features, plain = np.load(out, allow_pickle=False), embed(model, colours, quiet=True)
    assert (printed["images"], printed["features"]) == features.shape
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-6)
    rows = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    assert [row["image"] for row in rows] == plain.images
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    np.testing.assert_array_equal(np.load(out), plain.features)

    pyarrow = pytest.importorskip("pyarrow.parquet")
    embed(model, colours, out=tmp_path / "b" / "features.parquet", quiet=True)
    table = pyarrow.read_table(tmp_path / "b" / "features.parquet").to_pydict()
    assert table["image"] == plain.images
    np.testing.assert_array_equal(np.array(table["features"], np.float32), plain.features)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["features.parquet"]


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_files_of_features_keep_every_path_as_it_is(suffix: str, model: Path, colours: Path, tmp_path: Path) -> None:
    """Other programs open these paths; `weft predict --csv` changes those that a spreadsheet would run."""
    (tmp_path / "in").mkdir()
    image = next(colours.rglob("*.png"))
    names = ["-a.png", "=b.png", "@c.png", "+d.png", "tab\t.png", 'quote",.png', "line\n.png", "\u202e.png", "'.png"]
    for name in names:
        shutil.copyfile(image, tmp_path / "in" / name)
    with contextlib.chdir(tmp_path / "in"):
        embed(model, names, out=tmp_path / f"f{suffix}", quiet=True)
    if suffix == ".npy":
        with (tmp_path / "f.csv").open(newline="", encoding="utf-8") as file:
            assert [row["image"] for row in csv.DictReader(file)] == names
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table(tmp_path / "f.parquet").to_pydict()["image"] == names


def test_unreadable_images_have_no_row(model, colours, tmp_path, capsys):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    good = next(colours.rglob("*.png"))
    assert main(["embed", str(model), str(bad), str(good), "--out", str(tmp_path / "f.npy"), "--quiet"]) == 3
    assert "bad.png" in capsys.readouterr().err
    assert len(np.load(tmp_path / "f.npy")) == 1
    assert "bad.png" not in (tmp_path / "f.csv").read_text()
    with pytest.raises(DataError, match=r"At least one image must be readable; none of 1 is\..*bad\.png"):
        embed(model, bad, quiet=True)
    with pytest.raises(DataError, match=r"The query must be an image\..*bad\.png"):
        similar(model, bad, colours, quiet=True)
    with pytest.raises(DataError, match=r"must be an image file; .* is a folder\. Pass one of its images"):
        similar(model, colours, colours, quiet=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="it is a folder without images"):
        embed(model, tmp_path / "empty", quiet=True)
    result, errors = similar(model, good, [bad, colours], top_k=3, quiet=True)
    assert len(result) == 3
    assert [Path(path).name for path, _ in errors] == ["bad.png"]


def test_what_gives_no_features_is_refused(model: Path, colours: Path, tmp_path: Path) -> None:
    for name in ("features.txt", "features", "features.npz"):
        with pytest.raises(UsageError, match=r"must end in \.npy or \.parquet"):
            embed(model, colours, out=tmp_path / name, quiet=True)
    network = nn.Sequential(nn.Flatten(), nn.Conv2d(3, 2, 1))
    with pytest.raises(UsageError, match="must end in a linear classifier to give features; Sequential does not"):
        FeatureReader(network, CPU)
    with pytest.raises(UsageError, match=r"an export gives class scores only\. Pass the run directory"):
        embed(EXPORT, colours, quiet=True)


def test_similar_images_are_ranked_by_cosine(model: Path, colours: Path, capsys) -> None:
    query = colours / "red" / "00.png"
    features = embed(model, colours, normalize=True, quiet=True)
    unit = features.features.astype(np.float64)
    cosine = unit @ unit[features.images.index(str(query))]
    best = [features.images[i] for i in np.argsort(-cosine) if features.images[i] != str(query)]
    arguments = [str(query), str(colours), "--top-k", "5", "--json", "--quiet"]
    assert main(["similar", str(model), *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["image"] for row in rows[:4]} <= set(best[:6])
    np.testing.assert_allclose([row["similarity"] for row in rows], np.sort(cosine)[::-1][1:6], atol=1e-6)


def test_a_copy_of_the_query_is_the_most_similar_and_is_found_once(model, colours: Path, tmp_path: Path) -> None:
    query = colours / "green" / "03.png"
    (tmp_path / "copy.png").write_bytes(query.read_bytes())
    found, _ = similar(model, query, [colours, tmp_path, colours], top_k=100, quiet=True)
    assert found[0].image == str(tmp_path / "copy.png")
    assert found[0].similarity == pytest.approx(1)
    assert len(found) == len({row.image for row in found}) == len(list(colours.rglob("*.png")))


@pytest.mark.figures
def test_the_report_has_a_map_of_the_features_of_enough_images(colour_model, colours: Path, tmp_path: Path) -> None:
    data = paint(tmp_path / "data", per_class=20)
    result = evaluate(colour_model, data, out=tmp_path / "out", quiet=True)
    assert result.count >= maps.FEWEST
    evaluate(colour_model, colours, split="val", out=tmp_path / "few", quiet=True)
    assert "Map of the features" not in (tmp_path / "few" / "report.html").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert re.search(r'<img alt="Features of \d+ images in two dimensions \(t-SNE\): [^"]+" src="data:image/svg', page)


@pytest.mark.figures
def test_neighbours_stay_neighbours_on_the_map() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 20)
    points = maps.two_dimensions(5 * rng.normal(size=(3, 64))[labels] + rng.normal(size=(60, 64)))
    distances = np.linalg.norm(points[:, None] - points, axis=2) + 1e9 * np.eye(60)
    assert (labels[distances.argmin(1)] == labels).all()
    assert np.isfinite(maps.two_dimensions(np.ones((12, 8)))).all()


@pytest.mark.figures
def test_names_and_rings_of_misclassified_images(tmp_path: Path) -> None:
    points, labels = np.random.default_rng(0).normal(size=(12, 2)), np.arange(12) % 3
    right, names = labels != 1, ["", "$a_1$.jpg: dog", *[""] * 10]
    figure = maps.draw(points, labels, right, ["a", "$b$", "_c"], names)
    rings = figure.axes[0].collections[-1].get_offsets()
    np.testing.assert_array_equal(np.asarray(rings), points[~right])
    assert [text.get_text() for text in figure.axes[0].texts] == [names[1]]
    write_page(tmp_path, "t", Lead(["c"]), [], [Section("map", figures=[(figure, "c")])])
