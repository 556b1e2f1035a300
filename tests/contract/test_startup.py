"""What a verb imports: modules are counted here, not seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

import weft
from weft.checkpoints import load_model_dir, save_model_dir
from weft.errors import UsageError
from weft.models import building, registry
from weft.models.contract import preprocessing
from weft.models.timm_names import may_be_timm, nearest_names, timm_names, timm_tags

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
    assert [name for name in SLOW if name in modules] == []


@pytest.mark.parametrize("name", weft.list_models())
def test_a_network_is_the_same_with_and_without_timm(name: str) -> None:
    for arguments in ({}, {"num_classes": 5, "in_chans": 1}):
        with torch.device("meta"):
            ours = building.create_model(name, **arguments)
            theirs = registry.build_with_timm(name, False, dict(arguments))
        assert _notes(ours) == _notes(theirs)
        assert str(ours) == str(theirs)
        assert timm.data.resolve_model_data_config(theirs) == preprocessing(ours)


def _notes(model: torch.nn.Module) -> dict[str, object]:
    """Return the attributes of a network that are neither torch's nor modules, with those that timm writes."""
    return {key: value for key, value in vars(model).items() if key in ("_traits", "_model_args") or key[0] != "_"}


def test_weights_replace_all_values_that_loading_leaves_unset(tmp_path: Path) -> None:
    model = weft.create_model("levit_nano_32", num_classes=3).eval()
    loaded = load_model_dir(save_model_dir(model, tmp_path / "model"))[0]
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))


def test_names_of_timm_that_a_directory_is_not_looked_up_for() -> None:
    names = timm.list_models(exclude_filters="weft_*")
    plain = [name for name in names if not any(letter.isdigit() or letter == "_" for letter in name)]
    assert len(plain) <= 2


# Command lines that need neither a model nor an image to be refused, and a part of the message.
REFUSED = {
    "train photos --out full": "must be new or empty",
    "train nowhere": "'nowhere' does not",
    "train": "Training needs images",
    "train photos --model levit_999": "Unknown model 'levit_999'. Nearest: levit_192",
    "train photos --model resnet500": "Nearest: resnet50",
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
    "evaluate nowhere photos": "no directory nowhere",
    "evaluate model nowhere": "'nowhere' does not",
    "evaluate model photos --out full": "must be new or empty",
    "evaluate model photos --workers x": "workers must be",
    "evaluate model photos --real-labels nope.json": "there is none",
    "evaluate model photos --json --csv": "exclude each other",
    "predict nowhere x.jpg": "no directory nowhere",
    "predict ./nowhere x.jpg": "does not exist",
    "predict levit_256.fb_dist_in1 x.jpg": "levit_256.fb_dist_in1k",
    "predict model x.jpg --top-k 0": "top_k must be",
    "predict model x.jpg --img-size 0": "img_size must be",
    "predict model x.jpg --limit -1": "data.limit must be",
    "predict model x.jpg --json --csv": "exclude each other",
    "compare nowhere": "'nowhere' does not",
    "compare photos --models levit_999 levit_256": "Unknown model 'levit_999'",
    "compare photos --budget soon": "--budget must be a duration",
    "compare photos --recipe nope": "Unknown recipe",
    "compare photos --out full": "must be new or empty",
    "compare photos --jobs 0": "--jobs must be",
    "study nope": "Unknown study",
    "study ceit-leff nowhere": "'nowhere' does not",
    "study ceit-leff photos --out full": "must be new or empty",
    "study ceit-leff --seeds 0": "--seeds must be",
    "convert nope.pth new": "nope.pth does not exist",
    "convert w.pth full": "must be new",
    "convert w.pth new --model levit_999": "Unknown model",
    "convert w.pth new --img-size x": "img_size must be",
    "export nowhere new": "no directory nowhere",
    "export model full": "must be new",
    "export model new.pth": "must end in",
    "export model new --format onnx --precision bf16": "precision must be",
    "export model new --precision int8": "must be calibrated",
    "export model new --data nowhere": "'nowhere' does not",
    "bench levit_999": "Unknown model",
    "bench ./nowhere": "does not exist",
    "bench levit_256 --ways nope": "ways must be",
    "bench levit_256 --batch-size 0": "--batch-size must be",
    "explain nowhere x.jpg --out new": "no directory nowhere",
    "explain model x.jpg --out full": "must be new or empty",
    "serve nowhere": "no directory nowhere",
    "serve model --port 99999999": "port must be",
    "push nowhere me/model": "no directory nowhere",
    "reproduce nope": "Unknown paper",
    "reproduce levit --row nope": "Unknown row",
    "reproduce levit --data nowhere": "'nowhere' does not",
    "data check nowhere": "'nowhere' does not",
    "data prepare photos full": "needs a new folder",
    "models nope": "Unknown model",
}


def test_what_can_be_refused_is_refused_without_torch(tmp_path: Path) -> None:
    """Also without timm. Nothing is written."""
    save_model_dir(weft.create_model("levit_nano_32", num_classes=3), tmp_path / "model")
    for name in ("photos/cat", "photos/dog", "full"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "w.pth").touch()
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


def test_names_of_timm_are_read_from_its_source() -> None:
    theirs = {name for name in timm.list_models(include_tags=True) if not name.startswith("weft_")}
    assert timm_names() == {name.partition(".")[0] for name in theirs}
    assert all(may_be_timm(name) for name in theirs)
    assert len({name for name in theirs if "." in name} - timm_tags()) < 60
    assert not may_be_timm("levit_25")
    assert not may_be_timm("levit_256.fb_dist_in1")
    assert nearest_names("vit_base_patch16_224.augreg_in21")[0] == "vit_base_patch16_224.augreg_in21k"
    assert nearest_names("efficentnet_b0")[0] == "efficientnet_b0"
    with pytest.raises(UsageError, match="Nearest: resnet50"):
        weft.create_model("resnet500")
