"""The code of a family is in its files. That no other file knows it: .ci/lint.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.models.families import families, family_of
from weft.models.family import Family


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
