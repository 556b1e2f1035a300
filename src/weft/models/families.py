"""The families of networks that weft knows: its own, and those of plugins. No torch is imported here."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterator, Mapping

from weft.errors import UsageError
from weft.models import baselines, ceit, cvt, levit, ports
from weft.models.family import Candidate, Family, Variant

MANY_IMAGES = 10_000  # training images; with more, training starts from random weights
SMALL_SIDE = 96  # pixels of the shorter side; smaller images are trained at their own size, from random weights
FOLDERS = ("ceit", "cvt", "levit", "baselines")  # of the papers, in the order of tables
PORTS = "port_"  # names of networks of `ports` begin so; they are listed only if asked for

_families: dict[str, Family] = {
    family.name: family for family in (ceit.FAMILY, cvt.FAMILY, levit.FAMILY, baselines.GRAFTED, *ports.FAMILIES)
}


_sources: dict[str, str] = {}  # of the families of plugins: file or package
_load_plugins = True


def families() -> tuple[Family, ...]:
    """Return all families, in the order of tables; the first call loads the plugins of packages and WEFT_PLUGINS."""
    global _load_plugins
    if _load_plugins:
        _load_plugins = False
        importlib.import_module("weft.models.plugins").load_all()
    return tuple(_families.values())


def add_family(family: Family, source: str) -> None:
    """Add the family of a plugin.

    Args:
        family: record of the family.
        source: file or package that it comes from, for messages and model directories.

    Raises:
        UsageError: its name, or the name of a model, is taken.
    """
    taken = next((name for name in family.variants if name in VARIANTS), None)
    if family.name in _families or taken is not None:
        what = f"family {family.name}" if family.name in _families else f"model {taken}"
        raise UsageError(f"A plugin must add new names; the {what} exists already. Rename it in {source}.")
    _families[family.name] = family
    _sources[family.name] = source


def plugin_of(model: object) -> str | None:
    """Return the plugin that a network comes from; None: weft's own, or of another library."""
    family = family_of(model)
    return _sources.get(family.name) if family else None


def plugins() -> list[str]:
    """Return the plugins that are loaded."""
    return sorted(set(_sources.values()))


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of weft's models that match a shell pattern such as `ceit*`, sorted.

    The networks that articles print (`weft.models.ports`) are listed only for a pattern that begins with `port_`.
    """
    names = (name for family in families() for name in family.variants)
    return sorted(fnmatch.filter((n for n in names if n.startswith(PORTS) == pattern.startswith(PORTS)), pattern))


def family_named(model: str) -> Family | None:
    """Return the family of a model name; None: no model of weft's."""
    return next((family for family in families() if model in family.variants), None)


def family_of(model: object) -> Family | None:
    """Return the family of a network, folded or not; None: a network of another library, or an export."""
    named = family_named(getattr(model, "weft_name", ""))
    return named or next((family for family in families() if family.builds(model)), None)


def speed_protocols() -> dict[str, Family]:
    """Return the families whose papers describe how they measure throughput, by name of the protocol."""
    return {family.name.lower(): family for family in families() if family.speed_protocol}


def candidates(scale: str) -> tuple[Candidate, ...]:
    """Return the models that `weft compare` trains by default, at the scale "small" or "large"."""
    own = (family.candidates[scale] for family in families() if scale in family.candidates)
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
    return ("levit_128s" if num_images <= MANY_IMAGES else "ceit_tiny_patch16_224"), None


class _Variants(Mapping[str, Variant]):
    """All models by name, those of plugins included; those of `ports` are found, but not listed."""

    def __getitem__(self, name: str) -> Variant:
        family = family_named(name)
        if family is None:
            raise KeyError(name)
        return family.variants[name]

    def __iter__(self) -> Iterator[str]:
        return (name for family in families() for name in family.variants if not name.startswith(PORTS))

    def __len__(self) -> int:
        return sum(1 for _ in self)


VARIANTS: Mapping[str, Variant] = _Variants()
