"""Data sets that other libraries keep: `torchvision:NAME` and `hf:NAME`.

    torchvision:CIFAR10?root=data&download=1
    hf:beans?split=train&val=test

What follows the question mark is for that library. Nothing is downloaded unless `download=1` says so (torchvision), or
the library itself does it (hf).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from weft.data.images.decode import open_regular
from weft.data.index.inventory import VAL_NAMES, Picture
from weft.data.sources.download import cache_dir
from weft.data.sources.listing import Shelf
from weft.errors import DataError, need, unknown
from weft.text import printable

# how each of torchvision's classes calls the part to learn from and the part to be measured on
_TRAIN_FLAG = ({"train": True}, {"train": False})
_SPLIT_TEST = ({"split": "train"}, {"split": "test"})
TORCHVISION: dict[str, tuple[dict[str, Any] | tuple[dict[str, Any], ...], dict[str, Any]]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST"), _TRAIN_FLAG),
    **dict.fromkeys(("SVHN", "STL10", "Food101", "GTSRB", "StanfordCars", "RenderedSST2"), _SPLIT_TEST),
    "Flowers102": (({"split": "train"}, {"split": "val"}), {"split": "test"}),
    "DTD": (({"split": "train"}, {"split": "val"}), {"split": "test"}),
    "FGVCAircraft": ({"split": "trainval"}, {"split": "test"}),
    "OxfordIIITPet": ({"split": "trainval"}, {"split": "test"}),
    "ImageNet": ({"split": "train"}, {"split": "val"}),
}


class LibraryReader:
    """Reads a picture by its key, `PART/NUMBER`, from what a library has opened: a file of its own, or an array."""

    def __init__(self, parts: Sequence[Any], bytes_of: Callable[[Any, int], bytes]) -> None:
        self.parts, self.bytes_of = parts, bytes_of

    def __call__(self, key: str) -> bytes:
        part, number = key.split("/")[-2:]
        return self.bytes_of(self.parts[int(part)], int(number))


def open_torchvision(address: str) -> Shelf:
    """One of torchvision's data sets, with the split that it comes with.

    Args:
        address: what follows `torchvision:`, such as `CIFAR10?root=data`. Without a root it is looked for in WEFT_DATA,
            or in weft's cache directory.

    Raises:
        UsageError: a name that is not among `TORCHVISION`, or a word after the question mark that is not known.
        DataError: it is not there, or damaged.
    """
    import torchvision.datasets as library

    name, options = _read(address, ("root", "download"))
    if name not in TORCHVISION:
        raise unknown("data set of torchvision", name, TORCHVISION, ", ".join(TORCHVISION))
    root = options.get("root") or os.environ.get("WEFT_DATA") or str(cache_dir() / "data")
    more = {"download": True} if options.get("download") in ("1", "true", "yes") and name != "ImageNet" else {}
    train, val = TORCHVISION[name]
    wanted = [*(train if isinstance(train, tuple) else (train,)), val]
    try:
        parts = [getattr(library, name)(root, **words, **more) for words in wanted]
    except (RuntimeError, OSError, ImportError) as error:
        raise DataError(
            f"{name} must lie below '{printable(root)}' in the layout of torchvision; {str(error).splitlines()[0]}"
            f" Name another place: torchvision:{name}?root=DIR, or let it be fetched: torchvision:{name}?download=1."
        ) from error
    labels = [_labels(part) for part in parts]
    classes = _class_names(parts[0], labels)
    pictures = [
        Picture(f"{name}/{place}/{number:06}", classes[label], "val" if place == len(parts) - 1 else "train")
        for place, numbers in enumerate(labels)
        for number, label in enumerate(numbers)
    ]
    return Shelf(f"torchvision:{name}", pictures, LibraryReader(parts, _torchvision_bytes), classes)


def _labels(part: Any) -> list[int]:
    """The labels of one of torchvision's data sets, wherever it keeps them."""
    for attribute in ("targets", "labels", "_labels"):
        if (labels := getattr(part, attribute, None)) is not None:
            return [int(label) for label in labels]
    return [int(label) for _, label in _samples(part)]


def _samples(part: Any) -> Any:
    return next(found for word in ("samples", "_samples", "imgs") if (found := getattr(part, word, None)) is not None)


def _class_names(part: Any, labels: Sequence[Sequence[int]]) -> list[str]:
    classes = getattr(part, "classes", None)
    if classes is None:
        return [str(number) for number in range(1 + max(max(numbers) for numbers in labels))]
    names = [" ".join(name) if isinstance(name, tuple) else str(name) for name in classes]
    if len(set(names)) < len(names):  # ImageNet has two cranes
        names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]
    return names


def _torchvision_bytes(part: Any, number: int) -> bytes:
    for attribute in ("_image_files", "_images"):
        if (files := getattr(part, attribute, None)) is not None:
            return _file(files[number])
    if (data := getattr(part, "data", None)) is not None:
        return _png(np.asarray(data[number]))
    return _file(_samples(part)[number][0])


def _file(path: str | Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _png(pixels: np.ndarray) -> bytes:
    """An array (h w), (h w 3) or (3 h w) of bytes as a file; lossless."""
    if pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.shape[2] != 3:
        pixels = pixels.transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def open_hf(address: str) -> Shelf:
    """A data set of the Hugging Face hub, or one that its library reads from a disk.

    Args:
        address: what follows `hf:`, such as `beans`, `owner/name?config=x&image=img&label=y`, or
            `imagefolder?data_dir=DIR`. `split` and `val` name the parts; without them `train`, and the first of
            validation, val, valid and test that exists.

    Raises:
        UsageError: the library is not installed, or a word after the question mark is not known.
        DataError: it is not there, or has no pictures with classes.
    """
    need("data", "datasets")
    import datasets

    name, options = _read(address, ("config", "data_dir", "revision", "split", "val", "image", "label"))
    words: dict[str, Any] = {word: options[word] for word in ("data_dir", "revision") if word in options}
    try:
        found: Any = datasets.load_dataset(name, options.get("config"), **words)
    except Exception as error:  # the library raises a dozen kinds, also of other libraries
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"hf:{printable(name)} must be within reach of the library datasets; {first}") from error
    train = options.get("split", "train")
    val = options.get("val") or next((word for word in ("validation", *VAL_NAMES) if word in found), None)
    for word in (train, val):
        if word is not None and word not in found:
            raise DataError(f"hf:{name} must have the split '{word}'; it has {', '.join(found)}. Say split= and val=.")
    parts = [found[word] for word in (train, val) if word is not None]
    image = options.get("image") or _column(parts[0], name, "Image", "image")
    label = options.get("label") or _column(parts[0], name, "ClassLabel", "label")
    feature = parts[0].features[label]
    parts = [part.cast_column(image, datasets.Image(decode=False)) for part in parts]
    stated = [part[label] for part in parts]
    if isinstance(feature, datasets.ClassLabel):
        classes, stated = list(feature.names), [[feature.names[int(value)] for value in values] for values in stated]
    else:
        stated = [[str(value) for value in values] for values in stated]
        classes = sorted({value for values in stated for value in values})
    splits = ("train", "val") if len(parts) == 2 else ("",)
    pictures = [
        Picture(f"{name}/{place}/{number:07}", value, splits[place])
        for place, values in enumerate(stated)
        for number, value in enumerate(values)
    ]

    def bytes_of(part: Any, number: int) -> bytes:
        cell = part[number][image]
        return cell["bytes"] if cell["bytes"] is not None else _file(cell["path"])

    return Shelf(f"hf:{name}", pictures, LibraryReader(parts, bytes_of), classes)


def _column(part: Any, name: str, kind: str, word: str) -> str:
    """The column of a kind, or one that is called so."""
    by_kind = [key for key, feature in part.features.items() if type(feature).__name__ == kind]
    if by_kind or word in part.features:
        return by_kind[0] if by_kind else word
    raise DataError(
        f"hf:{name} must have a column of pictures and one of classes; it has {', '.join(part.features)}."
        " Name them: hf:NAME?image=COLUMN&label=COLUMN."
    )


def _read(address: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """`NAME?key=value&...`."""
    name, _, query = address.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for word in options:
        if word not in known:
            raise unknown("word after the question mark", word, known, ", ".join(known))
    return name, options
