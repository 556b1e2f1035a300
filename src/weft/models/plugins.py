"""Plugins: families of networks from other people's Python files and packages.

A plugin is a Python file with a `FAMILY` (`weft.models.family.Family`), or a package with an entry point in the group
`weft.families` that names one. Files are loaded only if the user names them: by `--plugin`, `weft.load_plugin` or the
environment variable WEFT_PLUGINS, which also hands them to child processes. No file of data or weights can load one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path

from weft.errors import UsageError, WeftError
from weft.models.families import add_family
from weft.models.family import Family
from weft.text import reason_of

GROUP = "weft.families"  # of entry points
VARIABLE = "WEFT_PLUGINS"  # of the environment: paths, separated as in PATH
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_loaded: dict[Path, Family] = {}


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
    family = _register(getattr(module, "FAMILY", None), str(path), file.name)
    _loaded[file] = family
    known = os.environ.get(VARIABLE, "").split(os.pathsep)
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*filter(None, known), str(file)]))
    return family


def load_all() -> None:
    """Load the plugins of installed packages and those that WEFT_PLUGINS names.

    Raises:
        UsageError: a file of WEFT_PLUGINS cannot be loaded. (A package that fails is reported as a warning.)
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        source = entry.dist.name if entry.dist is not None else entry.value
        try:
            _register(entry.load(), entry.value, source)
        except Exception as error:  # an installed package must not stop weft
            warnings.warn(f"The plugin of {source} cannot be loaded: {error}", stacklevel=2)
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        load_plugin(path)


def _register(family: object, path: str, source: str) -> Family:
    if not isinstance(family, Family):
        kind = type(family).__name__
        raise UsageError(f"The plugin {path} must have FAMILY, a weft.models.family.Family; got {kind}.")
    timm = sys.modules.get("timm")
    for name in family.variants:
        if timm is not None and timm.is_model(name):
            raise UsageError(f"A plugin must add new names; timm has a model {name}. Rename it in {path}.")
        if not _NAME.match(name):
            raise UsageError(
                f"Models of the plugin {path} must have names of lower-case letters, digits and _; got {name!r}."
            )
    registry = sys.modules.get("weft.models.registry")
    add_family(family, source)
    if registry is not None and hasattr(registry, "build_with_timm"):  # else it registers all families when imported
        registry.register(family)
    return family
