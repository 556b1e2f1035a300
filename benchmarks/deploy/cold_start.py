"""Measure every deployment: total time, peak memory and disk space of `weft predict` with one image.

    python benchmarks/deploy/cold_start.py            # 6 to 15 minutes on two quiet cores
    python benchmarks/deploy/cold_start.py --table    # only write the README's table again

Writes the rows of this machine's processor class to cold_start.csv, and the table of weft's README. The deployments
take turns. The environment has PyTorch; sizes.py measures an environment without it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import filled, read_csv, replace_rows

from weft.bench.worker import noise
from weft.checkpoints.hub import create_model
from weft.checkpoints.model_dir import save_model_dir
from weft.deploy.exporting import write_export
from weft.errors import UsageError
from weft.files import folder_size
from weft.machine.processor import processor_class

FILE, README = Path(__file__).with_name("cold_start.csv"), Path(__file__).parents[2] / "README.md"
MODELS = ("levit_128s", "levit_256", "ceit_tiny_patch16_224", "cvt_13")
WAYS = (("folded", "fp32"), ("onnx", "fp32"), ("onnx", "int8"), ("openvino", "fp32"), ("openvino", "int8"))
IMAGE = (500, 375)  # pixels, the usual size of ImageNet's photos
NAMES = {"folded": "model directory", "onnx": "ONNX", "openvino": "OpenVINO"}


# Starts a command from a small process: Linux counts the memory of the parent as memory of a new process.
LAUNCHER = """
import json, os, subprocess, sys, time
begun = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
status, usage = os.wait4(process.pid, 0)[1:]
process.returncode = os.waitstatus_to_exitcode(status)
print(json.dumps([time.perf_counter() - begun, usage.ru_maxrss]))
sys.exit(process.returncode != 0)
"""


def measure(
    models: Sequence[str] = MODELS, ways: Sequence[tuple[str, str]] = WAYS, rounds: int = 3
) -> list[dict[str, str]]:
    """Return a row per model and deployment of this machine: needs of a process that predicts one image.

    `rounds` processes of each deployment are measured, after one that fills the caches. `cold_start_s` are seconds from
    the start of the process to its end, `peak_mb` is its largest memory and `disk_mb` the size of its files, in MB
    (10^6 bytes).
    """
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as temporary:
        image = Path(temporary) / "image.jpg"
        pixels = np.random.default_rng(0).integers(0, 256, (*IMAGE[::-1], 3), np.uint8)
        Image.fromarray(pixels).save(image, quality=90)
        folders = {
            (model, way, precision): deployed(model, way, precision, Path(temporary) / f"{model}-{way}-{precision}")
            for model in models
            for way, precision in ways
        }
        runs: dict[tuple[str, ...], list[tuple[float, float]]] = {key: [] for key in folders}
        for turn in range(rounds + 1):
            for key, folder in folders.items():
                words = ["predict", str(folder), str(image), "--quiet", "--threads", str(threads)]
                needs = run([sys.executable, "-P", "-m", "weft", *words])
                if turn:
                    runs[key].append(needs)
                print(f"cold start {turn} of {rounds}, {' '.join(key)}: {needs[0]:.1f} s.", flush=True)
        return [
            {
                "model": model,
                "way": way,
                "precision": precision,
                "cold_start_s": f"{median(seconds for seconds, _ in needs):.2f}",
                "peak_mb": f"{median(memory for _, memory in needs):.0f}",
                "disk_mb": f"{folder_size(folders[model, way, precision]) / 1e6:.1f}",
                "threads": str(threads),
                "processor_class": processor_class(),
            }
            for (model, way, precision), needs in runs.items()
        ]


def deployed(model: str, way: str, precision: str, folder: Path) -> Path:
    """Write what `weft predict` loads: a model directory, which it folds, or an export."""
    torch.manual_seed(0)
    network = create_model(model).eval()
    if way == "folded":
        return save_model_dir(network, folder)
    folder.mkdir()
    images = noise(network.pretrained_cfg["input_size"]) if precision == "int8" else ()
    write_export(network, folder, way, precision, images)
    return folder


def run(command: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds, and its peak memory in MB."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", LAUNCHER, *command], capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UsageError(f"A new process must predict an image; weft predict failed. {done.stderr.strip()}")
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory * (1 if sys.platform == "darwin" else 1024) / 1e6


def table(rows: list[dict[str, str]]) -> str:
    """Return the README's table: a row per deployment with the range over all models and processor classes."""
    lines = ["| deployment | start to end, s | peak memory, MB | files, MB |", "|---|---|---|---|"]
    for way, precision in dict.fromkeys((row["way"], row["precision"]) for row in rows):
        same = [row for row in rows if (row["way"], row["precision"]) == (way, precision)]
        cells = []
        for column, form in (("cold_start_s", ".1f"), ("peak_mb", ".0f"), ("disk_mb", ".0f")):
            values = [float(row[column]) for row in same]
            cells.append(f"{min(values):{form}} to {max(values):{form}}")
        lines.append(f"| {NAMES[way]}, {precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the README's table again")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not args.table:
        replace_rows(FILE, measure(args.models, rounds=args.rounds))
    README.write_text(filled(README.read_text(), "deployments", table(read_csv(FILE)))[0])
