"""Which photos are taken for series, and what an accuracy by series says about photos of other series.

    python benchmarks/few-images/series.py CLOTHING10 GROCERY81 FEW9 --photos FEW9 [--limit N]

Folders with a folder per class. The features are those of the public weights that training starts from, the classifier
is ridge regression on them, and `random`, `grouped` and `true` are its accuracy in five folds: of single images, of the
series that are found, and of the series as they are. Two more sets have known series, made from the first folder and
from --photos: `crops`, every photo in three to six crops, and `frames`, made traffic signs that come nearer in ten
frames. For `frames`, `new` is the accuracy on other signs of the classes. A row with `pixels` has the series found
without a network. Rows with a number have so many random images of every class, `merged` joins three classes to one
each, and `generated` has random features, for the time and the memory above the features.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import StratifiedGroupKFold

from weft.data.series import MIN_SILHOUETTE, MIN_SILHOUETTE_PIXELS, find_series, standardised, whitened
from weft.inference import embed
from weft.train.decisions import model_with_weights

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = (
    *("set", "features", "images", "classes", "silhouette", "is_found", "series", "in_series", "agreement"),
    *("random", "grouped", "true", "new", "seconds", "megabytes"),
)
FEW = (3, 10, 30)  # images of a class, in further rows
LARGE, LARGE_CLASSES = 50_000, 10  # of generated features, for time and memory
SIGNS = "ABCDEFGHJKLMNPRSTUVWXYZ0123456789%&#@?!+=<>*"[:43]
SUFFIXES = (".jpg", ".jpeg", ".png")


def images_in(folder: Path) -> list[Path]:
    """Return the images of a folder of class folders."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def write_crops(photos: Sequence[Path], folder: Path) -> None:
    """Write three to six crops of every photo; the name up to `_` is that of its series."""
    draws = random.Random(0)
    for path in photos:
        image = Image.open(path).convert("RGB")
        out = folder / path.parent.name
        out.mkdir(parents=True, exist_ok=True)
        for number in range(draws.randint(3, 6)):
            share = draws.uniform(0.6, 0.9)
            width, height = int(share * image.width), int(share * image.height)
            left, top = draws.randint(0, image.width - width), draws.randint(0, image.height - height)
            image.crop((left, top, left + width, top + height)).save(out / f"{path.stem}_{number}.jpg", quality=90)


def sign_of(number: int) -> Image.Image:
    """Return the picture of a class of signs: a letter on a shape."""
    shape, colour = "ctd"[number % 3] if number % 4 else "c", "rbty"[number % 4]
    image = Image.new("RGBA", (96, 96), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    fill = {"r": (250, 250, 245), "b": (30, 60, 160), "t": (250, 250, 240), "y": (240, 190, 40)}[colour]
    edge = (200, 30, 30) if colour in "rt" else (240, 240, 240)
    if shape == "c":
        draw.ellipse((4, 4, 92, 92), fill=fill, outline=edge, width=10)
    else:
        corners = [(48, 4), (92, 88), (4, 88)] if shape == "t" else [(48, 2), (94, 48), (48, 94), (2, 48)]
        draw.polygon(corners, fill=fill, outline=edge, width=8)
    ink = (255, 255, 255) if colour == "b" else (10, 10, 10)
    draw.text((48, 52), SIGNS[number], fill=ink, font=ImageFont.load_default(40), anchor="mm")
    return image


def frames_of(number: int, photos: Sequence[Image.Image], draws: random.Random, count: int) -> Iterator[Image.Image]:
    """Yield the frames of a sign that comes nearer: one background, light, view and blur, with small changes."""
    sign, background = sign_of(number), draws.choice(photos)
    side = min(background.size)
    left, top = draws.randint(0, background.width - side // 2), draws.randint(0, background.height - side // 2)
    light, tint = math.exp(draws.uniform(-1.4, 0.3)), [draws.uniform(0.8, 1.2) for _ in range(3)]
    angle, blur, contrast, shear = (draws.uniform(*ends) for ends in ((-12, 12), (0, 1.2), (0.5, 1.2), (-0.25, 0.25)))
    shift = draws.uniform(-4, 4), draws.uniform(-4, 4)
    for frame in range(count):
        size = int(14 + 76 * ((frame + 1) / count) ** 1.6)
        whole, part = int(1.25 * size), int(side * (0.5 - 0.02 * frame))
        x, y = left - 2 * frame, top - frame
        image = background.crop((x, y, x + part, y + part)).resize((whole, whole))
        seen = sign.transform(
            (96, 96), Image.Transform.AFFINE, (1, shear, -48 * shear, 0, 1, 0), Image.Resampling.BICUBIC
        )
        seen = seen.rotate(angle + draws.uniform(-1.5, 1.5), Image.Resampling.BICUBIC).resize((size, size))
        right, down = (int((whole - size) / 2 + way * size / 60 + draws.uniform(-1, 1)) for way in shift)
        image.paste(seen, (right, down), seen)
        image, bright = ImageEnhance.Contrast(image).enhance(contrast), light * draws.uniform(0.92, 1.08)
        bands = [
            band.point([min(255, int(value * (bright * own))) for value in range(256)])
            for band, own in zip(image.split(), tint, strict=True)
        ]
        yield Image.merge("RGB", bands).filter(ImageFilter.GaussianBlur(blur * size / 60))


def write_frames(photos: Sequence[Path], folder: Path, seed: int, most: int, count: int) -> None:
    """Write three to `most` signs of every class, in so many frames; the name up to `_` is that of the sign."""
    backgrounds, draws = [Image.open(path).convert("RGB") for path in photos], random.Random(seed)
    for number in range(len(SIGNS)):
        out = folder / f"{number:02}"
        out.mkdir(parents=True)
        for sign in range(draws.randint(3, most)):
            for frame, image in enumerate(frames_of(number, backgrounds, draws, count)):
                image.save(out / f"{sign:03}_{frame}.png")


def accuracy(rows: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the accuracy in percent in five folds of whole groups."""
    right = np.zeros(len(labels))
    for train, val in StratifiedGroupKFold(5, shuffle=True, random_state=0).split(rows, labels, groups):
        right[val] = classifier(rows[train], labels[train]).predict(rows[val]) == labels[val]
    return 100 * float(right.mean())


def classifier(rows: np.ndarray, labels: np.ndarray) -> RidgeClassifier:
    """Return the classifier that is fitted to images."""
    return RidgeClassifier(alpha=0.3 * rows.shape[1]).fit(rows, labels)


def features_of(folder: Path) -> tuple[np.ndarray, list[Path], np.ndarray]:
    """Return the features, paths and class numbers of the images of a folder."""
    result = embed(str(model_with_weights()), [folder], quiet=True)
    paths = [Path(path) for path in result.images]
    return result.features, paths, np.unique([path.parent.name for path in paths], return_inverse=True)[1]


def pixels_of(paths: Sequence[Path]) -> np.ndarray:
    """Return each image at 8x8 pixels."""
    box = Image.Resampling.BOX
    return np.stack([np.asarray(Image.open(path).convert("RGB").resize((8, 8), box)).ravel() for path in paths])


def rows_of(name: str, folder: Path, *, is_known: bool, new: Path | None = None) -> Iterator[dict[str, object]]:
    """Yield the results for a set of images, by features and by pixels."""
    features, paths, labels = features_of(folder)
    rows, numbers = standardised(features), np.arange(len(paths))
    names = [f"{path.parent.name}/{path.stem.rsplit('_', 1)[0]}" for path in paths]
    known = np.unique(names, return_inverse=True)[1] if is_known else None
    kinds = {"network": (rows, MIN_SILHOUETTE), "pixels": (whitened(pixels_of(paths)), MIN_SILHOUETTE_PIXELS)}
    for kind, (compared, least) in kinds.items():
        start = time.perf_counter()
        series, silhouette = find_series(compared, labels)
        seconds = time.perf_counter() - start
        yield {
            "set": name,
            "features": kind,
            "images": len(paths),
            "classes": labels.max() + 1,
            "silhouette": f"{silhouette:.3f}",
            "is_found": silhouette >= least,
            "series": series.max() + 1,
            "in_series": f"{np.mean(np.bincount(series)[series] > 1):.2f}",
            "agreement": "" if known is None else f"{adjusted_rand_score(known, series):.2f}",
            "random": f"{accuracy(rows, labels, numbers):.1f}",
            "grouped": f"{accuracy(rows, labels, series):.1f}",
            "true": "" if known is None else f"{accuracy(rows, labels, known):.1f}",
            "new": "" if new is None else f"{accuracy_on(new, features, labels):.1f}",
            "seconds": f"{seconds:.1f}",
        }
    draws = np.random.default_rng(0)
    for most in FEW:
        classes = [draws.permutation(np.flatnonzero(labels == label))[:most] for label in np.unique(labels)]
        yield verdict(f"{name}, {most}", features[np.concatenate(classes)], labels[np.concatenate(classes)])
    yield verdict(f"{name}, merged", features, labels // 3)


def verdict(name: str, features: np.ndarray, labels: np.ndarray) -> dict[str, object]:
    """Return whether images are in series, by the features of a network."""
    series, silhouette = find_series(standardised(features), labels)
    return {
        "set": name,
        "features": "network",
        "images": len(labels),
        "classes": len(np.unique(labels)),
        "silhouette": f"{silhouette:.3f}",
        "is_found": silhouette >= MIN_SILHOUETTE,
        "series": series.max() + 1,
        "in_series": f"{np.mean(np.bincount(series)[series] > 1):.2f}",
    }


def large() -> dict[str, object]:
    """Return the time for many generated features, and the memory with them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    draws = np.random.default_rng(0)
    labels = draws.integers(0, LARGE_CLASSES, LARGE)
    features = draws.standard_normal((LARGE, 1280), np.float32)
    for label, centre in enumerate(draws.standard_normal((LARGE_CLASSES, 1280), np.float32)):
        features[labels == label] += 0.6 * centre
    start = time.perf_counter()
    find_series(standardised(features), labels)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {"set": "generated", "features": "network", "images": LARGE, "classes": LARGE_CLASSES}
    return {**row, "seconds": f"{seconds:.1f}", "megabytes": f"{(after - before) / 1024:.0f}"}


def accuracy_on(folder: Path, features: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy in percent on other images of a classifier that is fitted to all."""
    others, _, expected = features_of(folder)
    both = standardised(np.concatenate([features, others]))
    predicted = classifier(both[: len(labels)], labels).predict(both[len(labels) :])
    return 100 * float(np.mean(predicted == expected))


def main() -> None:
    """Measure all sets, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--photos", type=Path, required=True, help="backgrounds of the frames")
    parser.add_argument(
        "--every", type=int, default=3, help="of the photos of the first folder, one in so many is cropped"
    )
    parser.add_argument("--signs", type=int, default=10, help="largest number of signs of a class")
    parser.add_argument("--csv", type=Path, default=FILE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, args.csv.open("w", newline="", encoding="utf-8") as file:
        crops, frames, new = (Path(work) / name for name in ("crops", "frames", "new"))
        write_crops(images_in(args.folders[0])[:: args.every], crops)
        write_frames(images_in(args.photos), frames, 1, args.signs, 10)
        write_frames(images_in(args.photos), new, 2, 5, 3)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        sets = [(folder.name, folder, False, None) for folder in args.folders]
        made = (("crops", crops, True, None), ("frames", frames, True, new))
        of_sets = (
            rows_of(name, folder, is_known=is_known, new=others) for name, folder, is_known, others in (*sets, *made)
        )
        for row in itertools.chain([large()], *of_sets):
            writer.writerow(row)
            file.flush()
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
