"""Measure the calibration error on the 10,000 test images of CIFAR-10 for several ways to scale logits.

    weft train cifar10/train --recipe small_images --epochs 2 --out RUN      # or other recipes and epochs
    python benchmarks/few-images/calibration.py RUN cifar10

Each way is fitted on the held-out images of the run (5,000 at most, as in training) and measured on cifar10/test.
Adds the rows of the run to calibration.csv next to this file; and to calibration_sizes.csv the calibration error of
temperatures that are fitted on fewer held-out images, mean and standard deviation of 20 random choices of these images.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, write_csv

from weft.checkpoints import load_model_dir
from weft.data import open_data
from weft.data.split import stratified_subset
from weft.inference.arguments import recipe_of
from weft.inference.calibration import MAX_IMAGES, fit_temperature
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.inference.scores import calibration_error
from weft.inference.torch_model import infer
from weft.machine.runtime import Runtime

FILE = Path(__file__).parent / "calibration.csv"
SIZES_FILE = Path(__file__).parent / "calibration_sizes.csv"
SIZES = (50, 100, 200, 500, 1_000, 2_000)  # held-out images
DRAWS = 20
TEMPERATURES = np.arange(0.5, 1.5, 0.01)


def error(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the expected calibration error in percentage points."""
    probabilities = softmax(logits, axis=1)
    return calibration_error(probabilities.max(axis=1), probabilities.argmax(axis=1) == labels)


def loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the cross-entropy in nats."""
    return -float(log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def brier(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean squared error of the probabilities of all classes."""
    return float(((softmax(logits, axis=1) - np.eye(logits.shape[1])[labels]) ** 2).sum(axis=1).mean())


def ways(logits: np.ndarray, labels: np.ndarray) -> dict[str, tuple[float, np.ndarray]]:
    """Fit each way; return its temperature and the term that is added to the logits of each class."""
    classes = logits.shape[1]
    zero = np.zeros(classes)
    scaled = minimize(lambda x: loss(logits / np.exp(x[0]), labels), [0.0]).x
    biased = minimize(lambda x: loss(logits / np.exp(x[0]) + x[1:], labels), np.zeros(1 + classes)).x
    squared = minimize(lambda x: brier(logits / np.exp(x[0]), labels), [0.0]).x
    least = min(TEMPERATURES, key=lambda temperature: error(logits / temperature, labels))
    return {
        "none": (1.0, zero),
        "temperature, by the loss": (float(np.exp(scaled[0])), zero),
        "temperature and a term per class, by the loss": (float(np.exp(biased[0])), biased[1:]),
        "temperature, by the squared error (weft)": (float(np.exp(squared[0])), zero),
        "temperature, by the calibration error": (float(least), zero),
    }


def by_size(logits: np.ndarray, labels: np.ndarray, test_logits: np.ndarray, test_labels: np.ndarray) -> list[dict]:
    """Return a row per number of held-out images: the test error of temperatures that are fitted as in weft."""
    rng, rows = np.random.default_rng(0), []
    for size in (size for size in SIZES if size <= len(labels)):
        chosen = [rng.choice(len(labels), size, replace=False) for _ in range(DRAWS)]
        row: dict[str, object] = {"held_out": size, "draws": DRAWS}
        for name, squared in (("loss", False), ("squared", True)):
            temperatures = (fit_temperature(logits[part], labels[part], squared) for part in chosen)
            errors = [error(test_logits / temperature, test_labels) for temperature in temperatures]
            row |= {f"ece_{name}": f"{np.mean(errors):.3f}", f"ece_{name}_std": f"{np.std(errors):.3f}"}
        rows.append(row)
    return rows


def main() -> None:
    """Compute the logits, fit every way, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("cifar10", type=Path)
    args = parser.parse_args()
    model, _ = load_model_dir(args.run / "best")
    runtime = Runtime.of("cpu", "fp32")
    held_out = open_data(args.cifar10 / "train").val
    held_out = SourcePart(held_out, places=stratified_subset(held_out.keys, held_out.labels, MAX_IMAGES, 0))
    test = open_data(args.cifar10).val
    sources = (evaluation_batches(source, model.eval(), 128, 0) for source in (held_out, test))
    logits, test_logits = (
        np.concatenate([infer(model, images, runtime).numpy() for images, _ in batches]).astype(np.float64)
        for batches in sources
    )
    labels, test_labels = np.array(held_out.labels), np.array(test.labels)
    top1 = 100 * float((test_logits.argmax(axis=1) == test_labels).mean())
    recipe = recipe_of(args.run)
    assert recipe is not None, f"{args.run} must be a run directory"
    run = f"{recipe.model}, {recipe.epochs} epochs"
    rows: list[dict[str, object]] = [row for row in read_csv(FILE) if row["run"] != run]
    for name, (temperature, term) in ways(logits, labels).items():
        scaled, test_scaled = logits / temperature + term, test_logits / temperature + term
        values = temperature, error(scaled, labels), error(test_scaled, test_labels), loss(test_scaled, test_labels)
        keys = "temperature", "ece_held_out", "ece_test", "loss_test"
        numbers = {key: f"{value:.3f}" for key, value in zip(keys, values, strict=True)}
        rows.append({"run": run, "way": name, **numbers, "top1_test": f"{top1:.2f}", "images": len(test_labels)})
        print(rows[-1], flush=True)
    write_csv(FILE, rows)
    sizes = [row for row in (read_csv(SIZES_FILE) if SIZES_FILE.is_file() else []) if row["run"] != run]
    new = [{"run": run, **row} for row in by_size(logits, labels, test_logits, test_labels)]
    print(*new, sep="\n")
    write_csv(SIZES_FILE, [*sizes, *new])


if __name__ == "__main__":
    main()
