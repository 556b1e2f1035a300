"""Compare weft with common tools for few images: accuracy, time and lines of user code.

    python benchmarks/few-images/tools.py PHOTOS [--python PYTHON] [--tools NAME ...]

Every tool trains on the same five stratified folds of PHOTOS, starts from the same weights of tf_efficientnet_lite0
(extra `offline`), uses the same number of threads, and runs in a separate process. The tools are the scripts in tools/,
each with the defaults of its library. PYTHON is an environment with timm, scikit-learn and fastai. timm's training
script is not part of its package, so timm_loop.py has a loop. Time is that of the whole process with its imports. Adds
rows to tools.csv, and skips measurements that are in it. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.checkpoints.bundled import read_bundle
from weft.machine.processor import processor_class
from weft.runs.directory import read_metrics

HERE = Path(__file__).parent
TABLE = HERE / "tools.csv"
MODEL = "tf_efficientnet_lite0"
FOLDS = 5
SCRIPTS = ("sklearn_timm", "fastai_fine_tune", "timm_loop")
WEFT = {"weft": [], "weft probe": ["--recipe", "probe", "--model", MODEL]}


def split(photos: Path, fold: int, folder: Path) -> int:
    """Copy the photos to train/ and val/ of a stratified fold; return the number of the latter."""
    files = sorted(path for path in photos.rglob("*") if path.is_file())
    classes = [file.parent.name for file in files]
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(files, classes)
    held_out = set(list(folds)[fold][1].tolist())
    for number, file in enumerate(files):
        copy = folder / ("val" if number in held_out else "train") / file.parent.name / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copyfile(file, copy)
    return len(held_out)


def run(tool: str, python: str, folder: Path, weights: Path, threads: int) -> float:
    """Train with a tool in a separate process; return the accuracy on val/."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if tool in WEFT:
        out = folder.with_name("run")
        command = [sys.executable, "-m", "weft", "train", str(folder), *WEFT[tool], "--out", str(out), "--force"]
        subprocess.run([*command, "--quiet"], env=environment, check=True, stdout=subprocess.DEVNULL)
        return read_metrics(out / "metrics.csv")[-1].val_top1  # of the last epoch, as with the other tools
    command = [python, str(HERE / "tools" / f"{tool}.py"), str(folder), str(weights)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def lines_of(tool: str) -> int:
    """Return the number of lines of user code, without empty lines, comments and the docstring."""
    if tool in WEFT:
        return 1
    lines = (HERE / "tools" / f"{tool}.py").read_text().splitlines()[1:]
    return sum(bool(line.strip()) and not line.startswith("#") for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every tool and fold that is not in tools.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--tools", nargs="+", choices=[*WEFT, *SCRIPTS], default=[*WEFT, *SCRIPTS])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    rows = read_csv(TABLE) if TABLE.is_file() else []
    with tempfile.TemporaryDirectory() as temporary:
        weights = Path(temporary) / "weights.pth"
        torch.save(read_bundle("tf_efficientnet_lite0"), weights)
        for fold in range(FOLDS):
            folder = Path(temporary) / str(fold) / "photos"
            count = split(args.photos, fold, folder)
            for tool in args.tools:
                if any((row["tool"], row["fold"]) == (tool, str(fold)) for row in rows):
                    continue
                os.environ["WEFT_CACHE"] = str(Path(temporary) / f"cache-{fold}")  # no cached features
                start = time.perf_counter()
                top1 = run(tool, args.python, folder, weights, args.threads)
                row = {
                    "tool": tool,
                    "fold": str(fold),
                    "images": str(count),
                    "top1": f"{top1:.2f}",
                    "seconds": f"{time.perf_counter() - start:.1f}",
                    "lines": str(lines_of(tool)),
                    "threads": str(args.threads),
                    "processor": processor_class(),
                }
                print(*row.values(), flush=True)
                rows.append(row)
                write_csv(TABLE, rows)
    for tool in dict.fromkeys(row["tool"] for row in rows):
        same = [row for row in rows if row["tool"] == tool]
        top1, seconds = (np.array([float(row[key]) for row in same]) for key in ("top1", "seconds"))
        images = np.array([int(row["images"]) for row in same])
        print(f"{tool}: {np.average(top1, weights=images):.1f} % of {images.sum()}, median {np.median(seconds):.0f} s")


if __name__ == "__main__":
    main()
