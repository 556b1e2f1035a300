"""docs/arguments.md lists every constructor argument of the installed implementations, and names arguments of weft."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import timm.models.levit

from weft.models.building import FACTORY, switches

PAGE = (Path(__file__).parents[2] / "docs" / "arguments.md").read_text()
FAMILIES = {"CeiT": "ceit_tiny_patch16_224", "CvT": "cvt_13", "LeViT": "levit_128s"}
PORTS = {
    "CeiT: CeiT-pytorch": "port_ceit_pytorch",
    "CvT: vit-pytorch": "port_vit_pytorch_cvt",
    "LeViT: vit-pytorch": "port_vit_pytorch_levit",
}


def section(title: str) -> dict[str, str]:
    """Rows of a table: what is named in the first column, and the last column."""
    start = PAGE.index(f"\n## {title}\n")
    end = PAGE.find("\n## ", start + 1)
    rows = {}
    for line in PAGE[start : end if end > 0 else None].splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if len(cells) == 3 and cells[0].startswith("`"):
            rows |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), cells[2])
    return rows


def parameters(title: str) -> set[str]:
    """Arguments of an installed implementation, from its signature."""
    if title == "LeViT: timm":
        names = inspect.signature(timm.models.levit.Levit.__init__).parameters
    elif title.endswith("vit-pytorch"):
        module = pytest.importorskip(f"vit_pytorch.{'cvt' if title.startswith('CvT') else 'levit'}")
        names = inspect.signature(getattr(module, title.partition(":")[0]).__init__).parameters
    else:
        transformers = pytest.importorskip("transformers")
        config = transformers.CvtConfig if title.startswith("CvT") else transformers.LevitConfig
        names = set(config().to_dict()) - set(transformers.PretrainedConfig().to_dict()) - {"model_type"}
    return set(names) - {"self"}


@pytest.mark.parametrize(
    "title", ["CvT: transformers", "CvT: vit-pytorch", "LeViT: timm", "LeViT: transformers", "LeViT: vit-pytorch"]
)
def test_every_argument_has_its_row(title: str) -> None:
    assert parameters(title) <= set(section(title)), parameters(title) - set(section(title))


@pytest.mark.parametrize("title", re.findall(r"^## (.+)$", PAGE, re.MULTILINE))
def test_what_stands_for_it_is_an_argument_of_weft(title: str) -> None:
    rows, model = section(title), PORTS.get(title) or FAMILIES[title.partition(":")[0]]
    known = {*switches(model), *FACTORY}
    assert len(rows) >= 11
    for name, text in rows.items():
        assert text, name
        if "**left out**" in text.lower():
            assert len(text) > 40, f"{name} is left out without a reason"
        for word in re.findall(r"`(\w+)(?:=[^`]*)?`", text):
            assert word in known or word in ("drop_path_rate", "features_only") or "'" in word or word in rows, (
                name,
                word,
            )
