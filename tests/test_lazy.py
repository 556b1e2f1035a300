"""Public names of packages: written once, imported on first use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent
PACKAGES = ["weft", *sorted(f"weft.{file.parent.name}" for file in ROOT.glob("*/__init__.py"))]
LAZY = [name for name in PACKAGES if "attach(" in Path(str(importlib.import_module(name).__file__)).read_text()]


@pytest.mark.parametrize("name", LAZY)
def test_every_name_is_offered_and_found(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__all__ == sorted(package.__all__) == dir(package)
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_an_unknown_name_says_which_there_are() -> None:
    expected = "module 'weft.recipes' has no attribute 'read_recipe'; it has Recipe, dump, load_recipe, "
    with pytest.raises(AttributeError, match=f"^{expected}"):
        _ = importlib.import_module("weft.recipes").read_recipe


def test_a_name_imports_its_own_module_alone() -> None:
    code = "import sys, weft.recipes; weft.recipes.Recipe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "weft.recipes.schema" in modules
    assert modules.isdisjoint({"weft.recipes.load", "yaml", "torch"})
