"""What others build on does not change by accident; a change that is meant changes the list beside this file."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import weft
from weft.cli.app import arguments, commands
from weft.recipes.load import KEYS

HERE = Path(__file__).parent
PACKAGES = (
    "weft",
    *(f"weft.{name}" for name in ("checkpoints", "data", "deploy", "interpret", "models", "recipes", "study", "train")),
)


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


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_no_public_name_is_that_of_a_submodule() -> None:
    """The import of the submodule would replace the function or class."""
    packages = [item.name for item in pkgutil.walk_packages(weft.__path__, "weft.") if item.ispkg]
    for package in map(importlib.import_module, ["weft", *packages]):
        submodules = {item.name for item in pkgutil.iter_modules(package.__path__)}
        assert not submodules & set(getattr(package, "__all__", ())), package.__name__
