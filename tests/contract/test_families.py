"""One paper, one folder: no other code imports from a family's folder, names the family, or knows what is special."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from weft.models.families import FOLDERS, VARIANTS, families, family_of
from weft.models.family import Family

SOURCE = Path(weft.__file__).parent
LIST = SOURCE / "models" / "families.py"  # the one file that names them: it holds the list, and the default model
PLACES = (*FOLDERS, "ports")
NAMES = {*FOLDERS, *VARIANTS, *(family.name for family in families())} - {"baselines"}
INSIDE = {"attention_biases", "lca", "num_stages", "leff", "kv_stride"}  # arguments and parameters of one family


def files() -> list[Path]:
    folders = [SOURCE / "models" / folder for folder in PLACES]
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if path != LIST and not any(folder in path.parents for folder in folders)
    ]


def breaches(source: str) -> Iterator[str]:
    """Yield what a file knows of one family."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    folders = "|".join(PLACES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{name}" for name in modules]
            for module in modules:
                if re.match(rf"weft\.models\.({folders})\b", module):
                    yield f"line {node.lineno} imports {module}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in NAMES | INSIDE or re.match(rf"weft\.models\.({folders})\b", node.value):
                yield f"line {node.lineno} has the text {node.value!r}"
        else:
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in NAMES | INSIDE:
                yield f"line {node.lineno} has the name {name}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_knows_a_family(path: Path) -> None:
    assert list(breaches(path.read_text(encoding="utf-8"))) == []


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
def test_the_test_sees_what_it_looks_for(source: str) -> None:
    assert list(breaches(source))


def test_records_need_no_torch() -> None:
    code = "import sys, weft.models.families; sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


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
