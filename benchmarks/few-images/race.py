"""Which start network the probe chooses with few images, and the accuracy of each on the other images.

    python benchmarks/few-images/race.py CLOTHING10 GROCERY81 FEW9 [--seeds N]

Folders with a folder per class. Of each class some random images are for training, and all others are held out. Every
network of the extra `offline` has a linear probe: `probe` is its accuracy in cross-validation, by which `weft train`
chooses, and `held_out` that on the other images. A row per dataset, number of images of a class, seed and network.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.checkpoints.bundled import BUNDLES
from weft.checkpoints.hub import create_model
from weft.data import open_data
from weft.inference.features import read_features
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.train.linear_probe import fit, held_out_right
from weft.train.race import best_start

FILE = Path(__file__).with_suffix(".csv")
PER_CLASS = (3, 10, 30, 100)
MIN_HELD_OUT = 60  # images
COLUMNS = ("set", "per_class", "seed", "network", "images", "probe", "held_out", "is_chosen")


def features_of(folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the features of all images by network, and their class numbers."""
    splits = open_data(folder)
    images = SourcePart(splits.train, splits.val)
    rows, labels = dict[str, np.ndarray](), np.zeros(0, int)
    for name in BUNDLES:
        network = create_model(name, pretrained=True)
        batches = evaluation_batches(images, network, 32, 0)
        heads, labels = read_features(network, batches, Runtime.of("cpu"), is_mirrored=False)
        rows[name] = heads[0]
    return rows, labels


def rows_of(folder: Path, seeds: int) -> Iterator[dict[str, object]]:
    """Yield the results for a folder."""
    features, labels = features_of(folder)
    classes = len(np.unique(labels))
    order = {name: float(place) for place, name in enumerate(features)}
    for most in PER_CLASS:
        for seed in range(seeds):
            draws = np.random.default_rng(seed)
            own = np.concatenate(
                [draws.permutation(np.flatnonzero(labels == label))[:most] for label in range(classes)]
            )
            others = np.setdiff1d(np.arange(len(labels)), own)
            if len(others) < MIN_HELD_OUT:
                continue
            probes = {name: fit(rows[own], labels[own], classes) for name, rows in features.items()}
            rights = {name: held_out_right(rows[own, 0], labels[own])[0] for name, rows in features.items()}
            chosen = best_start({name: right.astype(float) for name, right in rights.items()}, None, order)
            for name, probe in probes.items():
                logits = features[name][others, 0] @ probe.weight.T + probe.bias
                yield {
                    "set": folder.name,
                    "per_class": most,
                    "seed": seed,
                    "network": name,
                    "images": len(own),
                    "probe": f"{100 * rights[name].mean():.2f}",
                    "held_out": f"{100 * np.mean(logits.argmax(1) == labels[others]):.2f}",
                    "is_chosen": name == chosen,
                }


def main() -> None:
    """Measure all folders, write a CSV file, and print the mean difference of the chosen network to the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=FILE)
    args = parser.parse_args()
    rows = list[dict[str, object]]()
    with args.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in (row for folder in args.folders for row in rows_of(folder, args.seeds)):
            writer.writerow(row)
            file.flush()
            rows.append(row)
    for name, most in dict.fromkeys((row["set"], row["per_class"]) for row in rows):
        of_case = [row for row in rows if (row["set"], row["per_class"]) == (name, most)]
        means = {
            network: np.mean([float(str(row["held_out"])) for row in of_case if row["network"] == network])
            for network in dict.fromkeys(row["network"] for row in of_case)
        }
        chosen = np.mean([float(str(row["held_out"])) for row in of_case if row["is_chosen"]])
        shown = ", ".join(f"{network} {mean:.1f}" for network, mean in means.items())
        print(f"{name}, {most} of a class: chosen {chosen:.1f}; {shown}", flush=True)


if __name__ == "__main__":
    main()
