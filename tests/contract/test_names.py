"""Public class names are unique in the package; families may repeat the names of their parts."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"
PARTS = {"Attention", "Block", "ClassTokenBlock", "MLP", "Stage"}  # of a network, in the folder of its family


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where = path.relative_to(SOURCE)
                if not (node.name in PARTS and where.parts[0] == "models"):
                    places[node.name].append(str(where))
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, repeated


def test_every_module_says_what_it_is() -> None:
    """The first line of every module stands alone in an index: a sentence or a noun phrase, no riddle."""
    for path in sorted(SOURCE.rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        where = path.relative_to(SOURCE)
        assert doc, where
        first = doc.splitlines()[0]
        assert first.endswith("."), where
        assert 15 < len(first) <= 120, (where, first)
        assert not first.startswith(("What ", "Whatever ", "That ", "Where ", "Of ", "Who")), (where, first)
