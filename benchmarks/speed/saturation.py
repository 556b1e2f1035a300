"""Difference of int8 from fp32 with and without VNNI: 8-bit exports, and weft's 7-bit exports, which do not saturate.

    python benchmarks/speed/saturation.py FOLDER --out benchmarks/speed    # a quarter of an hour on one core

FOLDER has photos for the calibration of the exports and for the comparison. Each export runs in a process per
instruction set: that of this processor and, for OpenVINO, AVX2, to which ONEDNN_MAX_CPU_ISA limits its copy of oneDNN.
ONNX Runtime has no such option, so it has rows of this processor only. A row of saturation.csv has the difference of
the logits from those of the network in float32, relative to the largest logit, and the CPU time of a batch relative to
the same runtime in fp32 with the same instruction set, both on one thread. Rows of other processor classes stay.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

import weft
from weft.bench.worker import with_random_statistics
from weft.data import eval_transform, open_image
from weft.deploy import fold, graphs
from weft.deploy.runtimes import openvino_core, run_file
from weft.machine.processor import cpu_name, processor_class

MODELS = ("levit_128s", "levit_256", "cvt_13", "ceit_tiny_patch16_224")
FILES = {"openvino": "model.xml", "onnx": "model.onnx"}
ISAS = {"openvino": ("",) if processor_class() == "avx2" else ("", "AVX2"), "onnx": ("",)}
COMPARED, BATCH, TURNS = 16, 4, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--images", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.out / "saturation.csv"
    rows = [row for row in read_csv(file) if row["processor_class"] != processor_class()]
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            write(name, args.folder, args.images, Path(folder))
            for format, isas in ISAS.items():
                rows += [{"model": name, **row} for isa in isas for row in in_process(Path(folder), format, isa)]
        write_csv(file, rows)


def write(name: str, photos: Path, count: int, folder: Path) -> None:
    """Write a network in fp32 and in int8 with 8 and 7 bits for both runtimes, images, and logits in float32."""
    torch.manual_seed(0)
    model = with_random_statistics(weft.create_model(name)).eval()
    transform = eval_transform(model.pretrained_cfg)
    images = torch.stack([torch.as_tensor(transform(open_image(path))) for path in sorted(photos.iterdir())[:count]])
    with torch.inference_mode():
        np.savez(folder / "images.npz", images=images[:COMPARED].numpy(), logits=model(images[:COMPARED]).numpy())
    calibration = [image[None].numpy() for image in images]
    for format, file in FILES.items():
        for bits in (32, 7, 8):
            (folder / f"{format}-{bits}").mkdir()
            openvino, onnx = (functools.partial(way, bits=bits) for way in (graphs.quantized, graphs.quantize_onnx))
            with mock.patch.object(graphs, "quantized", openvino), mock.patch.object(graphs, "quantize_onnx", onnx):
                precision = "fp32" if bits == 32 else "int8"
                target = folder / f"{format}-{bits}" / file
                graphs.write_graph(fold(model), target, format, precision, images.shape[1:], calibration)


def in_process(folder: Path, format: str, isa: str) -> list[dict[str, Any]]:
    """Return the rows of a runtime with an instruction set; '' is that of the processor."""
    code = f"import runpy, sys; runpy.run_path({__file__!r})['measure'](*sys.argv[1:])"
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})}
    command = [sys.executable, "-c", code, str(folder), format, isa]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def measure(folder: str, format: str, isa: str) -> None:
    """Print the rows of a runtime as JSON; called in a separate process."""
    data = np.load(Path(folder) / "images.npz")
    images, expected = data["images"], data["logits"]
    torch.set_num_threads(1)
    files = {bits: Path(folder) / f"{format}-{bits}" / FILES[format] for bits in (32, 7, 8)}
    # the operations that are not in int8 run in float32 on every processor
    graphs_of = {bits: run_file(file, format, "fp32").run for bits, file in files.items()}
    seconds = cpu_seconds({bits: functools.partial(graph, images[:BATCH]) for bits, graph in graphs_of.items()})
    rows = []
    for bits in (8, 7):
        difference = np.abs(graphs_of[bits](images).logits - expected) / np.abs(expected).max()
        rows.append(
            {
                "runtime": format,
                "instruction_set": isa or processor_class(),
                "kernels": kernels(files[bits], images[:1]) if format == "openvino" else "",
                "bits": bits,
                "max_difference": f"{difference.max():.4f}",
                "mean_difference": f"{difference.mean():.5f}",
                "time_to_fp32": f"{seconds[bits] / seconds[32]:.2f}",
                "processor": cpu_name(),
                "processor_class": processor_class(),
            }
        )
    print(json.dumps(rows))


def cpu_seconds(calls: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Return the median CPU time of each call, in alternating turns. Other processes affect it less than wall time."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for turn in range(TURNS + 1):
        for key, call in calls.items():
            start = time.process_time()
            call()
            if turn:  # the first compiles the graph for this batch size
                times[key].append(time.process_time() - start)
    return {key: float(np.median(values)) for key, values in times.items()}


def kernels(file: Path, images: np.ndarray) -> str:
    """Return the kernels of OpenVINO's matrix multiplications and convolutions."""
    compiled = openvino_core().compile_model(str(file), "CPU", {"PERF_COUNT": True, "INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    request.infer(images)
    types = ("Convolution", "FullyConnected", "MatMul", "Subgraph")
    used = {row.exec_type for row in request.profiling_info if row.node_type in types}
    return " ".join(sorted(name for name in used if name.lower().endswith("i8")))


if __name__ == "__main__":
    main()
