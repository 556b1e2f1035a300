"""Measure other ways to quantise the default models of few9, whose int8 export loses 0.5 to 1 point.

    python benchmarks/few-images/int8_attempts.py PHOTOS --runs runs/few9 --seeds 1

`--runs` has the runs that few9.py has trained. Writes int8_attempts.csv next to this file: the accuracy over the
held-out images of all five folds.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import nncf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.deploy import graphs
from weft.inference import evaluate
from weft.inference.exports import export_run

FILE, FOLDS = Path(__file__).with_suffix(".csv"), 5
quantized = graphs.quantized
TRANSFORMER: dict[str, Any] = {"model_type": nncf.ModelType.TRANSFORMER}


def with_options(graph: Any, calibration: Iterable[np.ndarray], mirrored: bool = False, **options: Any) -> Any:
    """Quantise with other options of NNCF, or also with the mirror images; weights have 7 bits, as in weft."""
    images = list(calibration)
    images += [np.ascontiguousarray(image[..., ::-1]) for image in images] if mirrored else []
    parameters = nncf.AdvancedQuantizationParameters(
        overflow_fix=nncf.OverflowFix.ENABLE,
        smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1),
    )
    return nncf.quantize(
        graph,
        nncf.Dataset(images),
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(images),
        advanced_parameters=parameters,
        **options,
    )


ATTEMPTS = {
    "weft": quantized,
    "weights of 8 bits": functools.partial(quantized, bits=8),
    "biases corrected one by one": functools.partial(with_options, fast_bias_correction=False, **TRANSFORMER),
    "calibrated with mirror images": functools.partial(with_options, mirrored=True, **TRANSFORMER),
    "not as a transformer": with_options,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/few9"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    rows = [row for row in read_csv(FILE) if row["seed"] not in map(str, args.seeds)]
    for seed in args.seeds:
        runs = [args.runs / f"default-{seed}-{fold}" for fold in range(1, FOLDS + 1)]
        results = [evaluate(run, args.photos, quiet=True) for run in runs]
        counts = [result.count for result in results]
        before = np.average([result.top1 for result in results], weights=counts)
        for name, attempt in ATTEMPTS.items():
            top1 = []
            for run in runs:
                with mock.patch.object(graphs, "quantized", attempt):
                    report = export_run(
                        run, run / "int8", format="openvino", precision="int8", data=args.photos, max_drop=100,
                        force=True, quiet=True,
                    )  # fmt: skip
                top1.append(report.top1)
            row = {"seed": seed, "attempt": name, "images": sum(counts), "top1": f"{before:.2f}"}
            rows.append(row | {"top1_int8": f"{np.average(top1, weights=counts):.2f}"})
            print(rows[-1], flush=True)
            write_csv(FILE, rows)


if __name__ == "__main__":
    main()
