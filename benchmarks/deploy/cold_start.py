"""Measure every deployment: total time, peak memory and disk space of `weft predict` with one image.

    python benchmarks/deploy/cold_start.py            # 6 to 15 minutes on two quiet cores
    python benchmarks/deploy/cold_start.py --table    # only write the README's table again

Writes the rows of this machine's processor class to cold_start.csv, and the table of weft's README. The deployments
take turns. The environment has PyTorch; sizes.py measures an environment without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from weft.bench.cold_start import WAYS, measure_cold_starts
from weft.bench.records import filled, read_csv, replace_rows
from weft.bench.worker import Task
from weft.processor import processor_class

FILE, README = Path(__file__).with_name("cold_start.csv"), Path(__file__).parents[2] / "README.md"
MODELS = ("levit_128s", "levit_256", "ceit_tiny_patch16_224", "cvt_13")
NAMES = {"folded": "model directory", "onnx": "ONNX", "openvino": "OpenVINO"}


def measure() -> list[dict[str, str]]:
    """Return a row per model and deployment of this machine."""
    threads = torch.get_num_threads()
    tasks = [
        Task(model, None, False, way, precision, "cpu", threads)
        for model in MODELS
        for way in WAYS
        for precision in ("fp32", "int8")
        if (way, precision) != ("folded", "int8")
    ]
    results = measure_cold_starts(tasks, lambda text: print(text, flush=True))
    return [
        {
            "model": task.model,
            "way": task.way,
            "precision": task.precision,
            "cold_start_s": f"{result.cold_start_s:.2f}",
            "peak_mb": f"{result.peak_mb:.0f}",
            "disk_mb": f"{result.disk_mb:.1f}",
            "threads": str(threads),
            "processor_class": processor_class(),
        }
        for task, result in results.items()
    ]


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
    if not parser.parse_args().table:
        replace_rows(FILE, measure())
    README.write_text(filled(README.read_text(), "deployments", table(read_csv(FILE)))[0])
