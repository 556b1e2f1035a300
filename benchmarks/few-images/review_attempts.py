"""Measure what might find more wrong labels than `weft data review`, on the features that review.py has written.

    python benchmarks/few-images/review_attempts.py random50k-0.npz

All classifiers are fitted without the images that they judge, and without those that a first round found. Writes
review_attempts.csv next to this file: the precision of the first n images, where n is the number of wrong labels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from scipy.special import log_softmax, softmax
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.checkpoints.unknown import unit_length
from weft.train.label_errors import find_label_errors, folds_of, is_improbable
from weft.train.linear_probe import FOLDS, held_out_probabilities

FILE = Path(__file__).with_suffix(".csv")
NEIGHBOURS, TEMPERATURE, ROWS = 50, 0.1, 1_024
HIDDEN = 256  # units of the perceptron
OF_WEFT = "probability of the label, as in weft"


def attempts(views: np.ndarray, labels: np.ndarray, num_classes: int) -> dict[str, np.ndarray]:
    """Return the probabilities (images classes) of each attempt, from features (images views features)."""
    fold_of, is_judged = folds_of(labels, None), np.ones(len(labels), bool)

    def fitted(views: np.ndarray, is_used: np.ndarray) -> np.ndarray:
        with threadpool_limits(1):
            return held_out_probabilities(views, labels, num_classes, fold_of, is_used)

    results = {OF_WEFT: find_label_errors(views[:, 0], labels, num_classes).probabilities}
    is_used = ~is_improbable(results[OF_WEFT], labels, is_judged)
    both = [fitted(views, is_used), fitted(views[:, ::-1], is_used)]
    results["images and their mirror images"] = _product(*both)
    results["neighbours"] = neighbours(views.mean(axis=1), labels, num_classes, is_used)
    results["mirror images x neighbours"] = _product(*both, results["neighbours"], results["neighbours"])
    for number in (3, 4):
        is_used = ~is_improbable(results.get(f"{number - 1} rounds", results[OF_WEFT]), labels, is_judged)
        results[f"{number} rounds"] = fitted(views[:, :1], is_used)
    results["perceptron"] = perceptron(views[:, 0], labels, num_classes, fold_of, is_used)
    return results


def neighbours(features: np.ndarray, labels: np.ndarray, num_classes: int, is_used: np.ndarray) -> np.ndarray:
    """Return the shares of the labels among the nearest images, which are weighted by their similarity."""
    unit = unit_length(((features - features.mean(0)) / features.std(0)).astype(np.float32))
    votes = np.zeros((len(labels), num_classes))
    for start in range(0, len(unit), ROWS):
        block = unit[start : start + ROWS] @ unit.T
        block[np.arange(len(block)), start + np.arange(len(block))] = -1
        near = np.argpartition(block, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS:]
        weight = np.exp(np.take_along_axis(block, near, 1) / TEMPERATURE) * is_used[near]
        for label in range(num_classes):
            votes[start : start + len(block), label] = (weight * (labels[near] == label)).sum(axis=1)
    return (votes + 1e-3 * votes.max()) / (votes + 1e-3 * votes.max()).sum(axis=1, keepdims=True)


def perceptron(
    features: np.ndarray, labels: np.ndarray, num_classes: int, fold_of: np.ndarray, is_used: np.ndarray
) -> np.ndarray:
    """Return the probabilities of a network with one hidden layer."""
    points = ((features - features.mean(0)) / features.std(0)).astype(np.float32)
    result = np.zeros((len(labels), num_classes))
    for fold in range(FOLDS):
        train = (fold_of != fold) & is_used
        model = MLPClassifier((HIDDEN,), alpha=1e-2, early_stopping=True, max_iter=30, random_state=0)
        result[fold_of == fold] = model.fit(points[train], labels[train]).predict_proba(points[fold_of == fold])
    return result


def _product(*probabilities: np.ndarray) -> np.ndarray:
    """Return the normalised geometric mean."""
    logs = [np.log(np.maximum(one, 1e-12)) for one in probabilities]
    return softmax(log_softmax(np.mean(logs, axis=0), axis=1), axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    for path in args.files:
        saved = np.load(path)
        given, true = saved["given"].astype(int), saved["true"].astype(int)
        is_wrong = given != true
        rows = [row for row in read_csv(FILE) if row["file"] != path.stem]
        for name, probabilities in attempts(saved["features"], given, int(true.max()) + 1).items():
            order = np.argsort(probabilities[np.arange(len(given)), given], kind="stable")
            row = {"file": path.stem, "images": len(given), "wrong": int(is_wrong.sum()), "attempt": name}
            row["precision_at_wrong"] = f"{is_wrong[order[: is_wrong.sum()]].mean():.4f}"
            row["probabilities_right"] = f"{(probabilities.argmax(axis=1) == true).mean():.4f}"
            rows.append(row)
            print(row, flush=True)
        write_csv(FILE, rows)


if __name__ == "__main__":
    main()
