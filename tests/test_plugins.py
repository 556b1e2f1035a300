"""Plugins: a family of networks in somebody's file takes part in everything, and no file can load one by itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch

import weft
import weft.models.registry  # registers with timm
from tests.helpers import images, lively, outputs_of
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main
from weft.errors import CheckpointError, UsageError
from weft.inference import open_model
from weft.interpret import explain
from weft.models import families
from weft.models.families import VARIANTS, family_of

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "my_family.py"
PAGE = ROOT / "docs" / "your-own-network.md"


@pytest.fixture(autouse=True)
def _forget_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every test begin without plugins, and leave none behind: neither in weft nor in timm's registry."""
    weft.list_models()
    monkeypatch.setenv(families.PLUGINS, "")
    known = dict(families._families)
    yield
    families._families.clear()
    families._families.update(known)
    families._sources.clear()
    families._loaded.clear()
    registered = timm.models._registry._module_to_models["registry"]  # of weft.models.registry
    for name in {name for name in registered if name.removeprefix("weft_") not in VARIANTS}:
        registered.remove(name)
        del timm.models._registry._model_entrypoints[name]


def written(folder: Path, text: str) -> Path:
    (folder / "plugin.py").write_text(text)
    return folder / "plugin.py"


def test_a_model_of_a_plugin_has_the_whole_contract():
    family = weft.load_plugin(EXAMPLE)
    assert weft.load_plugin(EXAMPLE) is family
    assert "mixed_nano_32" in weft.list_models("mixed*")
    model = lively("mixed_nano_32", num_classes=5)
    assert family_of(model) is family
    x = images(model, 2)
    with torch.no_grad():
        torch.testing.assert_close(weft.fold(model)(x), model(x), rtol=1e-4, atol=1e-5)
        maps = timm.create_model("weft_mixed_nano_32", features_only=True).eval()(x)
    assert [tuple(fmap.shape) for fmap in maps] == [(2, 96, 8, 8)] * 4
    model.set_input_size((40, 24))
    explanation = explain(model, images(model, 1)[0])
    assert explanation.rollout is not None
    assert explanation.rollout.shape == (10, 6)
    assert explanation.grad_cam is not None
    assert explanation.grad_cam.shape == (10, 6)
    with pytest.raises(UsageError, match=r"Unknown argument of mixed_nano_32 'embed_dims'. Nearest: embed_dim"):
        weft.create_model("mixed_nano_32", embed_dims=3)


def test_it_trains_and_resumes_and_exports(tmp_path, capsys):
    run, plugin = tmp_path / "run", ["--plugin", str(EXAMPLE)]
    small = ["--limit", "40", "--set", "batch_size=20", "--quiet"]
    words = ["digits", "--model", "mixed_micro_32", "--epochs", "2", "--out", str(run)]
    assert main(["train", *words, *plugin, *small]) == 0
    assert json.loads((run / "best" / "config.json").read_text())["plugin"] == "my_family.py"
    assert main(["train", "--resume", str(run), *plugin, "--quiet"]) == 0
    assert main(["export", str(run), str(run / "onnx"), *plugin, "--format", "onnx", "--quiet"]) == 0
    capsys.readouterr()
    families._loaded.clear()
    del families._families["Mixed"]
    families._sources.clear()
    assert main(["train", "--resume", str(run), "--quiet"]) == 2
    assert "started with the plugin my_family.py, which is not loaded. Pass --plugin FILE" in capsys.readouterr().err
    assert main(["evaluate", str(run), "digits"]) == 4
    assert "needs the plugin my_family.py, which has the model mixed_micro_32" in capsys.readouterr().err
    exported = open_model(run / "onnx")  # an export needs no plugin to predict
    images_of = torch.zeros(2, *exported.info.pretrained_cfg["input_size"])
    assert outputs_of(exported, images_of).shape == (2, 10)


def test_no_file_loads_a_plugin(tmp_path):
    """A model directory that names a file which exists is refused; the file is not run."""
    weft.load_plugin(EXAMPLE)
    folder = save_model_dir(lively("mixed_micro_32", num_classes=2), tmp_path / "model")
    families._loaded.clear()
    del families._families["Mixed"]
    harmful = written(tmp_path, "raise SystemExit('run')")
    config = json.loads((folder / "config.json").read_text()) | {"plugin": str(harmful)}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"it is not loaded\. Pass --plugin FILE"):
        load_model_dir(folder)


NEW = "from weft.models.family import Family, Variant\nFAMILY = Family({!r}, 'a:b', {{{!r}: Variant({{}})}})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "must run; it fails with ZeroDivisionError"),
        ("FAMILY = 3", "must have FAMILY, a weft.models.family.Family; got int"),
        ("family = None", "must have FAMILY, a weft.models.family.Family; got NoneType"),
        (NEW.format("CeiT", "new"), r"must add new names; the family CeiT exists already\. Rename it in plugin\.py\."),
        (NEW.format("New", "cvt_13"), "the model cvt_13 exists already"),
        (NEW.format("New", "resnet18"), "timm has a model resnet18"),
        (NEW.format("New", "../New"), r"names of lower-case letters, digits and _; got '\.\./New'"),
    ],
)
def test_plugins_that_cannot_be_used_say_why(text, message, tmp_path):
    before = dict(VARIANTS)
    with pytest.raises(UsageError, match=message):
        weft.load_plugin(written(tmp_path, text))
    assert dict(VARIANTS) == before
    assert os.environ[families.PLUGINS] == ""


def test_a_package_adds_a_family_and_a_broken_one_is_reported(tmp_path, monkeypatch, capsys):
    shutil.copy(EXAMPLE, tmp_path / "mixed_package.py")
    for name, entry in (("mixed_package", "mixed_package:FAMILY"), ("broken", "no_such_module:FAMILY")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{families.ENTRY_POINTS}]\nfamily = {entry}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "_load_plugins", True)
    with pytest.warns(UserWarning, match="The plugin of broken cannot be loaded: No module named 'no_such_module'"):
        assert main(["models", "mixed_micro*", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    params = sum(parameter.numel() for parameter in weft.create_model("mixed_micro_32").parameters())
    assert (row["family"], row["params"]) == ("Mixed", params)


def commands() -> list[list[str]]:
    """The commands of the page, in order."""
    block = re.search(r"<!-- run by a test -->\n```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block[1].strip().splitlines()]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_page_from_training_to_serving(tmp_path):
    """Every command of docs/your-own-network.md, in processes of their own, as a reader would run it."""
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    *before, serve = commands()
    assert [arguments[1] for arguments in before] == ["models", "train", "evaluate", "bench", "export", "compare"]
    for arguments in before:
        ended = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
        )
        assert ended.returncode == 0, (arguments, ended.stderr[-2000:])
    with (tmp_path / "log.txt").open("wb") as log:
        service = subprocess.Popen([sys.executable, "-m", *serve], cwd=tmp_path, stderr=log)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen("http://127.0.0.1:8765/model") as answer:
                    model = json.loads(answer.read())
                break
            except OSError:
                assert service.poll() is None, (tmp_path / "log.txt").read_text()
                time.sleep(0.2)
        else:
            pytest.fail("The service did not start within two minutes.")
    finally:
        service.terminate()
        service.wait(60)
    assert (model["architecture"], model["overlay"]) == ("Mixed", True)
    assert model["precision"] in ("fp32", "int8")  # what is faster here: the model or its export
