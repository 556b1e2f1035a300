"""The families of networks that weft knows: its own, and those of plugins. No torch is imported here."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping

from weft.errors import UsageError
from weft.models import baselines, ceit, cvt, levit
from weft.models.family import Candidate, Family, Variant

MANY_IMAGES = 10_000
SMALL_SIDE = 96  # pixels; below, the default model is one for small images, trained at their own size

FOLDERS = ("ceit", "cvt", "levit", "baselines")  # of the papers, in the order of tables

_families: dict[str, Family] = {
    family.name: family for family in (ceit.FAMILY, cvt.FAMILY, levit.FAMILY, baselines.GRAFTED, baselines.T2T)
}


def families() -> tuple[Family, ...]:
    """Return all families, in the order of tables."""
    return tuple(_families.values())


def add_family(family: Family) -> None:
    """Add the family of a plugin.

    Raises:
        UsageError: its name, or the name of a model, is taken.
    """
    taken = next((name for name in family.variants if name in VARIANTS), None)
    if family.name in _families or taken is not None:
        what = f"family {family.name}" if family.name in _families else f"model {taken}"
        raise UsageError(f"A plugin must add new names; the {what} exists already. Rename it in the plugin.")
    _families[family.name] = family


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of weft's models that match a shell pattern such as `ceit*`, sorted."""
    return sorted(fnmatch.filter(VARIANTS, pattern))


def family_named(model: str) -> Family | None:
    """Return the family of a model name; None: no model of weft's."""
    return next((family for family in _families.values() if model in family.variants), None)


def family_of(model: object) -> Family | None:
    """Return the family of a network, folded or not; None: a network of another library, or an export."""
    named = family_named(getattr(model, "weft_name", ""))
    return named or next((family for family in _families.values() if family.builds(model)), None)


def candidates(scale: str) -> tuple[Candidate, ...]:
    """Return the models that `weft compare` trains by default, at the scale "small" or "large"."""
    own = (family.candidates[scale] for family in _families.values() if scale in family.candidates)
    return (*own, *baselines.CANDIDATES[scale])


def default_model(side: int, num_images: int) -> tuple[str, int | None]:
    """Return the default model for a dataset.

    Small images get a network made for 32 pixels; few large ones LeViT, which costs least; many of them CeiT.

    Args:
        side: shorter side of a typical image in pixels.
        num_images: number of training images.

    Returns:
        Name of the model, and the image size to train it at (None: its own).
    """
    if side < SMALL_SIDE:
        return "ceit_nano_32", None if side < 48 else 64
    return ("levit_128s" if num_images < MANY_IMAGES else "ceit_tiny_patch16_224"), None


class _Variants(Mapping[str, Variant]):
    """All models by name, those of plugins included."""

    def __getitem__(self, name: str) -> Variant:
        family = family_named(name)
        if family is None:
            raise KeyError(name)
        return family.variants[name]

    def __iter__(self) -> Iterator[str]:
        return (name for family in _families.values() for name in family.variants)

    def __len__(self) -> int:
        return sum(len(family.variants) for family in _families.values())


VARIANTS: Mapping[str, Variant] = _Variants()
