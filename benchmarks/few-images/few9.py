"""Measure few9 in 5 stratified folds: accuracy, int8 export, calibration, and detection of unknown images.

    python benchmarks/few-images/few9.py PHOTOS OTHER --methods probe default --seeds 0 1 2

PHOTOS has a folder of photos per class, OTHER photos that show none of the classes. Runs are stored in --runs, so that
an interrupted measurement continues. Writes few9_folds.csv (a row per fold) and few9_pooled.csv (a row per seed, over
the images of all folds) next to this file. The temperature is one number, fitted on the 41 to 43 held-out images of a
fold, on which the calibration error is also measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.inference import evaluate
from weft.inference.exports import export_run
from weft.inference.scores import calibration_error
from weft.report.intervals import interval_of
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
            confidences, is_correct, rows = [], [], []
            for fold in range(1, FOLDS + 1):
                run = args.runs / f"{method}-{seed}-{fold}"
                known = [row for row in read_csv(folds_file) if key(row) == (method, str(seed), str(fold))]
                start = time.perf_counter()
                if not (run / "report" / "report.html").is_file():
                    settings = {"data.folds": FOLDS, "data.fold": fold}
                    train(args.photos, **RECIPES[method], seed=seed, settings=settings, out=run, force=True, quiet=True)
                seconds = f"{time.perf_counter() - start:.1f}" if not known else known[0]["train_seconds"]
                result = evaluate(run, args.photos, unknown_images=args.other, quiet=True)
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
                confidences.append(result.confidence)
                is_correct.append(result.is_correct)
                rows.append(
                    {
                        "method": method,
                        "seed": seed,
                        "fold": fold,
                        "images": result.count,
                        "top1": f"{result.top1:.2f}",
                        "top1_int8": f"{report.top1:.2f}",
                        "auroc_other": f"{result.unknown.auroc:.4f}",
                        "other_images": result.unknown.other_count,
                        "train_seconds": seconds,
                    }
                )
                print(rows[-1], flush=True)
                add(folds_file, rows[-1])
            add(pooled_file, pooled(method, seed, np.concatenate(confidences), np.concatenate(is_correct), rows))


def pooled(
    method: str, seed: int, confidence: np.ndarray, is_correct: np.ndarray, rows: list[dict[str, object]]
) -> dict[str, object]:
    """Return the row of a method and a seed, over the images of all folds."""
    top1 = 100 * float(is_correct.mean())
    covered = np.argsort(-confidence, kind="stable")[: round(0.9 * len(confidence))]
    rng = np.random.default_rng(0)
    perfect = [calibration_error(confidence, rng.random(len(confidence)) < confidence) for _ in range(200)]
    estimate = interval_of(top1, len(is_correct))
    int8, images = (np.array([float(str(row[name])) for row in rows]) for name in ("top1_int8", "images"))
    return {
        "method": method,
        "seed": seed,
        "images": len(is_correct),
        "top1": f"{top1:.2f}",
        "low": f"{estimate.low:.2f}",
        "high": f"{estimate.high:.2f}",
        "top1_int8": f"{np.average(int8, weights=images):.2f}",
        "ece": f"{calibration_error(confidence, is_correct):.2f}",
        "ece_of_perfect_calibration": f"{np.mean(perfect):.2f}",
        "error": f"{100 - top1:.2f}",
        "error_at_90_percent_coverage": f"{100 - 100 * is_correct[covered].mean():.2f}",
        "auroc_other": f"{np.mean([float(str(row['auroc_other'])) for row in rows]):.4f}",
    }


def key(row: Mapping[str, object]) -> tuple[str, ...]:
    """Return method, seed and, for a row of few9_folds.csv, fold."""
    return tuple(str(row[name]) for name in ("method", "seed", "fold") if name in row)


def add(path: Path, row: dict[str, object]) -> None:
    """Add a row to a CSV file; it replaces a row of the same measurement."""
    write_csv(path, [*(old for old in read_csv(path) if key(old) != key(row)), row])


if __name__ == "__main__":
    main()
