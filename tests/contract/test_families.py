"""One paper, one folder: no other code imports from a family's folder, names the family, or knows what is special."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from weft.models.families import FOLDERS, VARIANTS, families, family_of
from weft.models.family import Family

SOURCE = Path(weft.__file__).parent
LIST = SOURCE / "models" / "families.py"  # the one file that names them: it holds the list, and the default model
PLACES = (*FOLDERS, "ports")
HOME = re.compile(rf"weft\.models\.({'|'.join(PLACES)})\b")
NAMES = {*FOLDERS, *VARIANTS, *(family.name for family in families())} - {"baselines"}
INSIDE = {"attention_biases", "lca", "num_stages", "leff", "kv_stride"}  # arguments and parameters of one family


def breaches(source: str) -> Iterator[str]:
    """Yield what a file knows of one family."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0] if node.body else None, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if HOME.match(start + alias.name):
                    yield f"line {node.lineno} imports {start}{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in NAMES | INSIDE or HOME.match(node.value):
                yield f"line {node.lineno} has the text {node.value!r}"
        elif getattr(node, "id", getattr(node, "attr", "")) in NAMES | INSIDE:
            yield f"line {node.lineno} has the name of a family's own"


def test_no_file_knows_a_family() -> None:
    folders = [SOURCE / "models" / folder for folder in PLACES]
    for path in sorted(SOURCE.rglob("*.py")):
        if path != LIST and not any(folder in path.parents for folder in folders):
            assert list(breaches(path.read_text(encoding="utf-8"))) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "from weft.models.ceit.network import CeiT",
        "from weft.models import cvt",
        "import weft.models.levit",
        "def f(model): return isinstance(model, CvT)",
        "def f(model): return type(model).__name__ == 'LeViT'",
        "default = 'ceit_nano_32'",
        "home = 'weft.models.levit.network:LeViT'",
        "def f(model): return model.lca is None",
    ],
)
def test_a_file_that_knows_a_family_is_found(source: str) -> None:
    assert list(breaches(source))


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_the_code_of_a_family_is_in_its_files(family: Family) -> None:
    assert family.has_attention == (family.name != "Grafted")
    assert (family.code("attention", "attention") is not None) == family.has_attention
    assert family_of(family.network_class.__new__(family.network_class)) is family
    assert family.is_loaded
    assert family.code("attention", "cam_target")
    assert bool(family.code("weights", "LAYOUTS")) == (family.name != "Grafted")


def test_an_error_inside_a_file_of_a_family_is_no_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_family").mkdir()
    (tmp_path / "a_family" / "weights.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    family = Family("A", "a_family.network:A", {})
    assert (family.code("inference", "RULES", {}), family.has_attention) == ({}, False)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        family.code("weights", "LAYOUTS")
