"""Measure few9 in 5 stratified folds: accuracy, int8 export, calibration, and detection of images of no class.

    python benchmarks/few-images/few9.py PHOTOS OTHER --methods probe default --seeds 0 1 2

PHOTOS is a folder of photos by class, OTHER one of photos that show none of the classes. Runs are kept in --runs, so
that an interrupted measurement continues. Writes few9_folds.csv (a row per fold) and few9_pooled.csv (a row per seed,
over the images of all folds) next to this file. The temperature is fitted on the images that the calibration error is
measured on, one number for 42 images.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np

from weft.inference import evaluate
from weft.inference.exports import export_run
from weft.inference.metrics import calibration_error
from weft.intervals import interval_of
from weft.train import train

HERE = Path(__file__).parent
MODEL = "tf_efficientnet_lite0"
FOLDS = 5
RECIPES: dict[str, dict[str, object]] = {
    "probe": {"model": MODEL, "recipe": "probe"},
    "default": {},
    "scratch": {"from_scratch": True},
}


def main() -> None:
    """Train and evaluate every fold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--methods", nargs="+", choices=list(RECIPES), default=["probe", "default"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/few9"))
    args = parser.parse_args()
    folds_file, pooled_file = HERE / "few9_folds.csv", HERE / "few9_pooled.csv"
    for method in args.methods:
        for seed in args.seeds:
            sure, right, rows = [], [], []
            for fold in range(1, FOLDS + 1):
                run = args.runs / f"{method}-{seed}-{fold}"
                start = time.perf_counter()
                if not (run / "report" / "report.html").is_file():
                    settings = {"data.folds": FOLDS, "data.fold": fold}
                    train(args.photos, **RECIPES[method], seed=seed, settings=settings, out=run, force=True, quiet=True)
                seconds = time.perf_counter() - start
                result = evaluate(run, args.photos, other=args.other, quiet=True)
                assert result.unknown is not None
                report = export_run(
                    run,
                    run / "int8",
                    format="openvino",
                    precision="int8",
                    data=args.photos,
                    max_drop=100,
                    force=True,
                    quiet=True,
                )
                assert report.images == result.count
                assert report.top1 is not None
                sure.append(result.sure)
                right.append(result.right)
                rows.append(
                    {
                        "method": method,
                        "seed": seed,
                        "fold": fold,
                        "images": result.count,
                        "top1": f"{result.top1:.2f}",
                        "top1_int8": f"{report.top1:.2f}",
                        "auroc_other": f"{result.unknown.auroc:.4f}",
                        "other_images": result.unknown.other,
                        "train_seconds": f"{seconds:.1f}",
                    }
                )
                print(rows[-1], flush=True)
            append(folds_file, rows)
            append(pooled_file, [pooled(method, seed, np.concatenate(sure), np.concatenate(right), rows)])


def pooled(
    method: str, seed: int, sure: np.ndarray, right: np.ndarray, rows: list[dict[str, object]]
) -> dict[str, object]:
    """Return results over the images of all folds."""
    top1 = 100 * float(right.mean())
    most = np.argsort(-sure, kind="stable")[: round(0.9 * len(sure))]
    rng = np.random.default_rng(0)
    perfect = [calibration_error(sure, rng.random(len(sure)) < sure) for _ in range(200)]
    estimate = interval_of(top1, len(right))
    return {
        "method": method,
        "seed": seed,
        "images": len(right),
        "top1": f"{top1:.2f}",
        "low": f"{estimate.low:.2f}",
        "high": f"{estimate.high:.2f}",
        "top1_int8": f"{np.average(*np.array([[row['top1_int8'], row['images']] for row in rows], float).T):.2f}",
        "ece": f"{calibration_error(sure, right):.2f}",
        "ece_of_perfect_calibration": f"{np.mean(perfect):.2f}",
        "error": f"{100 - top1:.2f}",
        "error_at_90_percent_coverage": f"{100 - 100 * right[most].mean():.2f}",
        "auroc_other": f"{np.mean([float(str(row['auroc_other'])) for row in rows]):.4f}",
    }


def append(path: Path, rows: list[dict[str, object]]) -> None:
    """Add rows to a CSV file."""
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
