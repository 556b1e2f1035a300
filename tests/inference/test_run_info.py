"""`weft.info`: what a run, a model directory, an export or a public model is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.errors import CheckpointError

RECORDED = Path(__file__).parents[1] / "compat" / "data" / "levit_nano_32"


def test_a_run_has_data_recipe_accuracy_files_and_exports(tmp_path: Path) -> None:
    run = shutil.copytree(RECORDED / "finished", tmp_path / "run")
    shutil.copytree(RECORDED / "onnx-fp32", run / "exports" / "onnx-fp32")
    report = json.loads((run / "exports" / "onnx-fp32" / "report.json").read_text())
    (run / "exports" / "onnx-fp32" / "report.json").write_text(json.dumps({**report, "top1": 55.5}))
    times = {"chosen": "onnx-fp32", "machine": "here", "seconds": {"onnx-fp32": {"1": 0.01, "16": 0.08}}}
    (run / "exports" / "chosen.json").write_text(json.dumps(times))
    result = weft.info(run)
    assert (result.kind, result.classes, tuple(result.input)) == ("run", ["class0", "class1", "class2"], (3, 32, 32))
    assert result.data == "images: 39 images for training, 9 held out"
    assert result.recipe == "2 epochs, batch size 12, fp32, from random weights"
    assert result.accuracy == "top-1 33.33 % of 9 held-out images (95 % CI 12.1 to 64.6 %), epoch 2 (the best)"
    assert dict(result.files)["metrics.csv"] == (run / "metrics.csv").stat().st_size
    (export,) = result.exports
    assert (export.path, export.format, export.precision, export.top1) == ("exports/onnx-fp32", "onnx", "fp32", 55.5)
    assert str(tmp_path) not in str(export)
    assert result.network == "levit_nano_32"
    assert export.images_per_second == {1: 100, 16: 200}
    assert "200 images/s at batch 16" in str(result)
    assert json.loads(json.dumps(result.as_dict()))["exports"][0]["format"] == "onnx"
    both = weft.info(run / "exports")
    assert (both.kind, both.network, both.exports[0].path) == ("export", "levit_nano_32", "onnx-fp32")
    (run / "exports" / "chosen.json").write_text('{"seconds": 3}')  # not weft's
    assert weft.info(run).exports[0].images_per_second == {}
    (run / "exports" / "onnx-fp32" / "config.json").write_text("{")
    assert weft.info(run).exports == []


def test_exports_and_public_models_also_without_torch() -> None:
    export = weft.info(RECORDED / "onnx-fp32")
    assert (export.kind, export.data, len(export.exports)) == ("export", None, 1)
    model = weft.info("levit_256")
    assert (model.kind, model.licence, model.num_classes) == ("public model", "apache-2.0", 1000)
    assert "81.6 %" in str(model)
    with pytest.raises(CheckpointError, match="does not exist"):
        weft.info("./nowhere")
    code = f"""
import sys, weft
for name in ("torch", "timm", "torchvision"):
    sys.modules[name] = None
print(weft.info({str(RECORDED / "finished")!r}).kind, weft.info("levit_256").kind)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "run public model"
