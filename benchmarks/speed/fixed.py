"""What it brings OpenVINO to know the batch: the same file, compiled for any batch and for one.

    python benchmarks/speed/fixed.py --out benchmarks/speed    # seven minutes on two cores

weft's graph and the first peer's, in turns, medians of twelve calls. One line of fixed.csv per network, precision and
batch: images per second of both, their ratio, and the seconds that compiling for one batch takes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import weft
from weft.bench.peers import peer_of
from weft.deploy.graphs import write_graph
from weft.deploy.runtimes import InOpenVino

MODELS = ("levit_256", "cvt_13", "ceit_tiny_patch16_224")
BATCHES, CALLS = (1, 16), 12


def line(called: str, network: torch.nn.Module, precision: str, batch_size: int) -> dict[str, object]:
    images = np.random.default_rng(0).standard_normal((batch_size, 3, 224, 224), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_graph(network, Path(folder) / "model.xml", "openvino", precision, (3, 224, 224))
        answer = InOpenVino(Path(folder) / "model.xml", precision, torch.get_num_threads(), most=1)
        begun = time.perf_counter()
        answer(images)
        compiling = time.perf_counter() - begun
        seconds: dict[str, list[float]] = {"any": [], "one": []}
        for _ in range(CALLS):
            for which, graph in (("any", answer.of_any_size), ("one", answer.fixed[batch_size])):
                graph(images)
                begun = time.perf_counter()
                graph(images)
                seconds[which].append(time.perf_counter() - begun)
    per_second = {which: batch_size / statistics.median(times) for which, times in seconds.items()}
    return {
        "model": called,
        "precision": precision,
        "batch_size": batch_size,
        "images_per_second_any": f"{per_second['any']:.4g}",
        "images_per_second_one": f"{per_second['one']:.4g}",
        "ratio": f"{per_second['one'] / per_second['any']:.3f}",
        "seconds_to_compile": f"{compiling - batch_size / per_second['one']:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name in MODELS:
        for precision in ("fp32", "bf16"):
            for batch_size in BATCHES:
                ours, (called, peer) = weft.fold(weft.create_model(name).eval()), peer_of(name)
                for who, network in ((name, ours), (called, peer.eval())):
                    rows.append(line(who, network, precision, batch_size))
                    print(*rows[-1].values(), sep="  ", flush=True)
    with (args.out / "fixed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
