"""Measure what a deployment needs: time from the start of a process to its first prediction, memory and disk space."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from weft.bench.worker import Task, network_of, noise
from weft.checkpoints.config import read_config
from weft.checkpoints.model_dir import save_model_dir
from weft.deploy import ExportedModel
from weft.deploy.exporting import write_export
from weft.errors import UsageError
from weft.files import folder_size

WAYS = ("folded", "onnx", "openvino")  # those that `weft predict` runs; it folds the networks of a model directory
ROUNDS = 3  # processes of each deployment, after one that fills the caches
IMAGE = (500, 375)  # pixels, the usual size of ImageNet's photos
# Starts a command from a small process: Linux counts the memory of the parent as memory of a new process.
LAUNCHER = """
import json, os, subprocess, sys, time
begun = time.perf_counter()
process, memory = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL), None
if hasattr(os, "wait4"):
    status, usage = os.wait4(process.pid, 0)[1:]
    process.returncode, memory = os.waitstatus_to_exitcode(status), usage.ru_maxrss
code = process.wait()
print(json.dumps([time.perf_counter() - begun, memory]))
sys.exit(code != 0)
"""


@dataclass(frozen=True)
class ColdStart:
    """Needs of a deployment: a process that predicts one image.

    Attributes:
        cold_start_s: seconds from the start of the process to its end, the median of ROUNDS.
        peak_mb: largest memory of the process in MB (10^6 bytes); None on Windows.
        disk_mb: size of the model directory or export in MB.
    """

    cold_start_s: float
    peak_mb: float | None
    disk_mb: float


def measure_cold_starts(tasks: Iterable[Task], log: Callable[[str], None] = lambda text: None) -> dict[Task, ColdStart]:
    """Start `weft predict` for each task that it can run; the deployments take turns.

    Args:
        tasks: ways of running models on the CPU. Peers and ways that are not in WAYS are left out.
        log: called with a line about every process.

    Returns:
        Results of the tasks that were measured.

    Raises:
        UsageError: a process of `weft predict` fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        image = Path(temporary) / "image.jpg"
        pixels = np.random.default_rng(0).integers(0, 256, (*IMAGE[::-1], 3), np.uint8)
        Image.fromarray(pixels).save(image, quality=90)
        commands: dict[Task, tuple[str, Path, list[str]]] = {}
        for number, task in enumerate(tasks):
            folder = _deployment(task, Path(temporary) / str(number))
            if folder is not None:
                is_export = "artefact" in read_config(folder)
                precision = ["--precision", task.precision] if task.way == "folded" and not is_export else []
                words = ["predict", str(folder), str(image), "--quiet", "--threads", str(task.threads), *precision]
                name = task.model if folder == Path(task.model) else f"{task.model} {task.way} {task.precision}"
                commands[task] = name, folder, [sys.executable, "-P", "-m", "weft", *words]
        runs: dict[Task, list[tuple[float, float | None]]] = {task: [] for task in commands}
        if commands:
            log(f"{(ROUNDS + 1) * len(commands)} processes of weft predict start, one after the other.")
        for turn in range(ROUNDS + 1):
            for task, (name, _, command) in commands.items():
                needs = _run(command)
                if turn:
                    runs[task].append(needs)
                log(f"cold start {turn} of {ROUNDS}, {name}: {needs[0]:.1f} s.")
        found = {}
        for task, (_, folder, _) in commands.items():
            seconds, memory = zip(*runs[task], strict=True)
            peak = None if None in memory else float(median(memory))
            found[task] = ColdStart(median(seconds), peak, folder_size(folder) / 1e6)
        return found


def _deployment(task: Task, folder: Path) -> Path | None:
    """Write what `weft predict` loads; return None for a task that it cannot run."""
    if task.peer is not None or task.allocator != "default":
        return None
    model: Any = network_of(replace(task, peers=False))[0]
    if isinstance(model, ExportedModel):
        return Path(task.model)
    if task.way not in WAYS:
        return None
    if task.way == "folded":
        return save_model_dir(model, folder)
    folder.mkdir()
    images = noise(model.pretrained_cfg["input_size"]) if task.precision == "int8" else ()
    write_export(model, folder, task.way, task.precision, images)
    return folder


def _run(command: list[str]) -> tuple[float, float | None]:
    """Run a command; return its seconds, and its peak memory in MB."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", LAUNCHER, *command], capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UsageError(f"A new process must predict an image; weft predict failed. {done.stderr.strip()}")
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, None if memory is None else memory * unit / 1e6
