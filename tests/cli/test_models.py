"""`weft models`: the table, and with `--papers` the rows of the papers with their commands."""

import json
import shlex

import pytest
import timm
import torch
from PIL import Image

from tests.helpers import enliven, put_in_cache
from weft.checkpoints.hub import load_public, printed_row
from weft.cli import main
from weft.cli.app import parse
from weft.cli.models import evaluate_command, train_command
from weft.cli.options import run_settings
from weft.models.building import build_described
from weft.models.families import VARIANTS
from weft.models.papers import TABLES, printed_rows, row_of
from weft.recipes import load_recipe

EVERY_ROW = [(table, row) for table in TABLES for row in printed_rows(table)]


@pytest.fixture
def models(capsys):
    """Run `weft models`; return the rows of --json, or the words of each line."""

    def run(*words):
        assert main(["models", *words]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in words else [line.split() for line in out.splitlines()]

    return run


def test_the_table(models):
    lines = models("levit_128*")
    assert lines[0] == ["name", "size", "params", "MACs", "reported", "top-1", "source", "weights"]
    assert lines[1][:7] == ["levit_128", "224", "9.21M", "405.3M", "9.2M,", "406M", "78.6"]
    assert lines[2][:7] == ["levit_128s", "224", "7.78M", "304.7M", "7.8M,", "305M", "76.6"]
    assert len(lines) == 3
    assert models("ceit_nano_32")[1] == ["ceit_nano_32", "32", "0.93M", "50.9M", "-", "-", "-", "none"]


@pytest.mark.parametrize(
    ("words", "first", "count"),
    [
        ("CeiT", "ceit_base_patch16_224", 6),
        ("CVT", "cvt_13", 4),
        ("LeViT-256", "levit_256", 1),
        ("Levit*", "levit_128", 6),
    ],
)
def test_a_family_is_found_in_any_case(words, first, count, models):
    names = [row["name"] for row in models(words, "--json")]
    assert (names[0], len(names)) == (first, count)


def test_models_of_timm_are_counted_and_listed_by_a_part_of_a_name(models, capsys):
    row = models("resnet50")[1][:4]
    assert row == models("RESNET50")[1][:4] == ["resnet50", "224", "25.56M", "4.09G"]
    (record,) = models("resnet50.a1_in1k", "--json")
    assert (record["name"], record["family"], record["params"]) == ("resnet50.a1_in1k", "timm", 25_557_032)
    assert main(["models", "resnet5"]) == 0
    said = capsys.readouterr()
    assert {"resnet50", "resnet50d", "seresnet50"} <= {line.split()[0] for line in said.out.splitlines()[1:]}
    assert "Parameters and MACs of one of them: weft models" in said.err


def test_the_numbers_of_ceit_base_are_those_of_its_source(models, capsys):
    """Of the released README; the paper's are DeiT-B's."""
    assert models("ceit_base")[1][4:7] == ["94.4M,", "-", "81.9"]
    assert main(["models", "ceit_base*", "--papers"]) == 0
    assert capsys.readouterr().out.count("the paper prints DeiT-B's 86.6 M and 17.4 G for CeiT-B") == 2


def test_json_holds_the_exact_numbers(models):
    """Of one model here; of all in tests/compat."""
    rows = {row["name"]: row for row in models("--json")}
    assert list(rows) == sorted(VARIANTS)
    printed = {name: (row["printed_params"], row["printed_macs"]) for name, row in rows.items()}
    assert {name for name, (params, _) in printed.items() if params} == {
        name for name in VARIANTS if "nano" not in name
    }
    assert printed["levit_128s"] == ("7.8M", "305M")
    assert printed["ceit_base_patch16_224"] == ("94.4M", None)
    row = row_of("levit_256")
    counted = {"size": 224, "params": row.params, "macs": row.macs, "top1": 81.6, "top1_source": "LeViT paper, Table 3"}
    expected = {"name": "levit_256", "family": "LeViT", **counted, "weights_licence": "apache-2.0"}
    assert rows["levit_256"] == {**expected, "printed_params": "18.9M", "printed_macs": "1.12G"}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ceit_tiny_patch16_384", "CeiT paper, main table"),
        ("ceit_base_patch16_224", "CeiT released README, 100 epochs"),
        ("cvt_w24", "CvT paper, Table 3, ImageNet-22k first"),
        ("grafted_r50s0_deit_small_12", "LeViT paper, Table 1"),
        ("levit_nano_32", ""),
    ],
)
def test_the_source_of_an_accuracy(name, source):
    assert row_of(name).source == source


def test_every_row_of_a_paper_has_a_command_that_builds_its_network_or_a_reason():
    built = set()
    for table, row in EVERY_ROW:
        command = train_command(table, row)
        assert bool(command) == bool(row.recipe)
        assert row.builds or row.note, row
        if row.weights and "own" not in row.weights:
            assert row.builds.replace("_", "-") in row.weights.split()[0].replace("_", "-")
        if not command or (row.recipe, row.builds) in built:
            continue
        built.add((row.recipe, row.builds))
        given = parse(shlex.split(command)[1:])[1].arguments
        recipe = load_recipe(given.get("recipe"), run_settings(given.get("settings"), given.get("of_recipe")).items())
        assert recipe.model == row.builds
        size = {"img_size": recipe.img_size} if recipe.img_size is not None and row.builds in VARIANTS else {}
        with torch.device("meta"):
            model = build_described(str(recipe.model), {**recipe.model_args, **size})
        assert model.pretrained_cfg["input_size"][1] == row.size, row
    assert len(built) > 10


@pytest.mark.parametrize(
    ("paper", "model", "evaluated", "trained"),
    [
        ("LeViT", "LeViT-128S", "levit_128s imagenet/", "imagenet --recipe levit_pretrain --model levit_128s"),
        ("CvT", "CvT-21 384", None, "imagenet --recipe cvt_finetune_imagenet --model cvt_21 --from WEIGHTS"),
        ("DeiT", "DeiT-T", "deit_tiny_patch16_224.fb_in1k imagenet/", "imagenet --recipe deit_pretrain"),
        ("CeiT", "CeiT-B, 150 epochs", None, "imagenet --recipe ceit_base_pretrain --epochs 150"),
        ("LeViT", "EfficientNet B0", None, None),
    ],
)
def test_the_commands_of_a_row(paper, model, evaluated, trained):
    row = next(row for row in printed_rows(TABLES[0]) if (row.paper, row.model) == (paper, model))
    assert evaluate_command(row) == (f"weft evaluate {evaluated}" if evaluated else "")
    command = train_command("imagenet", row)
    assert command.startswith(f"weft train {trained}") if trained else command == ""


def test_the_list_of_papers(models, capsys):
    assert main(["models", "--papers", "ceit"]) == 0
    out = capsys.readouterr().out
    assert sum(line.split()[:3] == ["CeiT", "CeiT-T", "224"] for line in out.splitlines()) == 2  # in both tables
    assert "one archive for all CeiT" in out
    assert "weft train DATA --recipe ceit_transfer" in out
    rows = models("--papers", "cvt", "--json")
    large = next(row for row in rows if row["model"] == "CvT-W24 384 (22k)" and row["table_of"] == "imagenet")
    assert (large["evaluate"], large["train"]) == ("weft evaluate cvt_w24 imagenet/", "")
    assert large["obstacle"] == "the training on ImageNet-22k is not published"
    assert {row["table_of"] for row in rows} == set(TABLES)
    both = models("--papers", "cvt", "ceit", "--papers", "CvT*", "--json")
    assert [row for row in both if row in rows] == rows
    assert any(row["paper"] == "CeiT" for row in both)


def test_public_weights_have_the_row_and_the_preprocessing_of_their_paper(cache):
    names = ("levit_256", "deit_tiny_patch16_224", "deit_tiny_patch16_224.fb_in1k", "ceit_base_patch16_224")
    rows = [(row.paper, row.top1) for name in names if (row := printed_row(name))]
    assert rows == [("LeViT", 81.6), ("DeiT", 72.2), ("DeiT", 72.2), ("CeiT", 81.9)]
    assert printed_row("resnet50") is printed_row("levit_nano_32") is None
    published = timm.create_model("deit_tiny_patch16_224").eval()
    put_in_cache(cache, "timm/deit_tiny_patch16_224.fb_in1k", "model.safetensors", published.state_dict())
    assert load_public("deit_tiny_patch16_224")[0].pretrained_cfg["crop_pct"] == 0.875


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use an empty cache, and no connection to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("WEFT_DATA", raising=False)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "weft"))
    return tmp_path / "hub"


@pytest.mark.slow
def test_public_weights_are_evaluated_next_to_the_paper(cache, tmp_path, capsys):
    """On a folder with ImageNet's number of classes, and one small image in each."""
    for number in range(1000):
        (tmp_path / "imagenet" / f"{number}").mkdir(parents=True)
        colour = (number % 256, 7 * number % 256, 31 * number % 256)
        Image.new("RGB", (8, 8), colour).save(tmp_path / "imagenet" / f"{number}" / "image.png")
    published = enliven(timm.create_model("levit_128s")).eval()
    put_in_cache(cache, "timm/levit_128s.fb_dist_in1k", "model.safetensors", published.state_dict())
    assert main(["evaluate", "levit_128s", str(tmp_path / "imagenet"), "--quiet"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
    difference = float(lines["top-1"].split()[0]) - 76.6
    where = "on ImageNet's validation set (LeViT paper, Table 3)"
    reported = f"76.6 % {where}; measured here: {difference:+.2f} percentage points"
    assert lines["reported top-1"] == reported
