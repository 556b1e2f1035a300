"""What a verb imports: modules are counted here, not seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits

import weft
import weft.models.registry  # registers weft's models with timm
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.resolve import is_path
from weft.cli import main
from weft.data.digits import read_digits
from weft.errors import UsageError
from weft.lazy import package_folder
from weft.models.contract import preprocessing
from weft.models.families import VARIANTS, is_model, nearest_names
from weft.models.imagenet import FEWEST, imagenet_classes

# Packages that take longer to import than a prediction does, and modules of torch that only compile and export.
SLOW = ("timm", "torchvision", "sklearn", "scipy", "matplotlib", "pandas", "transformers", "torch._dynamo", "sympy")
NANO = ("ceit_nano_32", "cvt_nano_32", "levit_nano_32")


def python(code: str, folder: Path) -> str:
    """Run code in a new process in a folder, and return what it prints."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_predict_imports_torch_and_little_else(tmp_path: Path) -> None:
    for name in NANO:
        save_model_dir(weft.create_model(name, num_classes=3), tmp_path / name.partition("_")[0])
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    code = """
import sys
from weft.cli import main
for run in ("ceit", "./cvt", "levit"):
    assert main(["predict", run, "red.png", "--img-size", "48", "--json", "--quiet"]) == 0
print("MODULES", *sys.modules)
"""
    modules = python(code, tmp_path).partition("MODULES")[2].split()
    assert "torch" in modules
    assert [name for name in (*SLOW, "huggingface_hub") if name in modules] == []


def test_a_network_is_built_without_what_only_files_need(tmp_path: Path) -> None:
    code = "import sys, weft; weft.create_model('levit_nano_32'); print(*sys.modules)"
    modules = python(code, tmp_path).split()
    assert [name for name in (*SLOW, "pydantic") if name in modules] == []


@pytest.mark.parametrize("name", weft.list_models())
def test_a_network_is_the_same_with_and_without_timm(name: str) -> None:
    for arguments in ({}, {"num_classes": 5, "in_chans": 1}, {"features_only": True}):
        with torch.device("meta"):
            ours = weft.create_model(name, **arguments)
            theirs = timm.create_model(f"weft_{name}", **arguments)
        assert _notes(ours) == _notes(theirs)
        assert str(ours) == str(theirs)
        assert timm.data.resolve_model_data_config(theirs) == preprocessing(ours)


def _notes(model: Any) -> dict[str, object]:
    """Return the attributes of a network that are neither torch's nor modules."""
    notes = {key: value for key, value in vars(model).items() if key[0] != "_"}
    return notes | {"feature_info": getattr(model.feature_info, "info", model.feature_info)}


def test_weights_replace_all_values_that_loading_leaves_unset(tmp_path: Path) -> None:
    model = weft.create_model("levit_nano_32", num_classes=3).eval()
    loaded = load_model_dir(save_model_dir(model, tmp_path / "model"))[0]
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))


# Command lines with a model directory of weft's and images, and packages that they import nevertheless.
RUNS = {
    "evaluate model photos": (),
    "evaluate ./run_2 photos --limit 4": (),
    "evaluate d1 digits --limit 20": (),  # d1 is a word in timm's source
    "embed model photos --out features.npy": (),
    "similar model photos/cat/a.png photos": (),
    "label model photos --num 2": ("scipy",),
    "explain model photos/cat/a.png --out maps --no-grad-cam": ("matplotlib",),
    "evaluate model photos --out report": ("matplotlib",),
}


def test_inference_imports_no_package_that_only_training_needs(tmp_path: Path) -> None:
    save_model_dir(weft.create_model("levit_nano_32", num_classes=2), tmp_path / "model", label_names=["cat", "dog"])
    for name in ("run_2", "d1"):
        classes = [str(digit) for digit in range(10)] if name == "d1" else ["cat", "dog"]
        model = weft.create_model("ceit_nano_32", num_classes=len(classes))
        save_model_dir(model, tmp_path / name, label_names=classes)
    for name in ("photos/cat", "photos/dog"):
        (tmp_path / name).mkdir(parents=True)
        for place in ("a", "b"):
            Image.new("RGB", (40, 30), "red" if name == "photos/cat" else "blue").save(tmp_path / name / f"{place}.png")
    code = f"""
import sys
from weft.cli import main
for line, allowed in {RUNS!r}.items():
    assert main([*line.split(), "--json", "--quiet"]) == 0, line
    found = [name for name in {SLOW!r} if name in sys.modules and name not in allowed]
    print("WRONG" if found else "MODULES", line, found)
    for name in allowed:  # so that the next command has to import it again
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
"""
    printed = python(code, tmp_path)
    assert "WRONG" not in printed, printed
    assert printed.count("MODULES") == len(RUNS)


def test_training_reads_its_data_before_it_imports_timm(tmp_path: Path) -> None:
    """A folder that cannot be used is refused without timm, torchvision, scikit-learn and torch's compiler."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "dog").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name / "a.png").write_bytes(b"no image")
    code = f"""
import sys
from weft.cli import main
assert main(["train", "photos", "--model", "ceit_nano_32", "--out", "run"]) == 3
print([name for name in {SLOW!r} if name in sys.modules and name not in ("scipy",)])
"""
    assert python(code, tmp_path).strip() == "[]"


def test_the_first_line_comes_before_torch_is_imported(tmp_path: Path) -> None:
    """In every verb that imports it; nothing with --quiet. The import is made to fail here."""
    save_model_dir(weft.create_model("levit_nano_32", num_classes=3), tmp_path / "model")
    for name in ("photos/cat", "photos/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "w.pth").touch()
    lines = (
        *("train photos", "train photos --find-lr", "train photos --preview new.png", "train photos --threads 1"),
        *("evaluate model photos", "predict model photos", "embed model photos --out x.npy", "label model photos"),
        *("similar model photos/cat/a.png photos", "explain model photos --out new", "export model new"),
        *(
            "compare photos",
            "study ceit-leff photos",
            "study ceit-leff --plan",
            "convert w.pth new",
            "data review photos",
        ),
    )
    code = f"""
import contextlib, importlib.machinery, io, json, sys
from weft.cli import main
class Refusing:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None
    def create_module(self, spec):
        raise ImportError("torch is not imported here")
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Refusing())
wrong = []
for line in {lines!r}:
    for extra, expected in (([], "Loading PyTorch.\\n"), (["--quiet"], "")):
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            try:
                code = main([*line.split(), *extra])
            except ImportError as error:
                code = str(error)
        if code != "torch is not imported here" or stream.getvalue() != expected:
            wrong.append([line, extra, code, stream.getvalue()])
print(json.dumps(wrong, indent=1))
"""
    assert python(code, tmp_path).strip() == "[]"


def test_names_that_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet50").mkdir()
    names = ("resnet50", "levit_256", "resnet18.a1_in1k", "./levit_256", "runs/levit_256", "hf-hub:me/net")
    paths = ["resnet50", "./levit_256", "runs/levit_256", "hf-hub:me/net"]
    assert [name for name in names if is_path(name)] == paths


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = load_digits()
    for folder in (package_folder("sklearn"), None):  # without the file, scikit-learn reads it
        monkeypatch.setattr("weft.data.digits.package_folder", lambda name, folder=folder: folder)
        images, labels = read_digits()
        np.testing.assert_array_equal(images, theirs.images)
        assert labels == theirs.target.tolist()


def test_no_imagenet_variant_of_timm_is_smaller() -> None:
    assert all(timm.data.infer_imagenet_subset({"num_classes": number}) is None for number in range(FEWEST))
    assert imagenet_classes(FEWEST) is not None


# Command lines that need neither a model nor an image to be refused, and a part of the message.
REFUSED = {
    "train photos --out full": "must be new or empty",
    "train nowhere": "'nowhere' does not",
    "train nowhere.csv": "'nowhere.csv' does not",
    "train part-{0..1}.tar": "'part-0.tar' does not",
    "train photos --out photos/x": "must be outside the data folder",
    "train photos --out photos/x --force": "must be outside the data folder",
    "train photos.zip": "'photos.zip' is a ZIP archive. Unpack it",
    "train photos.tar.gz": "'photos.tar.gz' is a gzip archive. Unpack it",
    "train": "Training needs images",
    "train photos --recipe nope": "Unknown recipe",
    "train photos --epochs x": "epochs must be",
    "train photos --batch-size 0": "batch_size must be",
    "train photos --set a.b=3": "Unknown setting",
    "train photos --max-time soon": "--max-time must be a duration",
    "train photos --track nope": "Unknown tracker",
    "train photos --resume model --out new": "Omit them",
    "train --resume nowhere": "has no recipe.yaml",
    "train photos --from nowhere": "nowhere is none of these",
    "train photos --from model --from-scratch": "exclude each other",
    "evaluate model nowhere": "'nowhere' does not",
    "evaluate model nowhere.parquet": "'nowhere.parquet' does not",
    "evaluate model photos.zip": "is a ZIP archive. Unpack it",
    "evaluate model photos --out full": "must be new or empty",
    "evaluate model photos --out photos/x": "must be outside the data folder",
    "evaluate model photos --out new --unknown-images full --out full/x": "must be outside the data folder",
    "evaluate model photos --workers x": "workers must be",
    "evaluate model photos --real-labels nope.json": "there is none",
    "evaluate model photos --json --csv": "exclude each other",
    "predict ./nowhere x.jpg": "does not exist",
    "predict model x.jpg --top-k 0": "top_k must be",
    "predict model x.jpg --img-size 0": "img_size must be",
    "predict model x.jpg --limit -1": "limit must be",
    "predict model x.jpg --json --csv": "exclude each other",
    "compare nowhere": "'nowhere' does not",
    "compare nowhere.tsv": "'nowhere.tsv' does not",
    "compare photos --budget soon": "--budget must be a duration",
    "compare photos --recipe nope": "Unknown recipe",
    "compare photos --out full": "must be new or empty",
    "compare photos --out photos/x": "must be outside the data folder",
    "compare photos --jobs 0": "--jobs must be",
    "study nope": "Unknown study",
    "study ceit-leff nowhere": "'nowhere' does not",
    "study ceit-leff photos --out full": "must be new or empty",
    "study ceit-leff photos --out photos/x": "must be outside the data folder",
    "study ceit-leff --seeds 0": "--seeds must be",
    "convert nope.pth new": "nope.pth does not exist",
    "convert w.pth full": "must be new",
    "convert w.pth new --img-size x": "img_size must be",
    "export model full": "must be new",
    "export model new.pth": "must end in",
    "export model new --format onnx --precision bf16": "precision must be",
    "export model new --precision int8": "must be calibrated",
    "export model new --data nowhere": "'nowhere' does not",
    "export model photos/x --data photos": "must be outside the data folder",
    "bench ./nowhere": "does not exist",
    "bench levit_256 --backends nope": "backends must be",
    "bench levit_256 --batch-size 0": "batch_size must be",
    "explain model x.jpg --out full": "must be new or empty",
    "explain model x.jpg --out new": "x.jpg cannot be used: the file does not exist",
    "explain model photos --out photos/x": "must be outside the data folder",
    "explain model photos/cat photos/*/*.png --out photos/x": "must be outside the data folder",
    "serve model --port 99999999": "port must be",
    "models --papers nope": "Unknown paper",
    "embed model nowhere --out x.npy": "nowhere cannot be used",
    "embed model photos --out x.txt": "must end in",
    "embed model photos --out full/a.png": "must end in",
    "embed model photos --out photos/cat/x.npy": "must be outside the data folder",
    "embed model photos --out x.npy --batch-size 0": "batch_size must be",
    "similar model x.png photos": "x.png cannot be used",
    "similar model photos/cat/a.png nowhere": "nowhere cannot be used",
    "similar model x.png photos --top-k 0": "top_k must be",
    "similar model x.png photos --json --csv": "exclude each other",
    "label model nowhere": "nowhere cannot be used",
    "label model photos --out full": "must be new or empty",
    "label model photos --out photos/cat/new": "must be outside the data folder",
    "data review photos --out photos/x": "must be outside the data folder",
    "data prepare photos photos/x": "must be outside the data folder",
    "data review nowhere": "'nowhere' does not",
    "data review photos --out full": "must be new or empty",
    "data review nowhere.csv": "'nowhere.csv' does not",
    "data check nowhere": "'nowhere' does not",
    "data check photos.zip": "is a ZIP archive. Unpack it",
    "data check gzip.tar": "gzip.tar' cannot be read (it is a gzip archive). Unpack it",
    "data prepare photos full": "must be new",
}

# Names that neither weft nor a directory has: timm is asked, whose import takes seconds.
UNKNOWN = {
    "train photos --model levit_999": "Unknown model 'levit_999'. Nearest: levit_192",
    "train photos --model resnet500": "Nearest: resnet50",
    "evaluate nowhere photos": "no directory nowhere",
    "predict nowhere x.jpg": "no directory nowhere",
    "predict levit_256.fb_dist_in1 x.jpg": "levit_256.fb_dist_in1k",
    "compare photos --models levit_999 levit_256": "Unknown model 'levit_999'",
    "convert w.pth new --model levit_999": "Unknown model",
    "export nowhere new": "no directory nowhere",
    "bench levit_999": "Unknown model",
    "explain nowhere x.jpg --out new": "no directory nowhere",
    "serve nowhere": "no directory nowhere",
    "push nowhere me/model": "no directory nowhere",
    "embed nowhere photos --out x.npy": "no directory nowhere",
    "similar nowhere x.png photos": "no directory nowhere",
    "label nowhere photos": "no directory nowhere",
    "data review photos --run nowhere": "no directory nowhere",
    "models nope": "Unknown model",
}


def test_what_can_be_refused_is_refused_without_torch(tmp_path: Path) -> None:
    """Also without timm. Nothing is written."""
    save_model_dir(weft.create_model("levit_nano_32", num_classes=3), tmp_path / "model")
    for name in ("photos/cat", "photos/dog", "full"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "w.pth").touch()
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("cat/a.png", b"")
    for name in ("photos.tar.gz", "gzip.tar"):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.add(tmp_path / "photos", "photos")
    before = sorted(tmp_path.rglob("*"))
    code = f"""
import contextlib, io, json, sys
from weft.cli import main
for name in ("torch", "timm", "torchvision"):
    sys.modules[name] = None  # the documented way to make an import fail
wrong = []
for line, part in {REFUSED!r}.items():
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        try:
            code = main(line.split())
        except ImportError as error:
            code = error
    text = stream.getvalue()
    if code not in (2, 3, 4) or part not in text or text.count(chr(10)) != 1:
        wrong.append([line, repr(code), text])
print(json.dumps(wrong, indent=1))
"""
    assert python(code, tmp_path).strip() == "[]"
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_images_are_reported_without_torch(tmp_path: Path) -> None:
    save_model_dir(weft.create_model("levit_nano_32", num_classes=3), tmp_path / "model")
    code = """
import sys
from weft.cli import main
sys.modules["torch"] = None
sys.exit(main(["predict", "model", "x.jpg", "y*.jpg", "--json"]) != 3)
"""
    rows = json.loads(python(code, tmp_path))
    assert [(row["image"], row["reason"]) for row in rows] == [("x.jpg", "missing"), ("y*.jpg", "missing")]


def test_unknown_names_are_refused_with_the_nearest_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos/cat", "photos/dog"):
        Path(name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(Path(name) / "a.png")
    Path("w.pth").touch()
    for name in ("x.jpg", "x.png"):
        Image.new("RGB", (8, 8)).save(name)
    before = sorted(tmp_path.rglob("*"))
    for line, part in UNKNOWN.items():
        assert main(line.split()) in (2, 4), line
        assert part in capsys.readouterr().err, line
    assert sorted(tmp_path.rglob("*")) == before


def test_names_are_those_of_weft_and_of_timm() -> None:
    theirs = timm.list_models(include_tags=True)
    assert all(is_model(name) for name in (*VARIANTS, *theirs[::50], "resnet50", "vit_base_patch16_224_miil_in21k"))
    for name in ("levit_25", "levit_256.fb_dist_in1", "../resnet50", "", "local-dir:/etc", "hf-hub:timm/resnet50"):
        assert not is_model(name), name
    assert nearest_names("vit_base_patch16_224.augreg_in21")[0] == "vit_base_patch16_224.augreg_in21k"
    assert nearest_names("efficentnet_b0")[0] == "efficientnet_b0"
    with pytest.raises(UsageError, match="Nearest: resnet50"):
        weft.create_model("resnet500")
