"""Names of timm's models, read from its source files: importing timm takes seconds, and a misspelt name needs none."""

from __future__ import annotations

import functools
import re
import sys

from weft.errors import UsageError, nearest
from weft.lazy import package_folder
from weft.models.families import VARIANTS

_MODEL = re.compile(r"^@register_model\ndef (\w+)\(", re.MULTILINE)
_TAGGED = re.compile(r"""['"](\w+)\.(\w[\w.]*)['"]\s*:""")


@functools.cache
def _source() -> str:
    folder = package_folder("timm")
    files = [] if folder is None else sorted((folder / "models").glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@functools.cache
def timm_names() -> frozenset[str]:
    """Return the names of timm's models, without tags."""
    return frozenset(_MODEL.findall(_source()))


@functools.cache
def timm_tags() -> frozenset[str]:
    """Return the names of timm's models with the tags of their configurations."""
    return frozenset(f"{name}.{tag}" for name, tag in _TAGGED.findall(_source()) if name in timm_names())


def may_be_timm(name: str) -> bool:
    """Return whether timm can have a model of this name, with or without a tag; False is certain.

    Deprecated names are words of the source files. Tags that timm computes are not, so that a model none of whose tags
    is there can have any.
    """
    base, _, tag = name.partition(".")
    if name.startswith("weft_"):  # weft's own, in timm's registry
        return base.removeprefix("weft_") in VARIANTS
    if not _is_word(base):
        return False
    return not tag or name in timm_tags() or not any(known.startswith(f"{base}.") for known in timm_tags())


def _is_word(name: str) -> bool:
    """Return whether a name is in the source files, between characters that no name has."""
    source, place = _source(), -1
    while (place := source.find(name, place + 1)) >= 0:
        around = source[max(place - 1, 0) : place] + source[place + len(name) : place + len(name) + 1]
        if not re.search(r"\w", around):
            return True
    return False


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Return the names of weft's and timm's models nearest to a misspelt one; tags only if it has a tag."""
    base, _, tag = name.partition(".")
    if not tag:
        return nearest(name, {*VARIANTS, *timm_names()}, count)
    same = [known for known in timm_tags() if known.startswith(f"{base}.")]
    return nearest(name, same or timm_tags(), count)


def unknown_model(name: str) -> UsageError:
    """Return the error for an unknown model name."""
    return UsageError(
        f"Unknown model '{name}'. Nearest: {', '.join(nearest_names(name))}. All names: weft models, and in Python"
        " timm.list_models() (of a plugin: --plugin FILE)."
    )


def check_name(name: str) -> None:
    """Refuse a model name that neither weft nor timm has, without an import of timm.

    Names that were registered with timm in this process, such as those of modules of the user's own, are known.

    Raises:
        UsageError: there is no such model.
    """
    timm = sys.modules.get("timm")
    is_registered = timm is not None and timm.is_model(name)
    if name not in VARIANTS and not is_registered and not may_be_timm(name):
        raise unknown_model(name)
