"""Studies that come with weft, and files that are none."""

from __future__ import annotations

import pytest
import torch

from tests.study.trainer import BUILT, build_once, study_file
from weft.cli import main
from weft.data import open_data
from weft.errors import UsageError
from weft.study import load_study, run, study_names
from weft.study.experiment import Experiment
from weft.study.plan import ResolvedVariant
from weft.study.run import planned_runs

SHIPPED = dict(
    **{"ceit-convergence": 12, "ceit-i2t": 6, "ceit-lca": 2, "ceit-leff": 6, "cvt-embedding": 4, "cvt-kv-stride": 2},
    **{"cvt-position": 6, "cvt-projection": 4, "data-efficiency": 25, "distillation": 4, "finetune-384": 8},
    **{"levit-ablation": 9, "levit-grafting": 5, "resolution": 12, "transfer": 34},
)
GOOD = """
title: t
claim: c
source: s
scales: {small: {recipe: small_images, data: digits, set: {model: levit_nano_32}}}
variants:
- {name: with, paper: 71.9}
- {name: without, paper: 70.4, set: {model_args.attn_bias: false}}
"""


@pytest.fixture(autouse=True)
def _built_once(monkeypatch):
    build_once(monkeypatch)


@pytest.mark.slow_except("cvt-projection")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_study_that_comes_with_weft(name):
    """It builds (in load_study), at both scales; every line is a training run or a comparison of its own."""
    assert study_names() == sorted(SHIPPED)
    study = load_study(name)
    assert len(study.variants) == SHIPPED[name]
    assert set(study.scales) == {"small", "paper"}
    assert study.title
    assert study.source
    for scale in study.scales:
        rows = study.at_scale(scale)
        lines = [(variant.recipe, variant.data, variant.test_ratio, variant.against) for variant in rows]
        assert len({repr(line) for line in lines}) == len(lines)
    # the small scale is for 32x32 images: none larger than twice that
    assert all((variant.recipe.img_size or 32) in (32, 56, 64) for variant in study.at_scale("small"))


def test_the_papers_scale_is_the_papers_training():
    study = load_study("levit-ablation")
    base = study.at_scale("paper")[0].recipe
    settings = (base.model, base.epochs, base.batch_size, base.distill.teacher)
    assert settings == ("levit_128s", 100, 2048, "regnety_160.deit_in1k")
    papers = [variant.paper for variant in study.at_scale("paper")]
    assert papers == [71.9, 56.5, 65.3, 66.6, 69.7, 70.4, 70.9, 71.1]


def test_what_a_variant_sets_wins_over_the_caller_and_he_over_the_scale():
    rows = planned_runs(load_study("ceit-convergence"), settings={"epochs": 2, "batch_size": 32}, seeds=5)
    assert [row["epochs"] for row in rows] == [24, 8, 8, 8]
    assert all("batch_size=32" in row["set"] and row["runs"] == 5 for row in rows)
    assert [row["epochs"] for row in planned_runs(load_study("ceit-lca"), settings={"epochs": 2})] == [2, 2]


def test_a_chosen_variant_brings_what_it_is_compared_with():
    rows = planned_runs(load_study("ceit-leff"), only=["5x5 with BatchNorm"])
    assert [row["variant"] for row in rows] == ["plain feed-forward", "5x5 with BatchNorm"]


def test_the_seeds_are_those_of_the_scale_and_a_study_draws_no_random_number(tmp_path):
    (tmp_path / "own.yaml").write_text("model: ceit_nano_32\nseed: 7\n")
    text = GOOD.replace("{name: with,", f"{{name: with, recipe: {{small: {tmp_path / 'own.yaml'}}},")
    BUILT.clear()
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    study = load_study(study_file(tmp_path, text))
    assert torch.equal(torch.rand(1), wanted)
    variants = study.at_scale("small")
    experiment = Experiment(variants, study.scales["small"].common, tmp_path, {})
    assert [variant.recipe.seed for variant in variants] == [7, 0]
    assert (experiment.first_seed, experiment.split_seed) == (0, 0)


def test_a_dataset_is_opened_in_each_way_that_a_variant_reads_it(monkeypatch):
    seen = []

    def opened(place, plan, *, progress, **settings):
        seen.append((place, settings["max_bad"]))
        return open_data("digits", plan)

    monkeypatch.setattr(run, "open_data", opened)
    variants = [
        ResolvedVariant(str(number), None, place, {"data.max_bad": most})
        for number, (place, most) in enumerate([("digits", 0.1), ("digits", 0.2), ("digits", 0.1), ("other", 0.1)])
    ]
    assert run._num_classes(variants) == 10
    assert seen == [("digits", 0.1), ("digits", 0.2), ("other", 0.1)]


def test_a_variant_of_one_scale():
    study = load_study("ceit-convergence")
    assert [row["variant"] for row in planned_runs(study)] == [variant.name for variant in study.variants[:4]]
    large = {row["variant"]: row for row in planned_runs(study, "paper")}
    assert len(large) == 12
    base = large["CeiT-B"]
    assert (base["paper"], base["model"], base["epochs"]) == (81.8, "ceit_base_patch16_224", 100)


def test_sizes_to_test_at_are_multiples_of_eight():
    study = load_study("resolution")
    sizes = {scale: [variant.test_size for variant in study.at_scale(scale)[:4]] for scale in study.scales}
    assert sizes == {"small": [24, None, 40, 48], "paper": [168, None, 280, 336]}


def test_a_study_of_ones_own(tmp_path):
    study = load_study(study_file(tmp_path, GOOD))
    assert study.name == "mine"
    assert [variant.against for variant in study.at_scale("small")] == [None, "with"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("71.9", "71.9, scale: large"), "Unknown scale of 'with' 'large'"),
        (("71.9", "71.9, scale: small"), "'without' is compared with 'with', which is not at every scale"),
        (("attn_bias", "atn_bias"), r"Study mine, variant 'without' \(small\): .*atn_bias.*attn_bias"),
        (("model_args.attn_bias: false", "optim.lrr: 1"), r"variant 'without' \(small\): Unknown setting 'optim.lrr'"),
        (
            ("set: {model_args", "sett: {model_args"),
            r"line 8: Unknown setting 'variants\.2\.sett'\. Nearest: variants\.2\.set, ",
        ),
        (("small:", "tiny:"), r"scales must be some of small, paper; got tiny\."),
        (("name: without", "name: With"), r"every variant needs a name of its own; got 'with', 'With'\."),
        (("name: without", "name: ''"), r"every variant needs a name of its own; got 'with', ''\."),
        (
            ("model_args.attn_bias: false", "start_from: run:nobody"),
            r"variant in start_from of 'without' \(small\) 'nobody'",
        ),
        (
            ("model_args.attn_bias: false", "start_from: run:without"),
            r"own model; 'without' needs 'without' \(small\)\.",
        ),
        (("paper: 70.4", "recipe: {large: digits}"), r"Unknown scale in 'recipe' of 'without' 'large'"),
        (("paper: 70.4", "recipe: {small: digit}"), r"variant 'without' \(small\): .*'digit'"),
        (("paper: 70.4", "against: nobody"), r"Unknown variant in 'against' of 'without' 'nobody'"),
        (("recipe: small_images, ", ""), r"line 5: scales\.small must have recipe; it is missing\."),
        (("title: t", "name: t\ntitle: t"), r"line 2: a study has the name of its file; got the key 'name'\."),
        (
            ("set: {model: levit_nano_32}", "set: 5"),
            r"line 5: scales\.small\.set must hold `key: value` lines; got '5'",
        ),
        (("{model: levit_nano_32}", "{model: levit_nano}"), r"variant 'with' \(small\): Unknown model 'levit_nano'"),
        (("set: {model: levit_nano_32}", "seeds: 2"), r"variant 'without' \(small\): .*attn_bias"),
        (("- {name: with, paper: 71.9}\n", ""), r"variants must be a list of at least two"),
        (("title: t", "title: !!python/name:os.system t"), r"a study holds plain values only"),
    ],
)
def test_what_is_no_study_says_so(change, message, tmp_path):
    assert change[0] in GOOD
    with pytest.raises(UsageError, match=message):
        load_study(study_file(tmp_path, GOOD.replace(*change, 1)))


def test_names_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"scale must be one of small for mine; got 'paper'\."):
        planned_runs(load_study(study_file(tmp_path, GOOD)), "paper")
    for seeds in (0, 1001):
        must = rf"seeds must be a whole number at least 1 and at most 1000; got {seeds}\."
        with pytest.raises(UsageError, match=must):
            planned_runs(load_study("ceit-leff"), seeds=seeds)


FROZEN = {"optim.freeze": "backbone"}


def test_rules_between_settings_hold_for_the_recipe_of_a_variant(tmp_path):
    """Not for the settings alone: the base recipe, or the run of another variant, has the trained weights."""
    study = load_study(study_file(tmp_path, GOOD))
    with pytest.raises(UsageError, match=r"variant 'with' \(small\): optim\.freeze: backbone needs trained weights"):
        planned_runs(study, settings=FROZEN)
    with_weights = GOOD.replace("recipe: small_images", "recipe: finetune")
    assert len(planned_runs(load_study(study_file(tmp_path, with_weights)), settings=FROZEN)) == 2
    second = "{name: without, paper: 70.4, set: {start_from: run:with, optim.freeze: backbone}}"
    after = GOOD.replace("{name: without, paper: 70.4, set: {model_args.attn_bias: false}}", second)
    assert "start_from" in after
    assert len(planned_runs(load_study(study_file(tmp_path, after)))) == 2
    with pytest.raises(UsageError, match=r"variant 'without' \(small\): optim\.freeze: backbone needs trained weights"):
        load_study(study_file(tmp_path, after.replace("start_from: run:with, ", "")))


def test_the_command_line_lists_studies_and_plans_one(tmp_path, capsys):
    path = study_file(tmp_path, GOOD.replace("recipe: small_images", "recipe: finetune"))
    assert main(["study", str(path), "--plan", "--set", "optim.freeze=backbone"]) == 0
    assert "model_args.attn_bias=False" in capsys.readouterr().out
    assert main(["study"]) == 0
    assert "ceit-convergence" in capsys.readouterr().out
