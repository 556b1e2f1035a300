"""Measure nearest neighbours and active labelling on a folder of photos with few images.

    python benchmarks/few-images/label.py PHOTOS --tables knn,label

Writes knn.csv and label.csv next to this file. The features are those of tf_efficientnet_lite0 (extra
`offline`). All measurements have five seeds.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from neighbours import votes
from scipy.special import softmax
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

from weft.checkpoints.hub import create_model
from weft.checkpoints.unknown import unit_length
from weft.data import open_data
from weft.inference.features import read_features
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.train import labelling
from weft.train.linear_probe import fit

HERE = Path(__file__).parent
MODEL = "tf_efficientnet_lite0"
SEEDS, FOLDS = range(5), 5
NEIGHBOURS = (1, 5, 10, 20)
ROUNDS = 9  # of labelling: one image per class, then as many again in each round


def features_of(photos: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return features (images views features), labels, and the number of classes."""
    splits = open_data(photos)
    network = create_model(MODEL, pretrained=True).eval()
    parts = [
        read_features(network, evaluation_batches(source, network, 32, 0), Runtime.of("cpu"))
        for source in (splits.train, splits.val)
    ]
    views = np.concatenate([features[0] for features, _ in parts])
    return views, np.concatenate([labels for _, labels in parts]), len(splits.classes)


def write(name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a CSV file next to this script."""
    with (HERE / name).open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def knn(views: np.ndarray, labels: np.ndarray, classes: int) -> None:
    """Write the cross-validated accuracy of nearest neighbours and of the linear probe."""
    rows = []
    for seed in SEEDS:
        n_correct = dict.fromkeys(["probe", *(f"{k} neighbours" for k in NEIGHBOURS)], 0)
        for train_on, test_on in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(labels, labels):
            probe = fit(views[train_on], labels[train_on], classes, seed)
            scores = views[test_on, 0] @ probe.weight.T + probe.bias
            n_correct["probe"] += int((scores.argmax(1) == labels[test_on]).sum())
            for k in NEIGHBOURS:
                predicted = votes(views[train_on, 0], labels[train_on], views[test_on, 0], classes, k).argmax(1)
                n_correct[f"{k} neighbours"] += int((predicted == labels[test_on]).sum())
        rows += [(name, seed, f"{100 * count / len(labels):.2f}") for name, count in n_correct.items()]
    write("knn.csv", ("classifier", "seed", "top1"), rows)


def label(views: np.ndarray, labels: np.ndarray, classes: int) -> None:
    """Write the accuracy by number of labels, for images selected by `weft label`, randomly, by margin, by distance."""

    def choose(method: str, pool: np.ndarray, known: np.ndarray, scores: np.ndarray, rng: np.random.Generator):
        if method == "random":
            return rng.choice(len(pool), classes, replace=False)
        probabilities = softmax(scores, axis=1)
        if method == "margin":
            first, second = np.sort(probabilities, axis=1)[:, :-3:-1].T
            return np.argsort(first - second)[:classes]
        if method == "distance":
            probabilities = np.full_like(probabilities, 1 / classes)
            points, old = unit_length(views[pool, 0]), unit_length(views[known, 0])
            nearest, chosen = (points @ old.T).max(1), []
            for _ in range(classes):
                chosen.append(int(nearest.argmin()))
                nearest = np.maximum(nearest, points @ points[chosen[-1]])
            return np.array(chosen)
        return np.array(labelling.choose(views[pool, 0], probabilities, views[known, 0], classes))

    rows = []
    rounds = min(ROUNDS, len(labels) * (FOLDS - 1) // FOLDS // classes - 1)
    sizes = range(classes, rounds * classes + 1, classes)
    for seed in SEEDS:
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(labels, labels)
        n_correct = {(method, n): 0 for method in METHODS for n in sizes}
        for fold, (train_on, test_on) in enumerate(folds):
            rng = np.random.default_rng([seed, fold])
            start = [int(rng.choice(train_on[labels[train_on] == number])) for number in range(classes)]
            for method in METHODS:
                known, rng = np.array(start), np.random.default_rng([seed, fold, 1])
                for n in sizes:
                    probe = fit(views[known], labels[known], classes, seed)
                    scores = views[:, 0] @ probe.weight.T + probe.bias
                    n_correct[method, n] += int((scores[test_on].argmax(1) == labels[test_on]).sum())
                    pool = np.setdiff1d(train_on, known)
                    known = np.concatenate([known, pool[choose(method, pool, known, scores[pool], rng)]])
        rows += [(method, n, seed, f"{100 * count / len(labels):.2f}") for (method, n), count in n_correct.items()]
        print(f"seed {seed}", flush=True)
    write("label.csv", ("method", "labels", "seed", "top1"), rows)


METHODS = ("label", "random", "margin", "distance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--tables", default="knn,label")
    args = parser.parse_args()
    tables = args.tables.split(",")
    with threadpool_limits(1):
        views, labels, classes = features_of(args.photos)
        if "knn" in tables:
            knn(views, labels, classes)
        if "label" in tables:
            label(views, labels, classes)


if __name__ == "__main__":
    main()
