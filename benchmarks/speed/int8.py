"""Accuracy of int8 in OpenVINO, with NNCF's smoothing of activations and without it, which is weft's default.

    python benchmarks/speed/int8.py --out benchmarks/speed    # a quarter of an hour on two cores

Trains the three small networks on scikit-learn's digits, exports each with and without smoothing, calibrated on the
same images, and compares the exports with the network in float32 on the held-out images. Writes int8.csv: a row per
network, seed and smoothing with the top-1 of both in percent, and the largest and the mean difference of the logits
relative to the largest logit.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

from weft.checkpoints import load_model_dir
from weft.data import open_data
from weft.deploy import export, graphs
from weft.machine.processor import processor_class
from weft.train import train

MODELS = ("ceit_nano_32", "cvt_nano_32", "levit_nano_32")
QUANTIZED = graphs.quantized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                train("digits", name, recipe="digits", epochs=args.epochs, seed=seed, out=run, quiet=True)
                model, _ = load_model_dir(run / "best")
                for smooth in (False, True):
                    with mock.patch.object(graphs, "quantized", functools.partial(QUANTIZED, smooth=smooth)):
                        report = export(
                            model,
                            run / f"smooth-{smooth}",
                            format="openvino",
                            precision="int8",
                            data=open_data("digits"),
                            max_drop=100,
                        )
                    rows.append(
                        {
                            "processor_class": processor_class(),
                            "model": name,
                            "seed": seed,
                            "smoothing": smooth,
                            "top1_fp32": f"{report.top1_model:.2f}",
                            "top1_int8": f"{report.top1:.2f}",
                            "max_difference": f"{report.max_difference / report.max_logit:.3g}",
                            "mean_difference": f"{report.mean_difference / report.max_logit:.3g}",
                        }
                    )
                    print(*rows[-1].values(), flush=True)
    write_csv(args.out / "int8.csv", rows)


if __name__ == "__main__":
    main()
