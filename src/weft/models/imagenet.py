"""Class names of models with public weights: ImageNet-1k and the variants with more classes that timm lists."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from weft.lazy import LazyModule

timm_data: Any = LazyModule("timm.data")

FEWEST = 1000  # classes of the smallest variant
_ID = re.compile(r"(n\d{8})(?!\d)")


class ImageNetClasses:
    """The classes of an ImageNet variant in the order of a model's outputs.

    Args:
        subset: name of the variant in timm, such as `imagenet-1k`.

    Attributes:
        subset: name of the variant.
        ids: WordNet ids, such as `n01440764`.
        names: readable names, all different: the first WordNet lemma (`tench`); where two classes share it, all lemmas
            (`maillot, tank suit`); where they share these also, the lemma with the id (`crane (n02012849)`).
    """

    def __init__(self, subset: str) -> None:
        info = timm_data.ImageNetInfo(subset)
        self.subset, self.ids = subset, info.label_names()
        descriptions = info.label_descriptions()
        candidates = [(text.partition(", ")[0], text) for text in descriptions]
        counts = Counter(name for pair in candidates for name in set(pair))
        self.names = [
            next((name for name in pair if counts[name] == 1), f"{pair[0]} ({id})")
            for pair, id in zip(candidates, self.ids, strict=True)
        ]
        self._exact = dict(zip((*self.names, *self.ids), (*range(len(self.ids)),) * 2, strict=True))
        self._simple: dict[str, set[int]] = {}
        self._lemmas: dict[str, set[int]] = {}
        for place, (name, text) in enumerate(zip(self.names, descriptions, strict=True)):
            self._simple.setdefault(_simple(name), set()).add(place)
            for alias in (text, *text.split(", ")):
                self._lemmas.setdefault(_simple(alias), set()).add(place)

    def find(self, name: str) -> list[int]:
        """Return the indices of the classes that a name can mean: none, one, or several for an ambiguous name.

        A name is a WordNet id, alone or before other text (`n01440764_tench`), a name of `names`, or one or all of the
        WordNet lemmas of a class. Case, commas and underscores matter only between names of `names`; these come before
        lemmas.
        """
        if name in self._exact:
            return [self._exact[name]]
        if match := _ID.match(name):
            return [self._exact[match[1]]] if match[1] in self._exact else []
        simple = _simple(name)
        return sorted(self._simple.get(simple) or self._lemmas.get(simple, ()))


def imagenet_classes(num_classes: int) -> ImageNetClasses | None:
    """Return the ImageNet classes of a model with public weights by its number of outputs; None: not ImageNet."""
    if num_classes < FEWEST:  # timm, which takes seconds to import, need not be asked
        return None
    subset = timm_data.infer_imagenet_subset({"num_classes": num_classes})
    return _read(subset) if subset else None


def recognized(names: Sequence[str] | None) -> ImageNetClasses | None:
    """Return the ImageNet variant whose readable names are these, in its order; None: other classes."""
    known = imagenet_classes(len(names)) if names else None
    return known if known is not None and known.names == list(names or ()) else None


@functools.cache
def _read(subset: str) -> ImageNetClasses:
    return ImageNetClasses(subset)


def _simple(name: str) -> str:
    return re.sub(r"[\s,_]+", " ", name).strip().casefold()
