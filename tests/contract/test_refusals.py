"""Command lines that are refused: the exit code, words that a user can act on, one line, and nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import weft
from weft.checkpoints import save_model_dir
from weft.cli import main

THREADS = "--threads must be a whole number at least 1 and at most 1024; got"
DURATION = "must be a duration such as 10ms, 90s, 45m or 1h30m; got"
OUTSIDE = "must be outside the data folder"

# Refused without torch, timm and torchvision: exit code -> command line -> a part of the message.
REFUSED = {
    2: {
        # verbs, options and places
        "trian x": "Unknown verb 'trian'. Nearest: train, ",
        "help trian": "Unknown verb 'trian'. Nearest: train, ",
        "--verison": "Unknown option '--verison'. Nearest: --version, ",
        "train digits --epoch 3": "Unknown option of weft train '--epoch'. Nearest: --epochs, ",
        "train digits --epoch=3": "Unknown option of weft train '--epoch'. Nearest: --epochs, ",
        "train digits --quie": "Unknown option of weft train '--quie'",  # no abbreviation
        "train digits --no-force": "Unknown option of weft train '--no-force'",  # flags have no opposite
        "compare digits --empty-models": "Unknown option of weft compare '--empty-models'",
        "predict --run model a.png": "Unknown option of weft predict '--run'",  # a place has no name
        "predict model x.png --top_k 1": "Unknown option of weft predict '--top_k'. Nearest: --top-k, ",
        "predict model x.png --quiet=maybe": "--quiet must be given without a value; got 'maybe'. See: ",
        "predict model x.png --top-k few": "--top-k must be a whole number; got 'few'. See: ",
        "train digits extra": "weft train has no place for 'extra'. See: weft train --help",
        "train digits --device gpu": "--device must be one of auto, cpu, cuda, mps; got 'gpu'. See: weft train --help",
        "train digits --epochs": "--epochs needs a value; got none. See: weft train --help",
        "evaluate": "needs RUN; got none. Usage: weft evaluate RUN DATA [options]. See: weft evaluate --help",
        "models --papers nope": "Unknown paper",
        "models --papers levit x": "Unknown paper or model 'x'. Nearest: ",
        "models --papers levit --papers x": "Unknown paper or model 'x'. Nearest: ",
        "models --plugin missing.py": "A plugin must be a Python file (.py)",
        "models --plugin photos": "A plugin must be a Python file (.py)",
        "models --plugin w.pth": "A plugin must be a Python file (.py)",
        # values and settings
        "train photos --epochs x": "epochs must be a whole number at least 0 and at most 100000; got 'x'",
        "train photos --batch-size 0": "batch_size must be a whole number at least 1 and at most 65536 or auto; got",
        "embed model photos --out x.npy --batch-size 0": "number at least 1 and at most 65536; got '0'",
        "train photos --img-size 4": "img_size must be a whole number at least 8",
        "train photos --set a.b=3": "Unknown setting",
        "train digits --set imgsize=32": "Unknown setting 'imgsize'. Nearest: img_size, ",
        "train digits --set optim.lr": "--set takes KEY=VALUE; got 'optim.lr'",
        "train digits --set optim.lr=-1": "optim.lr must be a number above 0 and at most 10; got '-1'",
        "train digits optim.lr=1e-3": "no place for 'optim.lr=1e-3'. A setting needs --set: --set optim.lr=1e-3.",
        "train photos --recipe digit": "Unknown recipe 'digit'. Nearest: digits",
        "train photos --max-time soon": f"--max-time {DURATION} 'soon'",
        "train photos --track nope": "Unknown tracker",
        "train": "Training needs images; got none.",
        "train photos --resume model --out new": "Omit them",
        "train photos --from model --from-scratch": "exclude each other",
        "evaluate model photos --workers x": "workers must be",
        "evaluate model photos --json --csv": "exclude each other",
        "predict model x.jpg --json --csv": "exclude each other",
        "predict model x.jpg --top-k 0": "top_k must be",
        "predict model x.jpg --img-size 0": "img_size must be",
        "predict model x.jpg --limit -1": "limit must be",
        **{
            f"predict model x.jpg --threads {number}": f"{THREADS} {number}"
            for number in (0, -1, 1025, 99999999999999999999)
        },
        **{f"predict model x.jpg --threads {word}": "--threads must be a whole number" for word in ("many", "1e3")},
        "similar model x.png photos --top-k 0": "top_k must be",
        "similar model x.png photos --json --csv": "exclude each other",
        "convert w.pth new --img-size x": "img_size must be",
        "convert odd.safetensors new --set kv_stride": "--set takes KEY=VALUE; got 'kv_stride'",
        "export model new.pth": "must end in",
        "export model new --format onnx --precision bf16": "precision must be",
        "export model new --precision int8": "must be calibrated",
        "bench levit_256 --backends nope": "backends must be",
        "bench levit_256 --batch-size 0": "batch_size must be",
        "serve model --port 99999999": "port must be",
        "embed model photos --out x.txt": "must end in",
        "embed model photos --out full/a.png": "must end in",
        # comparisons, studies and recipes
        "compare photos --budget soon": f"--budget {DURATION} 'soon'",
        "compare digits --max-latency fast": f"--max-latency {DURATION} 'fast'",
        "compare digits --max-size 20": "--max-size must be a size such as 20MB; got '20'.",
        "compare digits --budget 1h --epochs 3": "number of epochs; pass --budget or --epochs, not both.",
        "compare digits --seeds 0": "--seeds must be a whole number at least 1; got 0.",
        "compare digits --threads 0": f"{THREADS} 0",
        "compare photos --jobs 0": "--jobs must be a whole number at least 1; got 0.",
        "compare photos --recipe nope": "Unknown recipe",
        "study ceit-lef": "Unknown study 'ceit-lef'. Nearest: ceit-leff",
        "study ceit-leff --seeds 0": "--seeds must be",
        "study ceit-leff digits --jobs 0": "--jobs must be a whole number at least 1; got 0.",
        "study ceit-leff digits --threads 0": f"{THREADS} 0",
        "study ceit-leff digits --engine spark": "--engine must be one of local, ray; got 'spark'",
        "study --seeds 3": "An option of a study needs NAME, the study; got none.",
        "recipes show": "weft recipes show needs NAME; got none. Usage: weft recipes show NAME [options]. See: ",
        "recipes digits": "Unknown command of weft recipes 'digits'. Nearest: ",
        "recipes shwo digits": "Unknown command of weft recipes 'shwo'. Nearest: show, ",
        "recipes settings optim": "weft recipes settings has no place for 'optim'.",
        "recipes settings --set epochs=1": "Unknown option of weft recipes settings '--set'. Nearest: ",
        "recipes show digits --json": "Unknown option of weft recipes show '--json'. Nearest: ",
        "recipes show levit_pretrian": "Unknown recipe 'levit_pretrian'. Nearest: levit_pretrain",
        "recipes show digits --set optim.lrr=1": "Unknown setting 'optim.lrr'. Nearest: optim.lr",
        "recipes show no/such.yaml": "no/such.yaml must be readable; No such file or directory",
        # data
        "data check digits": "DATA must be a directory; got digits, which is part of scikit-learn",
        "data bench photos --seconds 0": "seconds must be above 0 and finite; got 0.0.",
        "data bench": "weft data bench needs DATA; got none. Usage: weft data bench DATA [options]. See: ",
        "data check photos --max-pixels 0": "max_pixels must be a whole number at least 1; got '0'",
        "data check photos --max-pixels 1e8": "must be a whole number at least 1; got '1e8'",
        "data check": "weft data check needs DATA; got none. Usage: weft data check DATA [options]. See: ",
        "data prepare photos": "needs OUT; got none. Usage: weft data prepare DATA OUT [options]. See: ",
        "data prepare photos new --size big": "--size must be a whole number; got 'big'. See: ",
        "data chek photos": "Unknown command of weft data 'chek'. Nearest: check, ",
        # outputs
        "train photos --out full": "must be new or empty",
        "train photos --out photos/x": OUTSIDE,
        "train photos --out photos/x --force": OUTSIDE,
        "evaluate model photos --out full": "must be new or empty",
        "evaluate model photos --out photos/x": OUTSIDE,
        "evaluate model photos --out new --unknown-images full --out full/x": OUTSIDE,
        "compare photos --out full": "must be new or empty",
        "compare photos --out photos/x": OUTSIDE,
        "study ceit-leff photos --out full": "must be new or empty",
        "study ceit-leff photos --out photos/x": OUTSIDE,
        "convert w.pth full": "must be new or empty",
        "export model full": "must be new",
        "export model photos/x --data photos": OUTSIDE,
        "explain model x.jpg --out full": "must be new or empty",
        "explain model photos --out photos/x": OUTSIDE,
        "explain model photos/cat photos/*/*.png --out photos/x": OUTSIDE,
        "embed model photos --out photos/cat/x.npy": OUTSIDE,
        "label model photos --out full": "must be new or empty",
        "label model photos --out photos/cat/new": OUTSIDE,
        "data review photos --out photos/x": OUTSIDE,
        "data review photos --out full": "must be new or empty",
        "data prepare photos photos/x": OUTSIDE,
        "data prepare photos full": "must be new",
    },
    3: {
        **{
            f"{verb} {path}": f"'{path}' does not"
            for verb in ("train", "evaluate model", "compare", "study ceit-leff", "data review", "data check")
            for path in ("nowhere", "nowhere.csv")
            if (verb, path) not in {("study ceit-leff", "nowhere.csv"), ("data check", "nowhere.csv")}
        },
        "evaluate model nowhere.parquet": "'nowhere.parquet' does not",
        "compare nowhere.tsv": "'nowhere.tsv' does not",
        "data check nowhere.csv": "'nowhere.csv' is not (No such file or directory)",
        "evaluate model photos --real-labels nope.json": "there is none",
        "train part-{0..1}.tar": "'part-0.tar' does not",
        "train photos.zip": "'photos.zip' is a ZIP archive. Unpack it",
        "train photos.tar.gz": "'photos.tar.gz' is a gzip archive. Unpack it",
        "evaluate model photos.zip": "is a ZIP archive. Unpack it",
        "data check photos.zip": "is a ZIP archive. Unpack it",
        "data check gzip.tar": "gzip.tar' cannot be read (it is a gzip archive). Unpack it",
        "export model new --data nowhere": "'nowhere' does not",
        "explain model x.jpg --out new": "x.jpg cannot be used: the file does not exist",
        "embed model nowhere --out x.npy": "nowhere cannot be used",
        "similar model x.png photos": "x.png cannot be used",
        "similar model photos/cat/a.png nowhere": "nowhere cannot be used",
        "label model nowhere": "nowhere cannot be used",
    },
    4: {
        "train --resume nowhere": "has no recipe.yaml",
        "train photos --from nowhere": "nowhere is none of these",
        "predict ./nowhere x.jpg": "does not exist",
        "evaluate full digits": "or a model directory (with config.json); ",
        "bench ./nowhere": "does not exist",
        "convert nope.pth new": "nope.pth does not exist",
    },
}

STUDY = """
title: t
claim: c
source: s
scales: {small: {recipe: digits, data: digits, seeds: 1, set: {model: levit_nano_32}}}
variants:
- {name: first, data: others, against: first}
- {name: second, against: first}
"""
# Refused by what torch or timm knows, such as the names of all models.
REFUSED_WITH_TORCH = {
    2: {
        "train photos --model levit_999": "Unknown model 'levit_999'. Nearest: levit_192",
        "train photos --model resnet500": "Nearest: resnet50",
        "models nope": "Unknown model",
        "models resnett*": "Unknown model 'resnett*'. Nearest: ",
        "bench levit_999": "Unknown model",
        "compare photos --models levit_999 levit_256": "Unknown model 'levit_999'",
        "compare digits --models levit_nano_32": "at least two models, each once; got levit_nano_32.",
        "compare digits --models levit_nano_32 levit_nano": "Unknown model 'levit_nano'",
        "convert odd.safetensors new": "must match exactly one model of weft; it matches none. Pass --model NAME",
        "convert odd.safetensors new --model levit_128z": "Unknown model 'levit_128z'. Nearest: levit_128, levit_128s",
        "convert nano.safetensors new --model cvt_nano_32 --set kv_strides=1": "Nearest: kv_stride",
        "convert wide.pth new": "must match exactly one model",  # 2 KB that name 2 million classes
        "study two.yaml others=digits digits": "Several DATA must be NAME=DATA",
        "study two.yaml others=digits others=digits": "must be given once; got others=digits others=digits.",
        "study two.yaml x=digits --plan": "Unknown dataset of two 'x'",
        "study ceit-leff --plan --only 7x7": "Unknown variant of ceit-leff '7x7'. Nearest: ",
    },
    3: {"study ceit-leff nowhere --plan": "The data directory must exist; 'nowhere' does not."},
    4: {
        "evaluate nowhere photos": "no directory nowhere",
        "predict nowhere x.jpg": "no directory nowhere",
        "predict levit_256.fb_dist_in1 x.jpg": "levit_256.fb_dist_in1k",
        "export nowhere new": "no directory nowhere",
        "explain nowhere x.jpg --out new": "no directory nowhere",
        "serve nowhere": "no directory nowhere",
        "push nowhere me/model": "no directory nowhere",
        "embed nowhere photos --out x.npy": "no directory nowhere",
        "similar nowhere x.png photos": "no directory nowhere",
        "label nowhere photos": "no directory nowhere",
        "data review photos --run nowhere": "no directory nowhere",
        "convert odd.safetensors new --model levit_nano_32": "Nothing was loaded",
        "convert nano.safetensors new --prefix mod": "keys of the checkpoint; got 'mod'",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory, photos, archives, weights, a study, and a folder that is not empty."""
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
    save_file({"a.weight": torch.zeros(3, 3)}, tmp_path / "odd.safetensors")
    save_file(weft.create_model("cvt_nano_32", num_classes=3).state_dict(), tmp_path / "nano.safetensors")
    torch.save({"head.bias": torch.empty(2**21, 0), "cls_token": torch.zeros(1, 1, 8)}, tmp_path / "wide.pth")
    (tmp_path / "two.yaml").write_text(STUDY)
    return tmp_path


def test_what_can_be_refused_is_refused_without_torch(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    code = f"""
import contextlib, io, json, sys
from weft.cli import main
for name in ("torch", "timm", "torchvision"):
    sys.modules[name] = None  # the documented way to make an import fail
wrong = []
for expected, lines in {REFUSED!r}.items():
    for line, part in lines.items():
        with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                code = main(line.split())
            except ImportError as error:
                code = repr(error)
        text = err.getvalue()
        if code != expected or part not in text or text[:6] != "weft: " or text.count(chr(10)) != 1 or out.getvalue():
            wrong.append([line, code, text])
print(json.dumps(wrong, indent=1))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
    assert sorted(folder.rglob("*")) == before


def test_what_torch_must_know_is_refused_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for name in ("x.jpg", "x.png"):
        Image.new("RGB", (8, 8)).save(name)
    before = sorted(folder.rglob("*"))
    for code, lines in REFUSED_WITH_TORCH.items():
        for line, part in lines.items():
            found = main(line.split())
            out, err = capsys.readouterr()
            last = err.splitlines()[-1]
            assert (found, out, last.startswith("weft: "), part in last) == (code, "", True, True), (line, found, err)
    assert sorted(folder.rglob("*")) == before
