"""Records what this version of weft leaves behind and answers, for `test_compat` to hold later versions to.

    python -m tests.compat.record runs studies networks answers    # or some of them; each replaces what was recorded

`runs`: per family a finished run, a run that was stopped within an epoch, the weights that the latter ends with, and
exports. `studies`: a study and a comparison that are done. `networks`: of every variant the names of its parameters in
their order, the sizes of the optimiser's groups, and a sum over each initial tensor under seed 0. `answers`: what the
service and the verbs print for programs.

Recorded once, with the version that is to be remembered, and committed; never to make a failing test pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.train import tiny

DATA = Path(__file__).parent / "data"
SMALL: dict[str, dict[str, Any]] = {
    "ceit_nano_32": {"depth": 2, "embed_dim": 24, "num_heads": 3},
    "cvt_nano_32": {"depth": [1, 1, 1], "embed_dim": [8, 16, 24], "num_heads": [1, 2, 3]},
    "levit_nano_32": {"depth": [1, 1, 1], "embed_dim": [16, 24, 32], "num_heads": [1, 2, 2], "key_dim": 4},
}
STUDY = """
title: What attention bias brings
claim: Attention bias brings 1.5 points.
source: a test
scales:
  small:
    recipe: digits
    data: digits
    seeds: 1
    set: {model: levit_nano_32, data.limit: 160, epochs: 1, batch_size: 16, device: cpu, precision: fp32,
      model_args.depth: [1, 1, 1], model_args.embed_dim: [16, 24, 32], model_args.num_heads: [1, 2, 2],
      model_args.key_dim: 4}
variants:
- {name: with, paper: 72.0}
- {name: without, paper: 70.5, set: {model_args.attn_bias: false}}
"""
COMPARISON = {"data.limit": 160, "batch_size": 16, "epochs": 1, "precision": "fp32", "device": "cpu"}


def settings(name: str) -> dict[str, Any]:
    """Of a run with an average of the weights, mixed labels and repeated images."""
    return {**tiny.EVERYTHING, "save.keep": 2} | {f"model_args.{key}": value for key, value in SMALL[name].items()}


def record_runs() -> None:
    from weft.data import SplitPlan, open_data
    from weft.deploy import export
    from weft.train import train

    shutil.rmtree(DATA / "images", ignore_errors=True)
    images = tiny.paint(DATA / "images")
    for name in SMALL:
        folder = DATA / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        train(images, name, out=folder / "finished", settings=settings(name), quiet=True)
        _stopped(images, name, folder / "stopped")
        for older in sorted((folder / "stopped" / "state").iterdir())[:-2]:
            older.unlink()
        copy = Path(tempfile.mkdtemp()) / "run"
        shutil.copytree(folder / "stopped", copy)
        train(images, resume=copy, quiet=True)
        shutil.copy(copy / "last" / "model.safetensors", folder / "resumed.safetensors")
        for run in (folder / "finished", folder / "stopped"):
            shutil.rmtree(run / "report", ignore_errors=True)
        shutil.rmtree(folder / "finished" / "state")
        from weft.checkpoints import load_model_dir

        model, names = load_model_dir(folder / "finished" / "best")
        splits = open_data(str(images), SplitPlan(val_fraction=0.2, seed=0))
        for format, precision in (("onnx", "fp32"), ("openvino", "int8")):
            data = splits if precision == "int8" else None
            place = folder / f"{format}-{precision}"
            export(model, place, format=format, precision=precision, data=data, label_names=names, max_drop=100)
    _forget_places()


def record_studies() -> None:
    from weft.study import compare, run_study

    (DATA / "study.yaml").write_text(STUDY)
    for place in ("study", "comparison"):
        shutil.rmtree(DATA / place, ignore_errors=True)
    run_study(DATA / "study.yaml", out=DATA / "study", quiet=True)
    compare("digits", models=["levit_nano_32", "test_resnet"], out=DATA / "comparison", settings=COMPARISON, quiet=True)
    for place in (*DATA.glob("*/runs/*/run"), DATA / "comparison" / "exports"):
        shutil.rmtree(place)
    for place in ("study", "comparison"):
        shutil.rmtree(DATA / place / "state")  # the lock
    for log in DATA.glob("*/runs/*/log.txt"):
        log.unlink()
    _forget_places()


def _forget_places() -> None:
    """Takes the place of this checkout out of what was recorded."""
    for path in (*DATA.rglob("*.json"), *DATA.rglob("*.yaml"), *DATA.rglob("*.md"), *DATA.rglob("*.html")):
        text = path.read_text()
        path.write_text(text.replace(f"{DATA}/", ""))


def _stopped(images: Path, name: str, out: Path) -> None:
    """A run that is told to stop within its second epoch."""
    arguments = tiny.command(images, out, name, **settings(name))
    code = (
        "import os, pathlib, signal, sys\n"
        "from tests.killpoints import killpoints\n"
        "from weft.cli import main\n"
        "from weft.train.state import newest_step\n"
        "stopping = []\n"
        "def at(name):\n"
        f"    if not stopping and (newest_step(pathlib.Path({str(out)!r}) / 'state') or 0) >= 4:\n"
        "        stopping.append(os.kill(os.getpid(), signal.SIGTERM))\n"
        "with killpoints(at):\n"
        f"    sys.exit(main({arguments[3:]!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=tiny.environment(), timeout=300)
    assert done.returncode == 128 + signal.SIGTERM, done


def variant_facts(name: str) -> dict[str, Any]:
    """What must not change about a network: its tensors' order, its optimiser's groups, its initial values."""
    import weft
    from weft.recipes import load_recipe
    from weft.train.loop import _optimizer

    torch.manual_seed(0)
    model = weft.create_model(name)
    groups = [
        len(group["params"])
        for group in _optimizer(model, load_recipe(None, [("optim.layer_decay", 0.75)])).param_groups
    ]
    order = "\n".join(f"{key} {tuple(value.shape)}" for key, value in model.named_parameters())
    state = "\n".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in model.state_dict().items())
    sums = [float(f"{float(value.double().abs().sum()):.5g}") for value in model.state_dict().values()]
    return {
        "parameters": hashlib.sha256(order.encode()).hexdigest(),
        "state": hashlib.sha256(state.encode()).hexdigest(),
        "groups": groups,
        "sums": sums,
    }


def record_networks() -> None:
    from weft.models.families import VARIANTS

    fields = {name: variant_facts(name) for name in VARIANTS}
    text = ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in fields.items())
    (DATA / "networks.json").write_text(f"{{\n{text}\n}}\n")


def service_answers(run: Path) -> dict[str, Any]:
    """/model and /openapi.json of a service."""
    from tests.serve.running import running

    with running(run, "--runtime", "torch") as service:
        return {path: service.ask(path)[1] for path in ("/model", "/openapi.json")}


def verb_answers(images: Path, run: Path) -> dict[str, Any]:
    """What verbs print with --json."""
    answers = {}
    for arguments in (["models"], ["recipes"], ["evaluate", str(run), str(images)]):
        done = subprocess.run(
            [sys.executable, "-m", "weft", *arguments, "--json"],
            capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        answers[arguments[0]] = json.loads(done.stdout)
    return answers


def record_answers() -> None:
    run = DATA / "levit_nano_32" / "finished"
    answers = service_answers(run) | verb_answers(DATA / "images", run)
    (DATA / "answers.json").write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    begun = time.monotonic()
    for part in sys.argv[1:] or ["runs", "studies", "networks", "answers"]:
        globals()[f"record_{part}"]()
        print(f"{part}: {time.monotonic() - begun:.0f} s")
