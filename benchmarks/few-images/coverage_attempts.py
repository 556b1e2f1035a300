"""Measure other ways to order the photos of few9 by certainty: the error of the most certain 90 %.

    python benchmarks/few-images/few9.py PHOTOS OTHER --methods probe default --seeds 1 2 --runs RUNS
    python benchmarks/few-images/coverage_attempts.py RUNS --seeds 1 2

The networks are those of the method default; with `weights between`, their weights are the mean of those of the linear
probe, where fine-tuning started, and of the fine-tuned network. Writes coverage_attempts.csv next to this file: a row
per way and seed, over the photos of all folds. The target is a ratio of at most 0.5.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from scipy.special import softmax
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

from weft.checkpoints import load_model_dir
from weft.inference.calibration import fit_temperature
from weft.inference.measurement import evaluation_batches
from weft.inference.torch_model import infer
from weft.machine.runtime import Runtime
from weft.recipes.load import load_recipe
from weft.train.plan import open_splits

FILE = Path(__file__).parent / "coverage_attempts.csv"
FOLDS = 5
COVERAGE = 0.9


def logits_of(network: nn.Module, run: Path, *, mirrored: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the held-out photos of a run, divided by the temperature that fits them, and labels."""
    splits = open_splits(load_recipe(run / "recipe.yaml"))
    batches = evaluation_batches(splits.val, network.eval(), 16, 0)
    runtime, labels = Runtime.of("cpu"), np.array(splits.val.labels)
    views = (images.flip(-1) if mirrored else images for images, _ in batches)
    logits = np.concatenate([infer(network, images, runtime).numpy() for images in views]).astype(np.float64)
    return logits / fit_temperature(logits, labels), labels


def orders(logits: np.ndarray, mirrored: np.ndarray) -> dict[str, np.ndarray]:
    """Return the certainty of every photo in each way."""
    rows, predicted = np.arange(len(logits)), logits.argmax(axis=1)
    probabilities, of_mirrored = softmax(logits, axis=1), softmax(mirrored, axis=1)
    ordered = np.sort(probabilities, axis=1)
    sure, sure_mirrored = probabilities[rows, predicted], of_mirrored[rows, predicted]
    return {
        "probability (weft)": sure,
        "margin to the second class": ordered[:, -1] - ordered[:, -2],
        "entropy": (probabilities * np.log(probabilities + 1e-12)).sum(axis=1),
        "logit": logits.max(axis=1),
        "smaller probability of photo and mirror image": np.minimum(sure, sure_mirrored),
        "mean probability of photo and mirror image": (sure + sure_mirrored) / 2,
    }


def between(run: Path, start: Path) -> nn.Module:
    """Return the network of a run, with the mean of its weights and of those of the network in another run."""
    network, _ = load_model_dir(run / "best")
    first, last = load_model_dir(start / "best")[0].state_dict(), network.state_dict()
    network.load_state_dict(
        {key: (first[key] + value) / 2 if value.is_floating_point() else value for key, value in last.items()}
    )
    return network


def row_of(way: str, seed: int, certainty: np.ndarray, is_right: np.ndarray) -> dict[str, object]:
    """Return the row of a way."""
    covered = np.argsort(-certainty, kind="stable")[: round(COVERAGE * len(certainty))]
    errors, left = int((~is_right).sum()), int((~is_right[covered]).sum())
    ratio = (left / len(covered)) / (errors / len(certainty)) if errors else math.nan
    return {
        "way": way,
        "seed": seed,
        "photos": len(certainty),
        "errors": errors,
        "errors_at_90_percent_coverage": left,
        "ratio": f"{ratio:.3f}",
    }


def main() -> None:
    """Measure every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for seed in args.seeds:
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for fold in range(1, FOLDS + 1):
            run = args.runs / f"default-{seed}-{fold}"
            network, _ = load_model_dir(run / "best")
            logits, labels = logits_of(network, run)
            is_right = logits.argmax(axis=1) == labels
            for way, certainty in orders(logits, logits_of(network, run, mirrored=True)[0]).items():
                found.setdefault(way, []).append((certainty, is_right))
            logits, labels = logits_of(between(run, args.runs / f"probe-{seed}-{fold}"), run)
            found.setdefault("weights between", []).append(
                (softmax(logits, axis=1).max(axis=1), logits.argmax(axis=1) == labels)
            )
        for way, parts in found.items():
            certainty, is_right = (np.concatenate(column) for column in zip(*parts, strict=True))
            rows.append(row_of(way, seed, certainty, is_right))
            print(rows[-1], flush=True)
    write_csv(FILE, rows)


if __name__ == "__main__":
    main()
