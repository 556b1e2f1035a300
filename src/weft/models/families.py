"""The families of networks that weft knows: its own, and those of plugins. No torch is imported here.

A plugin is a Python file with a `FAMILY` (`weft.models.family.Family`), or a package with an entry point in the group
`weft.families` that names one. Files are loaded only if the user names them: by `--plugin`, `weft.load_plugin` or the
environment variable WEFT_PLUGINS, which also hands them to child processes. No file of data or weights can load one.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, is_installed, nearest
from weft.models import baselines, ceit, cvt, levit, ports
from weft.models.family import Family, Variant
from weft.text import reason_of

MANY_IMAGES = 10_000  # training images; with more, training starts from random weights
START_NETWORKS = {
    "cpu": {
        "tf_efficientnet_lite0": 75.1,
        "levit_256": 81.6,
        "tf_efficientnet_lite1": 76.7,
        "tf_efficientnet_lite2": 77.6,
        "hgnetv2_b2.ssld_stage2_ft_in1k": 82.3,
        "tiny_vit_11m_224.dist_in22k_ft_in1k": 83.2,
    },
    "cuda": {
        "levit_256": 81.6,
        "tiny_vit_21m_224.dist_in22k_ft_in1k": 84.8,
        "convnext_tiny.in12k_ft_in1k": 84.2,
        "vit_small_patch14_reg4_dinov2.lvd142m": 81.1,
    },
}
"""Networks with public weights that training may start from, by type of device, and their ImageNet top-1 in percent as
reported; that of DINOv2 is of a linear probe. All weights may be used commercially."""
SMALL_SIDE = 96  # pixels of the shorter side; smaller images are trained at their own size, from random weights
FOLDERS = ("ceit", "cvt", "levit", "baselines")  # of the papers, in the order of tables
ENTRY_POINTS = "weft.families"  # group of entry points
PLUGINS = "WEFT_PLUGINS"  # variable of the environment: paths, separated as in PATH
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")

PORTS = "port_"  # names of networks of `ports` begin so; they are listed only if asked for

_families: dict[str, Family] = {
    family.name: family for family in (ceit.FAMILY, cvt.FAMILY, levit.FAMILY, baselines.FAMILY, *ports.FAMILIES)
}
_sources: dict[str, str] = {}  # of the families of plugins: file or package
_loaded: dict[Path, Family] = {}  # by the file of the plugin
_load_plugins = True


def families() -> tuple[Family, ...]:
    """Return all families, in the order of tables; the first call loads the plugins of packages and WEFT_PLUGINS.

    Raises:
        UsageError: a file of WEFT_PLUGINS cannot be loaded. (A package that fails is reported as a warning.)
    """
    global _load_plugins
    if _load_plugins:
        _load_plugins = False
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            source = entry.dist.name if entry.dist is not None else entry.value
            try:
                _register(entry.load(), entry.value, source)
            except Exception as error:  # an installed package must not stop weft
                warnings.warn(f"The plugin of {source} cannot be loaded: {error}", stacklevel=2)
        for path in filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)):
            load_plugin(path)
    return tuple(_families.values())


def load_plugin(path: str | Path) -> Family:
    """Load a plugin from a Python file and register its family; a file that is loaded already is not loaded again.

    Child processes also load it. The file is run: load only code that you trust.

    Args:
        path: Python file with a `FAMILY`.

    Returns:
        The family.

    Raises:
        UsageError: the file does not exist, fails, has no `FAMILY`, or its names are taken.
    """
    families()  # those of packages and WEFT_PLUGINS come first
    file = Path(path).resolve()
    if file in _loaded:
        return _loaded[file]
    if not file.is_file() or file.suffix != ".py":
        raise UsageError(f"A plugin must be a Python file (.py); {path} is not one.")
    spec = importlib.util.spec_from_file_location(f"weft_plugin_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except WeftError:
        raise
    except Exception as error:  # third-party code can raise anything
        raise UsageError(
            f"The plugin {path} must run; it fails with {type(error).__name__}: {reason_of(error)}."
        ) from error
    family = _loaded[file] = _register(getattr(module, "FAMILY", None), str(path), file.name)
    known = os.environ.get(PLUGINS, "").split(os.pathsep)
    os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys([*filter(None, known), str(file)]))
    return family


def _register(family: object, path: str, source: str) -> Family:
    """Add the family of a plugin, also to timm's registry if that has weft's models."""
    if not isinstance(family, Family):
        kind = type(family).__name__
        raise UsageError(f"The plugin {path} must have FAMILY, a weft.models.family.Family; got {kind}.")
    taken = [f"model {name}" for known in _families.values() for name in family.variants if name in known.variants]
    if family.name in _families or taken:
        what = f"family {family.name}" if family.name in _families else taken[0]
        raise UsageError(f"A plugin must add new names; the {what} exists already. Rename it in {source}.")
    timm = sys.modules.get("timm")
    for name in family.variants:
        if timm is not None and timm.is_model(name):
            raise UsageError(f"A plugin must add new names; timm has a model {name}. Rename it in {path}.")
        if not _NAME.match(name):
            raise UsageError(
                f"Models of the plugin {path} must have names of lower-case letters, digits and _; got {name!r}."
            )
    _families[family.name], _sources[family.name] = family, source
    registry: Any = sys.modules.get("weft.models.registry")
    if hasattr(registry, "register"):  # else the registry is not imported yet, and will register all families
        registry.register(family)
    return family


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
    known = {family.reference: family for family in families()}
    classes = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(model).__mro__]
    of_class = next((known[name] for name in classes if name in known), None)
    return family_named(getattr(model, "weft_name", "")) or of_class


def is_model(name: str) -> bool:
    """Return whether weft or timm has a model of this name, with or without a tag.

    timm is imported, which takes seconds, for names that are not those of weft's networks.
    """
    if name in VARIANTS:
        return True
    timm = _timm()
    base, _, tag = name.partition(".")
    if timm is None or not timm.is_model(base):
        return False
    return not tag or name in timm.list_models(f"{base}.*", include_tags=True)


def check_name(name: str) -> None:
    """Refuse a model name that neither weft nor timm has.

    Raises:
        UsageError: there is no such model.
    """
    if not is_model(name):
        raise UsageError(
            f"Unknown model '{name}'. Nearest: {', '.join(nearest_names(name))}. All names: weft models, and in Python"
            " timm.list_models() (of a plugin: --plugin FILE)."
        )


def nearest_names(name: str) -> list[str]:
    """Return the names of weft's and timm's models nearest to a misspelt one; with a tag, those of its tags."""
    timm = _timm()
    base, _, tag = name.partition(".")
    if timm is None:
        return nearest(name, VARIANTS)
    tags = timm.list_models(f"{base}.*" if timm.is_model(base) else "", include_tags=True) if tag else []
    return nearest(name, tags or {*VARIANTS, *timm.list_models(exclude_filters="weft_*")})


def _timm() -> Any:
    """Return timm with weft's models registered; None: it is not installed."""
    if not is_installed("timm"):
        return None
    importlib.import_module("weft.models.registry")  # which imports this module
    return sys.modules["timm"]


def candidates(scale: str) -> dict[str, Mapping[str, Any]]:
    """Return what `weft compare` trains by default, at the scale "small" or "large": label -> recipe settings."""
    own = {family.name: family.candidates[scale] for family in families() if scale in family.candidates}
    return own | baselines.CANDIDATES[scale]


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
    """All models by name, those of plugins included, which are loaded on first use; those of `ports`
    are found, but not listed."""

    def _all(self) -> dict[str, Variant]:
        return {name: variant for family in families() for name, variant in family.variants.items()}

    def __getitem__(self, name: str) -> Variant:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._all() if not name.startswith(PORTS))

    def __len__(self) -> int:
        return sum(1 for _ in self)


VARIANTS: Mapping[str, Variant] = _Variants()
