"""Packages that a verb imports, and the order: modules are counted here, not seconds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import weft
import weft.models.registry  # registers weft's models with timm
from tests.helpers import NANO
from weft.checkpoints import save_model_dir
from weft.checkpoints.resolve import is_path
from weft.data.library import read_digits
from weft.errors import UsageError
from weft.models.contract import preprocessing
from weft.models.families import VARIANTS, is_model, nearest_names
from weft.models.imagenet import FEWEST, imagenet_classes

# Packages that take longer to import than a prediction does, and modules of torch that only compile and export.
SLOW = ("timm", "torchvision", "sklearn", "scipy", "matplotlib", "pandas", "transformers", "torch._dynamo", "sympy")

# Command lines that need no torch, and packages that they import nevertheless.
LIGHT = {
    "data check photos": ("numpy", "PIL"),
    "predict model x.jpg y*.jpg --json": ("numpy", "PIL"),
    "models": ("pydantic",),
}
# Command lines with a model directory of weft's and images.
RUNS = {
    "predict d1 red.png --img-size 48": (),  # d1 is a word in timm's source
    "predict ./run_2 red.png": (),
    "evaluate model photos": (),
    "evaluate ./run_2 photos --limit 4": (),
    "evaluate d1 digits --limit 20": (),
    "embed model photos --out features.npy": (),
    "similar model photos/cat/a.png photos": (),
    "label model photos --num 2": ("scipy",),
    "explain model photos/cat/a.png --out maps --no-grad-cam": ("matplotlib",),
    "evaluate model photos --out report": ("matplotlib",),
}
# Verbs that load PyTorch, as far as the import of it.
LOADING = (
    *("train photos", "train photos --find-lr", "train photos --preview new.png", "train photos --threads 1"),
    *("evaluate model photos", "predict model photos", "embed model photos --out x.npy", "label model photos"),
    *("similar model photos/cat/a.png photos", "explain model photos --out new", "export model new"),
    *("compare photos", "study ceit-leff photos", "study ceit-leff --plan", "convert w.pth new", "data review photos"),
)


def python(code: str, folder: Path) -> Any:
    """Run code in a new process in a folder; return the JSON of the last line that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= dict.fromkeys(("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME"), str(folder / "home"))
    environment["TMPDIR"] = str(folder / "tmp")
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Model directories, photos of two classes, a folder of unreadable files, and weights."""
    for name, model, classes in (
        ("model", "levit_nano_32", ["cat", "dog"]),
        ("run_2", "ceit_nano_32", ["cat", "dog"]),
        ("d1", "cvt_nano_32", [str(digit) for digit in range(10)]),
    ):
        save_model_dir(weft.create_model(model, num_classes=len(classes)), tmp_path / name, label_names=classes)
    for name, colour in (("cat", "red"), ("dog", "blue")):
        for place in ("photos", "bad"):
            (tmp_path / place / name).mkdir(parents=True)
        for file in ("a", "b"):
            Image.new("RGB", (40, 30), colour).save(tmp_path / "photos" / name / f"{file}.png")
            (tmp_path / "bad" / name / f"{file}.png").write_bytes(b"no image")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    (tmp_path / "w.pth").touch()
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_help_and_light_verbs_import_no_heavy_package(folder: Path) -> None:
    """A public name imports its own module alone; the records of families need no torch."""
    code = f"""
import contextlib, io, json, sys
import weft.recipes, weft.models.families
weft.recipes.Recipe
found = {{"weft.recipes.load", "yaml", "torch", "timm"}} & set(sys.modules)
wrong = [["names", sorted(found)]] if found else []
from weft.cli import main
from weft.cli.app import commands
heavy = {{"torch", "timm", "numpy", "PIL", "scipy", "matplotlib", "huggingface_hub"}}
helps = {{}}
for words in ([], *map(str.split, commands())):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([*words, "--help"])
    helps[" ".join(words)] = [code, out.getvalue()]
if heavy & set(sys.modules) or len(sys.modules) > 450:
    wrong.append(["help", sorted(heavy & set(sys.modules)), len(sys.modules)])
rows = {{}}
for line, allowed in {LIGHT!r}.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rows[line] = [main(line.split()), out.getvalue()]
    if (heavy - set(allowed)) & set(sys.modules):
        wrong.append([line, sorted(heavy & set(sys.modules))])
    heavy -= set(allowed)
print(json.dumps([wrong, helps, rows]))
"""
    wrong, helps, rows = python(code, folder)
    assert not wrong
    for command, (code, shown) in helps.items():
        _, found, example = shown.partition("\nexample:\n")
        assert (code, bool(found)) == (0, True), command
        assert f"\n  weft {command}" in f"\n{example}", command
        assert "\n\n  -" not in example, f"{command}: something stands after the example"
    assert [rows[line][0] for line in LIGHT] == [0, 3, 0]
    missing = json.loads(rows["predict model x.jpg y*.jpg --json"][1])
    assert [(row["image"], row["reason"]) for row in missing] == [("x.jpg", "missing"), ("y*.jpg", "missing")]


def test_the_first_line_comes_before_torch_is_imported(folder: Path) -> None:
    """In every verb that imports it; nothing with --quiet. The import is made to fail here."""
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
for line in {LOADING!r}:
    for extra, expected in (([], "Loading PyTorch.\\n"), (["--quiet"], "")):
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            try:
                code = main([*line.split(), *extra])
            except ImportError as error:
                code = str(error)
        if code != "torch is not imported here" or stream.getvalue() != expected:
            wrong.append([line, extra, code, stream.getvalue()])
print(json.dumps(wrong))
"""
    assert python(code, folder) == []


def test_inference_imports_no_package_that_only_training_needs(folder: Path) -> None:
    """Networks are built without pydantic, sockets and files; data that cannot be used are refused without timm."""
    code = f"""
import contextlib, io, json, os, sys
seen = []
def watch(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        seen.append([event, str(args)[:200]])
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append([event, str(args[0])])
sys.addaudithook(watch)
import torch
pid = os.fork()  # without what the command line imports
if pid == 0:
    import weft
    for name in {NANO!r}:
        weft.create_model(name)
    packages = [name for name in (*{SLOW!r}, "pydantic") if name in sys.modules]
    assert weft.load_checkpoint
    files = [item for item in seen if item[1] != os.devnull and not item[1].startswith(os.environ["TMPDIR"])]
    files += [name for _, _, names in os.walk(os.environ["HOME"]) for name in names]
    with open("networks.json", "w") as file:
        json.dump([["networks", files, packages]] if files or packages else [], file)
    os._exit(0)
os.waitpid(pid, 0)
wrong = json.load(open("networks.json"))
from weft.cli import main
for line, allowed in {RUNS!r}.items():
    with contextlib.redirect_stdout(io.StringIO()):
        code = main([*line.split(), "--quiet", *(["--json"] if "--out" not in line else [])])
    banned = [*{SLOW!r}, *(["huggingface_hub"] if line.startswith("predict") else [])]
    found = [name for name in banned if name in sys.modules and name not in allowed]
    if code or found:
        wrong.append([line, code, found])
    for name in allowed:  # so that the next command has to import it again
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
code = main(["train", "bad", "--model", "ceit_nano_32", "--out", "run"])
found = [name for name in {SLOW!r} if name in sys.modules and name != "scipy"]
if code != 3 or found:
    wrong.append(["train", code, found])
print(json.dumps(wrong))
"""
    assert python(code, folder) == []


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


def test_names_are_those_of_weft_and_of_timm_and_the_rest_are_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without timm's import; also the smallest number of classes of timm's variants of ImageNet."""
    theirs = timm.list_models(include_tags=True)
    assert all(is_model(name) for name in (*VARIANTS, *theirs[::50], "resnet50", "vit_base_patch16_224_miil_in21k"))
    for name in ("levit_25", "levit_256.fb_dist_in1", "../resnet50", "", "local-dir:/etc", "hf-hub:timm/resnet50"):
        assert not is_model(name), name
    assert nearest_names("vit_base_patch16_224.augreg_in21")[0] == "vit_base_patch16_224.augreg_in21k"
    assert nearest_names("efficentnet_b0")[0] == "efficientnet_b0"
    with pytest.raises(UsageError, match="Nearest: resnet50"):
        weft.create_model("resnet500")

    monkeypatch.chdir(tmp_path)
    Path("resnet50").mkdir()
    names = ("resnet50", "levit_256", "resnet18.a1_in1k", "./levit_256", "runs/levit_256", "hf-hub:me/net")
    paths = ["resnet50", "./levit_256", "runs/levit_256", "hf-hub:me/net"]
    assert [name for name in names if is_path(name)] == paths

    assert all(timm.data.infer_imagenet_subset({"num_classes": number}) is None for number in range(FEWEST))
    assert imagenet_classes(FEWEST) is not None


def test_digits_are_read_by_scikit_learn_where_its_file_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = read_digits()
    monkeypatch.setattr("weft.data.library.package_folder", lambda name: None)
    again, same = read_digits()
    assert labels == same
    assert (images == again).all()


def test_an_unknown_public_name_says_which_there_are() -> None:
    expected = "module 'weft.recipes' has no attribute 'read_recipe'; it has Recipe, dump, load_recipe, "
    with pytest.raises(AttributeError, match=f"^{expected}"):
        _ = importlib.import_module("weft.recipes").read_recipe
