"""Names of splits, as folders, files, columns and libraries write them: `train`, `Testing`, `seg_train`, `val2017`.

One rule for every source: the images of `train` are trained on, those of `val` are held out. Images of `test` are held
out only if there is no `val`; else they are not read, unless an evaluation asks for them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from weft.errors import DataError

WORDS = {
    "train": "train",
    "training": "train",
    "trainval": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "eval": "val",
    "evaluation": "val",
    "test": "test",
    "testing": "test",
}  # word -> side; of two names of one side, the earlier word wins
SIDES = ("train", "val", "test")
_NEUTRAL = {
    *("image", "images", "img", "imgs", "photo", "photos", "picture", "pictures", "pic", "pics", "jpg", "png"),
    *("data", "dataset", "set", "split", "seg", "folder", "dir", "file", "files", "sample", "samples", "of", "the"),
}  # further words in names of splits, which say nothing about the content
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+")


def split_of(name: str) -> str:
    """Return the side that a name means, `train`, `val` or `test`; empty for a name of none, or of several."""
    sides = {WORDS[word] for word in _words(name) if word in WORDS}
    return sides.pop() if len(sides) == 1 else ""


def is_flag_of_split(name: str) -> bool:
    """Return whether a name means a side and nothing else, as `is_valid` and `is_training_image` do."""
    return bool(split_of(name)) and set(_rest(name)) <= {"is"}


def split_folders(names: Iterable[str]) -> dict[str, str]:
    """Return the side of every folder that belongs to a split; an empty dictionary if the names are those of classes.

    Folders belong together if their names differ in the word of the split alone (`flowers_train`, `flowers_test`);
    `image`, `set` and the like count nothing. There is a split if one of them is for training.
    """
    together: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        if side := split_of(name):
            together[_rest(name)][side].append(name)
    possible = {rest: sides for rest, sides in together.items() if "train" in sides and (len(sides) > 1 or not rest)}
    if not possible:
        return {}
    best = min(possible, key=lambda rest: (rest != (), -len(possible[rest]), rest))
    return {min(names, key=_preference): side for side, names in possible[best].items()}


def held_out_side(sides: Collection[str], *, test: bool) -> str:
    """Return the side of a dataset that is held out, `val` or `test`; empty if there is none.

    Raises:
        DataError: the test split is wanted, and there is none.
    """
    if test and "test" not in sides:
        has = ", ".join(side for side in SIDES if side in sides) or "no split of its own"
        raise DataError(f"--split test needs a dataset with a test split; this one has {has}. Choose another split.")
    return "test" if test else next((side for side in ("val", "test") if side in sides), "")


def _rest(name: str) -> tuple[str, ...]:
    return tuple(word for word in _words(name) if word not in WORDS and word not in _NEUTRAL)


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, without digits; `trainset` is the word `train`."""
    words = [word.lower() for word in _TOKEN.findall(name)]
    return [word.removesuffix("set") if word.removesuffix("set") in WORDS else word for word in words]


def _preference(name: str) -> tuple[int, int, str]:
    words = _words(name)
    return min(list(WORDS).index(word) for word in words if word in WORDS), len(words), name
