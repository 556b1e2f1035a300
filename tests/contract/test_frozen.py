"""Names that others build on change only together with the list in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import weft
from weft.cli.app import arguments, commands
from weft.recipes.load import KEYS

HERE = Path(__file__).parent
PACKAGES = [
    "weft",
    *(f"weft.{name}" for name in ("checkpoints", "data", "deploy", "interpret", "models", "recipes", "study", "train")),
]
ALL = ["weft", *(item.name for item in pkgutil.walk_packages(weft.__path__, "weft.") if item.ispkg)]


def public_names() -> list[str]:
    return [f"{package}.{name}" for package in PACKAGES for name in sorted(importlib.import_module(package).__all__)]


def options() -> list[str]:
    lines = []
    for command in commands():
        found = [argument.names for argument in arguments(command)]
        places = [names[0] for names in found if not names[0].startswith("-")]
        lines.append(f"weft {' '.join([command, *places])}")
        lines += sorted(f"  {', '.join(names)}" for names in found if names[0].startswith("-"))
    return lines


FROZEN = {"public_names.txt": public_names, "options.txt": options, "recipe_keys.txt": lambda: sorted(KEYS)}


@pytest.mark.parametrize("name", FROZEN)
def test_the_list_is_as_written(name: str) -> None:
    written = (HERE / name).read_text(encoding="utf-8").splitlines()
    now = FROZEN[name]()
    gone, new = sorted(set(written) - set(now)), sorted(set(now) - set(written))
    assert now == written, (
        f"gone: {gone}; new: {new}. If this is meant, write it into tests/contract/{name} and CHANGELOG."
    )


@pytest.mark.parametrize("package", ALL)
def test_every_public_name_is_offered_and_found(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert [name for name in names if getattr(module, name) is None] == []
    assert set(names) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
    # the import of a submodule would replace a function or class of its name
    assert not set(names) & {item.name for item in pkgutil.iter_modules(module.__path__)}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Lazy imports included. A package lists its modules lazily, so a module may import names of its own package."""
    graph = grimp.build_graph("weft", cache_dir=None)
    imports = {
        module: {each for each in graph.find_modules_directly_imported_by(module) if not module.startswith(f"{each}.")}
        for module in graph.modules
    }
    assert set(TopologicalSorter(imports).static_order()) == set(imports)  # CycleError has the path
