"""`weft models`."""

from __future__ import annotations

import json

import pytest

from weft.cli import main
from weft.models.families import VARIANTS, family_named
from weft.models.papers import row_of


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


@pytest.mark.parametrize(
    ("words", "first", "count"),
    [
        ("CeiT", "ceit_base_patch16_224", 6),
        ("CVT", "cvt_13", 4),
        ("LeViT-256", "levit_256", 1),
        ("Levit*", "levit_128", 6),
    ],
)
def test_a_family_is_found_in_any_case(words: str, first: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", words, "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert (names[0], len(names)) == (first, count)


def test_a_model_of_timm_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "resnet50"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:4] == ["resnet50", "224", "25.56M", "4.09G"]
    assert main(["models", "RESNET50"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == row[:4]
    assert main(["models", "resnet50.a1_in1k", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["name"], record["family"], record["params"]) == ("resnet50.a1_in1k", "timm", 25_557_032)


def test_models_of_timm_are_listed_by_a_part_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "resnet5"]) == 0
    said = capsys.readouterr()
    names = [line.split()[0] for line in said.out.splitlines()[1:]]
    assert {"resnet50", "resnet50d", "seresnet50"} <= set(names)
    assert "Parameters and MACs of one of them: weft models" in said.err
    assert main(["models", "resnet18_of_mine"]) == 2
    assert "Unknown model 'resnet18_of_mine'. Nearest: " in capsys.readouterr().err


def test_the_numbers_of_ceit_base_are_those_of_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the released README; the paper's are DeiT-B's."""
    assert main(["models", "ceit_base"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4:7] == ["94.4M,", "-", "81.9"]
    assert main(["models", "ceit_base*", "--papers"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the paper prints DeiT-B's 86.6 M and 17.4 G for CeiT-B") == 2


def test_json_holds_the_exact_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(VARIANTS)
    for found in rows:
        variant, family, row = VARIANTS[found["name"]], family_named(found["name"]), row_of(found["name"])
        assert family is not None
        assert row is not None
        numbers = {"size": variant.size, "params": row.params, "macs": row.macs, "top1": row.top1}
        printed = {key: found[key] for key in ("printed_params", "printed_macs")}
        licence = "apache-2.0" if variant.weights else ""
        expected = {"name": found["name"], "family": family.name, **numbers, "top1_source": row.source}
        assert found == {**expected, "weights_licence": licence, **printed}
    in_print = {row["name"]: (row["printed_params"], row["printed_macs"]) for row in rows if row["printed_params"]}
    assert set(in_print) == {name for name in VARIANTS if "nano" not in name}
    assert in_print["levit_256"] == ("18.9M", "1.12G")
    assert in_print["levit_128s"] == ("7.8M", "305M")
    assert in_print["ceit_base_patch16_224"] == ("94.4M", None)


def test_the_source_of_an_accuracy() -> None:
    rows = {name: row_of(name) for name in VARIANTS}
    sources = {name: row.source for name, row in rows.items() if row}
    assert sources["ceit_tiny_patch16_384"] == "CeiT paper, main table"
    assert sources["ceit_base_patch16_224"] == "CeiT released README, 100 epochs"
    assert sources["cvt_w24"] == "CvT paper, Table 3, ImageNet-22k first"
    assert sources["grafted_r50s0_deit_small_12"] == "LeViT paper, Table 1"
    assert sources["levit_nano_32"] == ""
