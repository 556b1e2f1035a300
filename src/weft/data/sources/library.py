"""Open datasets of other libraries: `torchvision:NAME` and `hf:NAME`.

    torchvision:CIFAR10?root=data&download=1
    hf:beans?split=train&val=test

The options after the question mark are passed to the library. torchvision downloads only with `download=1`; the
Hugging Face library downloads by itself.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from weft.data.images.decode import read_regular
from weft.data.index.inventory import VAL_NAMES, ImageEntry
from weft.data.sources.listing import Listing
from weft.errors import DataError, need, unknown
from weft.files import cache_dir
from weft.text import printable, reason_of

# arguments of each torchvision class for its training and its validation set
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
    """Read an image of an opened library dataset by its key, `NAME/PART/NUMBER`."""

    def __init__(self, parts: Sequence[Any], bytes_of: Callable[[Any, int], bytes]) -> None:
        self.parts, self.bytes_of = parts, bytes_of

    def __call__(self, key: str) -> bytes:
        part, number = key.split("/")[-2:]
        return self.bytes_of(self.parts[int(part)], int(number))


def open_torchvision(address: str) -> Listing:
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
    train, val = TORCHVISION[name]
    wanted = [*(train if isinstance(train, tuple) else (train,)), val]
    try:
        parts = [getattr(library, name)(root, **kwargs, **more) for kwargs in wanted]
    except (RuntimeError, OSError, ImportError) as error:
        raise DataError(
            f"{name} must be in '{printable(root)}' in torchvision's layout; {reason_of(error).partition('. ')[0]}."
            f" Pass another folder, torchvision:{name}?root=DIR, or download it, torchvision:{name}?download=1."
        ) from error
    labels = [_labels(part) for part in parts]
    classes = _class_names(parts[0], labels)
    entries = [
        ImageEntry(f"{name}/{place}/{number:06}", classes[label], "val" if place == len(parts) - 1 else "train")
        for place, numbers in enumerate(labels)
        for number, label in enumerate(numbers)
    ]
    return Listing(f"torchvision:{name}", entries, LibraryReader(parts, _torchvision_bytes), classes)


def _labels(part: Any) -> list[int]:
    """Return the labels of a torchvision dataset, from whichever attribute has them."""
    for attribute in ("targets", "labels", "_labels"):
        if (labels := getattr(part, attribute, None)) is not None:
            return [int(label) for label in labels]
    return [int(label) for _, label in _samples(part)]


def _samples(part: Any) -> Any:
    return next(
        samples for name in ("samples", "_samples", "imgs") if (samples := getattr(part, name, None)) is not None
    )


def _class_names(part: Any, labels: Sequence[Sequence[int]]) -> list[str]:
    classes = getattr(part, "classes", None)
    if classes is None:
        return [str(number) for number in range(1 + max(max(numbers) for numbers in labels))]
    names = [" ".join(name) if isinstance(name, tuple) else str(name) for name in classes]
    if len(set(names)) < len(names):  # e.g. ImageNet's two classes crane
        names = [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names)]
    return names


def _torchvision_bytes(part: Any, number: int) -> bytes:
    for attribute in ("_image_files", "_images"):
        if (files := getattr(part, attribute, None)) is not None:
            return read_regular(files[number])
    if (data := getattr(part, "data", None)) is not None:
        return _png(np.asarray(data[number]))
    return read_regular(_samples(part)[number][0])


def _png(pixels: np.ndarray) -> bytes:
    """Encode a uint8 array (h w), (h w 3) or (3 h w) as PNG."""
    if pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.shape[2] != 3:
        pixels = pixels.transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def open_hf(address: str) -> Listing:
    """List the images of a Hugging Face dataset, from the hub or from disk.

    Args:
        address: text after `hf:`, such as `beans`, `owner/name?config=x&image=img&label=y`, or
            `imagefolder?data_dir=DIR`. `split` and `val` name the splits; the defaults are `train` and the first of
            validation, val, valid and test that exists.

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
    train = options.get("split", "train")
    val = options.get("val") or next((word for word in ("validation", *VAL_NAMES) if word in splits_by_name), None)
    for word in (train, val):
        if word is not None and word not in splits_by_name:
            raise DataError(
                f"hf:{name} must have the split '{word}'; it has {', '.join(splits_by_name)}. Pass split= and val=."
            )
    parts = [splits_by_name[word] for word in (train, val) if word is not None]
    image = options.get("image") or _column(parts[0], name, "Image", "image")
    label = options.get("label") or _column(parts[0], name, "ClassLabel", "label")
    feature = parts[0].features[label]
    parts = [part.cast_column(image, datasets.Image(decode=False)) for part in parts]
    values_by_split = [part[label] for part in parts]
    if isinstance(feature, datasets.ClassLabel):
        classes = list(feature.names)
        words = [word for word in (train, val) if word is not None]
        values_by_split = [
            [_class_of(feature, value, name, word) for value in values]
            for word, values in zip(words, values_by_split, strict=True)
        ]
    else:
        values_by_split = [[str(value) for value in values] for values in values_by_split]
        classes = sorted({value for values in values_by_split for value in values})
    splits = ("train", "val") if len(parts) == 2 else ("",)
    entries = [
        ImageEntry(f"{name}/{place}/{number:07}", value, splits[place])
        for place, values in enumerate(values_by_split)
        for number, value in enumerate(values)
    ]
    return Listing(f"hf:{name}", entries, LibraryReader(parts, functools.partial(_hf_bytes, image)), classes)


def _class_of(feature: Any, value: Any, name: str, split: str) -> str:
    """Return the class of an image by its label."""
    try:
        return feature.int2str(int(value))
    except (TypeError, ValueError):
        raise DataError(
            f"hf:{name} must have a label for every image; an image of the split '{split}' has {value}, as in test sets"
            " with hidden labels. Name other splits: hf:NAME?split=SPLIT&val=SPLIT."
        ) from None


def _hf_bytes(column: str, part: Any, number: int) -> bytes:
    cell = part[number][column]
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
