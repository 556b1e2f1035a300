"""Measure the training time of the variants of a study that were not run, and write it to costs.csv.

    python benchmarks/studies/costs.py STUDY CIFAR10 [--only VARIANT ...]

Each variant trains one epoch on 2,560 images, in a separate process with one thread. Run it on a quiet machine. If a
variant is measured again, the smaller time is kept, because other load only increases it. CIFAR10 can be a part of the
dataset.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.machine.processor import processor_class
from weft.runs.directory import read_metrics
from weft.study.plan import read_study

FILE = Path(__file__).parent / "costs.csv"
IMAGES = 2_560
COLUMNS = ("study", "variant", "seconds_per_1000", "precision", "processor_class")
CHANGED = {"epochs": 1, "data.limit": IMAGES, "data.train_fraction": 1.0, "evaluate_every": 2}


def measure(recipe: str | None, data: str, settings: dict[str, object]) -> float:
    """Return the seconds of training per 1,000 images."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{data!r}, recipe={recipe!r}, settings={settings!r}, out='run', quiet=True"
        code = f"from weft.train import train; train({arguments})"
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return read_metrics(Path(folder) / "run" / "metrics.csv")[-1].seconds / IMAGES * 1000


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    study = read_study(args.study)
    rows = {(row["study"], row["variant"]): row for row in (read_csv(FILE) if FILE.is_file() else [])}
    measured: dict[str, float] = {}  # variants of the same network and settings are measured once
    for variant in study.at_scale("small"):
        if args.only and variant.name not in args.only:
            continue
        settings = {**variant.settings, **CHANGED}
        run = json.dumps([variant.base, settings], sort_keys=True)
        if run not in measured:
            measured[run] = measure(variant.base, str(args.data.resolve()), json.loads(run)[1])
        key = study.name, variant.name
        seconds = min(measured[run], float(rows[key]["seconds_per_1000"])) if key in rows else measured[run]
        row = (*key, f"{seconds:.2f}", str(settings["precision"]), processor_class())
        rows[key] = dict(zip(COLUMNS, row, strict=True))
        print(*row, flush=True)
        write_csv(FILE, list(rows.values()))
