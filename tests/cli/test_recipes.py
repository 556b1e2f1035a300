"""`weft recipes`: lists, shows and copies."""

import json

import pytest

from weft.cli import main
from weft.recipes import load_recipe, recipe_names


def test_the_list(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == recipe_names()
    assert any(line.split()[:5] == ["levit_pretrain", "levit_256", "1000", "epochs", "8192"] for line in lines)
    assert main(["recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ceit_pretrain"]["lr"] == pytest.approx(1e-3)
    assert rows["cvt_finetune_small"]["source"].endswith("which no released program reads")


def test_the_settings(capsys):
    assert main(["recipes", "settings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["optim.clip_mode", "norm", "norm,", "value,", "agc"] for line in lines)
    assert main(["recipes", "settings", "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["optim.ema_decay"]["default"] == 0
    assert "environment" not in rows


def test_what_is_shown_can_be_read_again(capsys, tmp_path):
    shown = {}
    for option in ("--set=batch_size=2048", "--source"):
        assert main(["recipes", "show", "levit_pretrain", option]) == 0
        shown[option] = capsys.readouterr().out
        (tmp_path / f"{option[2:8]}.yaml").write_text(shown[option])
    assert shown["--set=batch_size=2048"].startswith("# 2048 images per step = per device x devices x accumulate (1);")
    assert "# peak learning rate 0.002\n" in shown["--set=batch_size=2048"]
    assert "# source:  LeViT, arXiv 2104.01136" in shown["--source"]
    assert load_recipe(tmp_path / "source.yaml") == load_recipe("levit_pretrain")
    assert load_recipe(tmp_path / "set=ba.yaml") == load_recipe("levit_pretrain", [("batch_size", 2048)])
