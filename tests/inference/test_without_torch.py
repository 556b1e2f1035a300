"""Predict with and serve exports where torch cannot be imported; the predictions equal those next to torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from PIL import Image
from torchvision import transforms

from tests.data.zoo import GOOD, settle
from tests.models.tiny import lively
from weft.checkpoints import save_model_dir
from weft.checkpoints.unknown import Threshold, UnknownDetector, unit_length
from weft.cli import doctor
from weft.data import open_image
from weft.data.preprocessing import eval_transform
from weft.deploy import export
from weft.inference import predict
from weft.inference.probabilities import ranked, softmax

ROOT = Path(__file__).parents[2]
CLASSES = ["cat", "dog", "owl"]
LACKS = ("torch", "torchvision", "timm", "huggingface_hub", "sklearn", "scipy", "matplotlib")
BLOCKED = f"""
import contextlib, importlib.metadata, io, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

find = importlib.metadata.version

def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)

sys.meta_path.insert(0, Blocker())
importlib.metadata.version = version
from weft.cli import main
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [
    Requirement(line)
    for line in (ROOT / "requirements-runtime.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with class names and a detector of unknown images, its ONNX export, and images."""
    folder = tmp_path_factory.mktemp("deployed")
    model = lively("levit_nano_32", num_classes=len(CLASSES))
    features = np.random.default_rng(1).normal(size=(9, model.num_features)).astype(np.float32)
    model.unknown = UnknownDetector(features[0], unit_length(features), None, Threshold(-1.0, 9, 1))
    save_model_dir(model, folder / "model", label_names=CLASSES)
    export(model, folder / "onnx", format="onnx", label_names=CLASSES)
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    for number in range(5):
        pixels = rng.integers(0, 256, (40 + 9 * number, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.{'png' if number % 2 else 'jpg'}")
    return folder


def printed(folder: Path, code: str) -> Any:
    """Run code in a new process, and return what its last line prints as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def expected(folder: Path) -> list[dict[str, Any]]:
    """Return what the process with torch predicts, as `--json` prints it."""
    return [row.as_dict() for row in predict(folder / "onnx", folder / "images", quiet=True)]


NEED_TORCH = ("predict ./model images", "train digits", "explain ./onnx images --out new")


def test_exports_predict_the_same_without_torch_and_the_rest_says_what_it_needs(folder: Path) -> None:
    metadata = "Name: weft_vision\nVersion: 0.1.0\nRequires-Dist: no-such-package\n"
    (folder / "other" / "weft_vision-0.1.0.dist-info").mkdir(parents=True)
    (folder / "other" / "weft_vision-0.1.0.dist-info" / "METADATA").write_text(metadata)
    prediction = f"predict ./onnx {folder / 'images'} --json --threads 1"
    need_none = ("--help", "serve --help", "doctor --json", prediction)
    code = f"""
results = {{}}
for line in {(*need_none, *NEED_TORCH, "doctor")!r}:
    if line == "doctor":
        sys.path.insert(0, "other")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(line.split())
    results[line] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
"""
    results = printed(folder, BLOCKED + code)
    for line in need_none:
        assert results[line][0] == 0, results[line]
    assert json.loads(results[prediction][1]) == expected(folder)
    assert {row["unknown"] for row in expected(folder)} <= {True, False}
    found = json.loads(results["doctor --json"][1])
    assert "torch_cpu_kernels" not in found["machine"]
    assert {row["package"]: row["installed"] for row in found["packages"]}["torch"] == "-"
    for line in NEED_TORCH:
        code, _, err = results[line]
        assert (code, err.count("\n")) == (2, 1)
        assert "not installed. Run: pip install" in err
    code, out, _ = results["doctor"]  # where a package is missing that exports need
    assert code == 1
    assert re.search(r"^no-such-package .* missing", out, re.MULTILINE)


def test_predicting_with_an_export_never_imports_torch(folder: Path) -> None:
    code = """
import json, sys
from weft.cli import main
assert main("predict ./onnx images --csv --quiet".split()) == 0
print(json.dumps(list(sys.modules)))
"""
    assert not {"torch", "torchvision", "timm", "sklearn"} & set(printed(folder, code))


def serve_and_predict(folder: Path, code: str) -> Any:
    """Start a service, send one image, stop the service, and return the response and the description of the model."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = next(line for line in process.stderr if "open http" in line).split("open ")[1].split("/  ")[0]
            data = (folder / "images" / "0.jpg").read_bytes()
            request = urllib.request.Request(f"{address}/predict", data, {"Content-Type": "image/jpeg"})
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
            with urllib.request.urlopen(f"{address}/model", timeout=60) as response:
                return answer, json.load(response)
        finally:
            process.terminate()
            process.communicate(timeout=60)


def test_a_service_is_the_same_without_torch(folder: Path) -> None:
    arguments = ["serve", "./onnx", "--port", "0", "--threads", "1", "--decoders", "1", "--drain", "0"]
    answer, model = serve_and_predict(folder, BLOCKED + f"sys.exit(main({arguments!r}))")
    assert answer["answers"][0]["top"] == expected(folder)[0]["top"]
    assert (model["runtime"], model["architecture"], model["overlay"]) == ("onnx", "LeViT", False)


def test_pixels_have_the_bits_of_torchvision(tmp_path: Path) -> None:
    """Over all readable images of the zoo, and all values."""
    cfg = {"input_size": (3, 40, 56), "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    ours = eval_transform(cfg)
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(cfg["mean"], cfg["std"])])
    images = [Image.fromarray(np.arange(256, dtype=np.uint8).repeat(3 * 3).reshape(16, 48, 3))]
    settle(tmp_path, GOOD)
    images += [open_image(tmp_path / animal.name) for animal in GOOD]
    for image in images:
        pixels = ours.pixels(image).values
        assert np.array_equal(ours.normalize(pixels[None])[0], theirs(ours.crop(image)).numpy())


def test_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 8, (40, 1000)).astype(np.float32)
    for temperature in (1.0, 0.3, 2.5):
        reference = torch.from_numpy(logits).double().div(temperature).softmax(dim=1).numpy()
        seen = softmax(logits, temperature)
        assert np.array_equal(seen, np.concatenate([softmax(row[None], temperature) for row in logits]))
        assert np.allclose(seen, reference, rtol=1e-7, atol=1e-30)
    assert ranked(np.array([0.1, 0.4, 0.1, 0.4])).tolist() == [1, 3, 0, 2]


def test_the_requirements_without_torch_are_a_part_of_all() -> None:
    """Each has the same versions, and what the core has in addition is what `doctor` expects to be absent."""
    core = {need.name: need for need in map(Requirement, PROJECT["dependencies"])}
    service = {need.name: need for need in map(Requirement, PROJECT["optional-dependencies"]["serve"])}
    runtime = {need.name: need for need in RUNTIME}
    assert runtime.items() <= (core | service).items()
    assert service.keys() <= runtime.keys()
    assert core.keys() - runtime.keys() == doctor.WITH_TORCH


def _closure(names: list[str]) -> set[str]:
    """Return the installed distributions that these need, with themselves."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            names += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_without_torch(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    build += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("weft_vision-*.whl")

    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, site, "zip")
    for name in _closure([*(need.name for need in RUNTIME), "onnx", "onnxruntime"]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def weft_of_venv(*arguments: str) -> Any:
        command = [python, "-m", "weft", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    done = subprocess.run([python, "-c", "import torch"], env=environment, capture_output=True, check=False)
    assert done.returncode != 0
    done = weft_of_venv("predict", "./onnx", str(folder / "images"), "--json", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected(folder)
    done = weft_of_venv("predict", "./model", "images")
    assert (done.returncode, "pip install weft-vision" in done.stderr) == (2, True)
    done = weft_of_venv("doctor", "--json")
    assert done.returncode == 0, done.stdout
    installed = {row["package"] for row in json.loads(done.stdout)["packages"] if row["installed"] != "-"}
    assert "onnxruntime" in installed
    assert installed.isdisjoint(LACKS)
