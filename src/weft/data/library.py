"""Open datasets of other libraries: `digits` of scikit-learn, `torchvision:NAME` and `hf:NAME`.

    digits
    torchvision:CIFAR10?root=data&download=1
    hf:beans?split=train&val=test

The options after the question mark are passed to the library. torchvision downloads only with `download=1`; the
Hugging Face library downloads by itself.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from weft.data.decode import BadImage, read_regular
from weft.data.inventory import Inventory
from weft.data.source import sort_class_names
from weft.data.split import stratified_split
from weft.data.split_names import split_of
from weft.errors import DataError, need, unknown
from weft.files import cache_dir
from weft.lazy import package_folder
from weft.text import first_few, printable, reason_of

DIGITS = "digits"  # the name of this dataset wherever data is named
DIGITS_VAL_FRACTION, DIGITS_SEED = 0.2, 0  # of the same split for every seed, so that results are comparable
WHITE = 16  # the largest value of a digit; 0 is the background
TORCHVISION: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST"), ({"train": True}, {"train": False})),
    **dict.fromkeys(
        ("SVHN", "STL10", "Food101", "GTSRB", "StanfordCars", "RenderedSST2"), ({"split": "train"}, {"split": "test"})
    ),
    **dict.fromkeys(("Flowers102", "DTD"), ({"split": "train"}, {"split": "val"}, {"split": "test"})),
    "FGVCAircraft": ({"split": "trainval"}, {"split": "test"}),
    "OxfordIIITPet": ({"split": "trainval"}, {"split": "test"}),
    "ImageNet": ({"split": "train"}, {"split": "val"}),
}  # arguments of each torchvision class for its training sets and, last, for its validation set
_SAMPLES = ("samples", "_samples", "imgs")  # attributes with (file, label) of every image


class LibraryReader:
    """Read an image of an opened library dataset by its key, `NAME/PART/NUMBER`."""

    def __init__(self, parts: Sequence[Any], bytes_of: Callable[[Any, int], bytes]) -> None:
        self.parts, self.bytes_of = parts, bytes_of

    def __call__(self, key: str) -> bytes:
        part, number = key.split("/")[-2:]
        return self.bytes_of(self.parts[int(part)], int(number))


def open_digits() -> Inventory:
    """List scikit-learn's 1,797 handwritten digits of 8x8 pixels in 17 gray levels, which are included in the package.

    They are PNG files in memory, with keys `digits/0000` to `digits/1796` in scikit-learn's order. A fifth of each
    digit is held out, independent of the seed.
    """
    images, labels = read_digits()
    keys = [f"digits/{i:04d}" for i in range(len(labels))]
    files = dict(zip(keys, map(_png, images), strict=True))
    inventory = Inventory(DIGITS, files.__getitem__, {"": [str(digit) for digit in range(10)]})
    val = set(stratified_split(keys, labels, DIGITS_VAL_FRACTION, DIGITS_SEED)[1])
    for i, (key, label) in enumerate(zip(keys, labels, strict=True)):
        inventory.add(key, str(label), "val" if i in val else "train")
    return inventory


def read_digits() -> tuple[np.ndarray, list[int]]:
    """Return the images (n 8 8), values 0 to `WHITE`, and their digits.

    They are read from scikit-learn's file, since its import takes seconds; by scikit-learn if the file is elsewhere.
    """
    folder = package_folder("sklearn")
    file = None if folder is None else folder / "datasets" / "data" / "digits.csv.gz"
    if file is not None and file.is_file():
        with gzip.open(file) as stream:
            rows = np.loadtxt(stream, delimiter=",")
        return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int).tolist()
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return digits.images, digits.target.tolist()


def _png(image: np.ndarray) -> bytes:
    """Encode gray 8x8 values of 0 to `WHITE`, scaled to 0 to 255 (rounded; all 17 levels stay distinct)."""
    file = io.BytesIO()
    Image.fromarray(np.rint(image * (255 / WHITE)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def open_torchvision(address: str) -> Inventory:
    """List the images of a torchvision dataset, with its own split.

    Args:
        address: text after `torchvision:`, such as `CIFAR10?root=data`. The default root is WEFT_DATA, or weft's cache
            directory.

    Raises:
        UsageError: a name not in `TORCHVISION`, or an unknown option.
        DataError: the dataset is missing or damaged.
    """
    import torchvision.datasets as library

    name, options = _read(address, ("root", "download"))
    if name not in TORCHVISION:
        raise unknown("torchvision dataset", name, TORCHVISION, ", ".join(TORCHVISION))
    root = options.get("root") or os.environ.get("WEFT_DATA") or str(cache_dir() / "data")
    more = {"download": True} if options.get("download") in ("1", "true", "yes") and name != "ImageNet" else {}
    try:
        parts = [getattr(library, name)(root, **kwargs, **more) for kwargs in TORCHVISION[name]]
    except (RuntimeError, OSError, ImportError) as error:
        raise DataError(
            f"{name} must be in '{printable(root)}' in torchvision's layout; {reason_of(error).partition('. ')[0]}."
            f" Pass another folder, torchvision:{name}?root=DIR, or download it, torchvision:{name}?download=1."
        ) from error
    labels = [_labels(part) for part in parts]
    names = [_class_names(part, labels) for part in parts]
    classes = list(dict.fromkeys(itertools.chain(*names)))
    inventory = Inventory(f"torchvision:{name}", LibraryReader(parts, _torchvision_bytes), {"": classes})
    for place, numbers in enumerate(labels):
        for number, label in enumerate(numbers):
            split = "val" if place == len(parts) - 1 else "train"
            inventory.add(f"{name}/{place}/{number:06}", names[place][label], split)
    if len(parts) > 2:
        inventory.remarks.append(
            f"As in the papers, the splits train and val of {name} are for training, and test is held out."
        )
    return inventory


def _labels(part: Any) -> list[int]:
    """Return the labels of a torchvision dataset, from whichever attribute has them."""
    labels = _attribute(part, "targets", "labels", "_labels")
    return [int(label) for label in ([label for _, label in _attribute(part, *_SAMPLES)] if labels is None else labels)]


def _attribute(part: Any, *names: str) -> Any:
    """Return the first of some attributes that a dataset has; None without."""
    return next((value for name in names if (value := getattr(part, name, None)) is not None), None)


def _class_names(part: Any, labels: Sequence[Sequence[int]]) -> list[str]:
    classes = getattr(part, "classes", None)
    if classes is None:
        return [str(number) for number in range(1 + max(max(numbers) for numbers in labels))]
    names = [" ".join(name) if isinstance(name, tuple) else str(name) for name in classes]
    if len(set(names)) < len(names):  # e.g. ImageNet's two classes crane
        names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]
    return names


def _torchvision_bytes(part: Any, number: int) -> bytes:
    """Return the file of an image; a PNG file of one whose pixels are in memory."""
    if (files := _attribute(part, "_image_files", "_images")) is not None:
        return read_regular(files[number])
    if (samples := _attribute(part, *_SAMPLES)) is not None:
        return read_regular(samples[number][0])
    file = io.BytesIO()
    part[number][0].save(file, "PNG", compress_level=1)
    return file.getvalue()


def open_hf(address: str, image: str | None = None, label: str | None = None) -> Inventory:
    """List the images of a Hugging Face dataset, from the hub or from disk.

    Args:
        address: text after `hf:`, such as `beans`, `owner/name?config=x&image=img&label=y`, or
            `imagefolder?data_dir=DIR`. `split` and `val` name the splits; by default, those named after a side.
        image, label: columns, if the address does not name them.

    Raises:
        UsageError: the library is not installed, or an unknown option.
        DataError: the dataset cannot be loaded, or has no column of images or labels.
    """
    need("data", "datasets")
    import datasets

    name, options = _read(address, ("config", "data_dir", "revision", "split", "val", "image", "label"))
    kwargs: dict[str, Any] = {key: options[key] for key in ("data_dir", "revision") if key in options}
    try:
        splits_by_name: Any = datasets.load_dataset(name, options.get("config"), **kwargs)
    except Exception as error:  # the library raises many types, also of other libraries
        raise DataError(
            f"hf:{printable(name)} must be loadable by the library datasets; {reason_of(error)}. Check the name, and"
            " that the hub can be reached."
        ) from error
    words = _split_words(name, options, list(splits_by_name))
    parts = [splits_by_name[word] for word in words]
    image = options.get("image") or image or _column(parts[0], name, "Image", "image")
    label = options.get("label") or label or _column(parts[0], name, "ClassLabel", "label")
    for setting, column in (("image", image), ("label", label)):
        if column not in parts[0].features:
            raise unknown(f"column for data.{setting}", column, list(parts[0].features), ", ".join(parts[0].features))
    parts = [part.cast_column(image, datasets.Image(decode=False)) for part in parts]
    inventory = Inventory(f"hf:{name}", LibraryReader(parts, partial(hf_bytes, image)), {})
    classes: dict[str, None] = {}  # in order
    for place, (part, (word, side)) in enumerate(zip(parts, words.items(), strict=True)):
        feature = part.features[label]
        values = [_class_of(feature, value, name, word, side) for value in part[label]]
        classes |= dict.fromkeys(feature.names if isinstance(feature, datasets.ClassLabel) else values)
        for number, value in enumerate(values):
            inventory.add(f"{name}/{place}/{number:07}", value, side)
    is_named = isinstance(parts[0].features[label], datasets.ClassLabel)
    inventory.classes = {"": [word for word in (classes if is_named else sort_class_names(classes)) if word]}
    if others := [word for word in splits_by_name if word not in words]:
        inventory.remarks.append(f"Not read: {first_few(others)} of hf:{printable(name)}.")
    return inventory


def _split_words(name: str, options: dict[str, str], words: list[str]) -> dict[str, str]:
    """Return the splits to read with their sides: those of the options, else those that are named after a side."""
    by_side = {split_of(word): word for word in reversed(words)}
    train, val = options.get("split") or by_side.get("train", "train"), options.get("val", "")
    for word in [train, *([val] if "val" in options else [])]:
        if word not in words:
            raise DataError(
                f"hf:{name} must have the split '{printable(word)}'; it has {first_few(words)}. Pass split= and val=."
            )
    if val:
        return {train: "train", val: "val"}
    held_out = {by_side[side]: side for side in ("val", "test") if by_side.get(side, train) != train}
    return {train: "train" if held_out else ""} | held_out


def _class_of(feature: Any, value: Any, name: str, split: str, side: str = "") -> str:
    """Return the class of an image by its label; an empty text for a hidden label of a test split."""
    try:
        if hasattr(feature, "int2str"):
            return feature.int2str(int(value))
        if value is not None and (text := str(value).strip()):
            return text
        raise ValueError(value)
    except (TypeError, ValueError):
        if side == "test":
            return ""
        raise DataError(
            f"hf:{name} must have a label for every image; an image of the split '{split}' has {value}, as in test sets"
            " with hidden labels. Name other splits: hf:NAME?split=SPLIT&val=SPLIT."
        ) from None


def hf_bytes(column: str, part: Any, number: int) -> bytes:
    """Return the bytes of an image in a column of a dataset of the library datasets."""
    cell = part[number][column]
    if cell is None or cell["bytes"] is cell["path"] is None:
        raise BadImage(column, "missing")
    return cell["bytes"] if cell["bytes"] is not None else read_regular(cell["path"])


def _column(part: Any, name: str, kind: str, word: str) -> str:
    """Return the first column of feature type `kind`, else the column named `word`."""
    by_kind = [key for key, feature in part.features.items() if type(feature).__name__ == kind]
    if by_kind or word in part.features:
        return by_kind[0] if by_kind else word
    raise DataError(
        f"hf:{name} must have a column of images and a column of labels; it has {', '.join(part.features)}."
        " Name the columns: hf:NAME?image=COLUMN&label=COLUMN."
    )


def _read(address: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Parse `NAME?key=value&...` to the name and a dictionary of options."""
    name, _, query = address.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for word in options:
        if word not in known:
            raise unknown("option after the question mark", word, known, ", ".join(known))
    return name, options
