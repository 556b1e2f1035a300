"""`weft models`."""

from __future__ import annotations

import json

import pytest

from weft.cli import main
from weft.models.families import VARIANTS, family_named


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "levit_128*"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["name", "size", "params", "MACs", "reported", "top-1", "source", "weights"]
    assert lines[1][:7] == ["levit_128", "224", "9.21M", "405.3M", "9.2M,", "406M", "78.6"]
    assert lines[2][:7] == ["levit_128s", "224", "7.78M", "304.7M", "7.8M,", "305M", "76.6"]
    assert len(lines) == 3


def test_nobody_has_reported_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "ceit_nano_32"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["ceit_nano_32", "32", "0.93M", "50.9M", "-", "-", "-", "none"]


def test_json_holds_the_exact_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(VARIANTS)
    for row in rows:
        variant, family = VARIANTS[row["name"]], family_named(row["name"])
        assert family is not None
        numbers = {key: getattr(variant, key) for key in ("size", "params", "macs", "top1", "top1_source")}
        printed = dict(zip(("printed_params", "printed_macs"), variant.printed or (None, None), strict=True))
        licence = "apache-2.0" if variant.weights else ""
        assert row == {"name": row["name"], "family": family.name, **numbers, "weights_licence": licence, **printed}
    assert {name for name in VARIANTS if VARIANTS[name].printed} == {name for name in VARIANTS if "nano" not in name}
