"""Measure an installation without torch: size on disk, and CPU time and peak memory of one prediction.

    uv venv VENV
    uv pip install --python VENV/bin/python -r requirements-runtime.txt onnx onnxruntime
    uv pip install --python VENV/bin/python --no-deps .
    python benchmarks/deploy/sizes.py VENV EXPORT IMAGE --name onnx --model NAME --csv benchmarks/deploy/sizes.csv

The time is user and system time of all threads of a process from its start to its end: the median of --runs, after one
run that writes the bytecode. Other load affects it little, unlike the elapsed time, which is also recorded.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import time
from pathlib import Path

from weft.files import folder_size
from weft.machine.processor import processor_class

UNSET = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")  # so that the bytecode is that of the installation, and stored


def run(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its CPU seconds, elapsed seconds and peak memory in MB (10^6 bytes)."""
    environment = {key: value for key, value in os.environ.items() if key not in UNSET}
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}.")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - begun, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Measure, and append a row to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("export")
    parser.add_argument("image")
    parser.add_argument("--name", required=True, help="name of the installation")
    parser.add_argument("--model", required=True, help="name of the model in EXPORT")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    command = [str(args.venv / "bin" / "weft"), "predict", args.export, args.image, "--quiet"]
    rows = [run(command) for _ in range(args.runs + 1)][1:]
    cpu, elapsed, memory = (statistics.median(column) for column in zip(*rows, strict=True))
    values = {
        "installation": args.name,
        "model": args.model,
        "venv_mb": round(folder_size(args.venv) / 1e6, 1),
        "export_mb": round(folder_size(Path(args.export)) / 1e6, 1),
        "predict_cpu_s": f"{cpu:.2f}",
        "predict_elapsed_s": f"{elapsed:.2f}",
        "predict_peak_mb": f"{memory:.0f}",
        "runs": args.runs,
        "load": f"{os.getloadavg()[0]:.1f}",
        "processor_class": processor_class(),
    }
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(values)


if __name__ == "__main__":
    main()
