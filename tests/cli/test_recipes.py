"""`weft recipes`: lists, shows, copies, and overwrites nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli import main
from weft.recipes import load_recipe, recipe_names

Shown = pytest.CaptureFixture[str]


def test_the_list(capsys: Shown) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == recipe_names()
    assert any(line.split()[:5] == ["levit_pretrain", "levit_256", "1000", "epochs", "8192"] for line in lines)
    assert main(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ceit_pretrain"]["lr"] == pytest.approx(1e-3)
    assert rows["cvt_finetune_small"]["source"].endswith("which no released program reads")


def test_the_settings(capsys: Shown) -> None:
    assert main(["recipes", "settings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["optim.clip_mode", "norm", "norm,", "value,", "agc"] for line in lines)
    assert main(["recipes", "settings", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["optim.ema_decay"]["default"] == 0
    assert "environment" not in rows


def test_what_is_shown_can_be_read_again(capsys: Shown, tmp_path: Path) -> None:
    assert main(["recipes", "show", "levit_pretrain", "--set", "batch_size=2048"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# 2048 images per step = per device x devices x accumulate (1);")
    assert "# peak learning rate 0.002\n" in text
    (tmp_path / "shown.yaml").write_text(text)
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe("levit_pretrain", [("batch_size", 2048)])
    assert main(["recipes", "show", "levit_pretrain", "--source"]) == 0
    text = capsys.readouterr().out
    assert "# source:  LeViT, arXiv 2104.01136" in text
    (tmp_path / "copied.yaml").write_text(text)
    assert load_recipe(tmp_path / "copied.yaml") == load_recipe("levit_pretrain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "weft recipes show needs NAME; got none. Usage: weft recipes show NAME [options]. See: "),
        (["digits"], "Unknown command of weft recipes 'digits'. Nearest: "),
        (["shwo", "digits"], "Unknown command of weft recipes 'shwo'. Nearest: show, "),
        (["settings", "optim"], "weft recipes settings has no place for 'optim'."),
        (["show", "levit_pretrian"], "Unknown recipe 'levit_pretrian'. Nearest: levit_pretrain"),
        (["show", "digits", "--set", "optim.lrr=1"], "Unknown setting 'optim.lrr'. Nearest: optim.lr"),
        (["show", "no/such.yaml"], "no/such.yaml must be readable; No such file or directory"),
    ],
)
def test_wrong_input(arguments: list[str], message: str, capsys: Shown) -> None:
    assert main(["recipes", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["settings", "--set", "epochs=1"], "--set"),
        (["show", "digits", "--json"], "--json"),
    ],
)
def test_an_option_of_another_action_is_refused(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *words]) == 2
    assert f"Unknown option of weft recipes {words[0]} '{option}'. Nearest: " in capsys.readouterr().err


def test_the_list_of_studies_reads_no_option_of_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "--seeds", "3"]) == 2
    assert "An option of a study needs NAME, the study; got none." in capsys.readouterr().err
