"""Compare forms of an OpenVINO export: linear layers as 1x1 convolutions, as in weft's int8, and attention in fp32.

    python benchmarks/speed/int8_linear.py            # ten minutes on two quiet cores

Each instruction set is that of this processor, or one to which ONEDNN_MAX_CPU_ISA limits OpenVINO. Writes a row per
network, instruction set and batch size to int8_linear.csv: images per second of each form, measured alternately, with
random weights that are calibrated on noise. Without VNNI, weft's int8 has attention in fp32. Rows of other processor
classes are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import openvino
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows

import weft
from weft.deploy import graphs
from weft.deploy.runtimes import run_file
from weft.machine.processor import has_bf16, num_threads, processor_class

FILE = Path(__file__).parent / "int8_linear.csv"
MODELS = ("levit_128s", "levit_256", "cvt_13", "ceit_tiny_patch16_224")
LIMITS = {  # of ONEDNN_MAX_CPU_ISA: classes of processors that have more instructions
    "AVX512_CORE_VNNI": ("amx",),
    "AVX2": ("amx", "avx512_bf16_vnni", "avx512_vnni", "avx512"),
}
LINEAR, CONVOLUTION, IN_FP32 = "int8 matrix multiplications", "int8 convolutions", "int8, attention in fp32"
WAYS = ("fp32", "fp32 convolutions", LINEAR, CONVOLUTION, IN_FP32)
RATIOS = {  # column: two ways
    "fp32_convolutions_to_matrix_multiplications": ("fp32 convolutions", "fp32"),
    "int8_convolutions_to_matrix_multiplications": (CONVOLUTION, LINEAR),
    "attention_in_fp32_to_int8": (IN_FP32, CONVOLUTION),
}
BATCHES, CALLS = (1, 16), 3


def write(name: str, folder: Path) -> None:
    """Write the exports of a network."""
    images = [np.random.default_rng(seed).standard_normal((1, 3, 224, 224)).astype(np.float32) for seed in range(8)]
    for way in WAYS:
        torch.manual_seed(0)
        model = weft.fold(weft.create_model(name).eval())
        (folder / way).mkdir()
        file, precision = folder / way / "model.xml", way[:4]
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(graphs, "has_int8", lambda flags, way=way: way != IN_FP32))
            if way == LINEAR:
                stack.enter_context(mock.patch.object(graphs, "linear_to_convolution"))
            graphs.write_graph(model, file, "openvino", precision, (3, 224, 224), images)
        if way == "fp32 convolutions":
            graph = openvino.Core().read_model(folder / "fp32" / "model.xml")
            graphs.linear_to_convolution(graph)
            openvino.save_model(graph, file, compress_to_fp16=False)


def measure(folder: str, rounds: str) -> None:
    """Print the images per second of each way and batch size as JSON; called in a separate process."""
    precision = {way: "int8" if way.startswith("int8") and has_bf16() else "fp32" for way in WAYS}
    calls = {way: run_file(Path(folder) / way / "model.xml", "openvino", precision[way]).run for way in WAYS}
    rows = {}
    for batch_size in BATCHES:
        images = np.random.default_rng(0).standard_normal((batch_size, 3, 224, 224)).astype(np.float32)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for call in calls.values():
            call(images)
        for _ in range(int(rounds)):
            for way, call in calls.items():
                call(images)
                for _ in range(CALLS):
                    begin = time.perf_counter()
                    call(images)
                    times[way].append(time.perf_counter() - begin)
        rows[batch_size] = {way: batch_size / statistics.median(values) for way, values in times.items()}
    print(json.dumps(rows))


def main() -> None:
    """Measure all networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    here, rows = processor_class(), []
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            write(name, Path(temporary))
            for limit in ("", *(name for name, classes in LIMITS.items() if here in classes)):
                code = f"import runpy, sys; runpy.run_path({__file__!r})['measure'](*sys.argv[1:])"
                environment = os.environ | ({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})
                command = [sys.executable, "-c", code, temporary, str(args.rounds)]
                done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                for batch_size, speeds in json.loads(done.stdout).items():
                    row = {"model": name, "instruction_set": limit or here, "batch_size": batch_size}
                    row |= {way: f"{speed:.1f}" for way, speed in speeds.items()}
                    row |= {name: f"{speeds[one] / speeds[other]:.2f}" for name, (one, other) in RATIOS.items()}
                    rows.append(row | {"threads": num_threads(), "processor_class": here})
                    print(rows[-1], flush=True)
    replace_rows(FILE, rows)


if __name__ == "__main__":
    main()
