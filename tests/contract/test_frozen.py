"""What others build on does not change by accident; a change that is meant changes the list beside this file."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

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
