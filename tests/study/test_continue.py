"""A study continues in its directory: finished runs stay, runs wait for those whose models they need."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tests.study.trainer import study_file
from weft.cli import main
from weft.errors import UsageError
from weft.runs.directory import locked
from weft.study import compare, load_study, protocol, run_study
from weft.study import run as running
from weft.study.engine import Engine

HEAD = """
title: t
claim: c
source: s
scales:
  small: {recipe: digits, data: digits, seeds: 2, set: {model: levit_nano_32, epochs: 2}}
variants:
"""
STUDY = f"""{HEAD}
- {{name: with, paper: 71.9}}
- {{name: without, paper: 70.4, set: {{model_args.attn_bias: false, model_args.pos_embed: true}}}}
- {{name: larger, test_ratio: 1.5, against: with}}
"""
CHAIN = f"""{HEAD.replace("seeds: 2", "seeds: 1")}
- {{name: third, against: second, data: digits, set: {{start_from: run:second}}}}
- {{name: first, data: others, against: first}}
- {{name: second, against: first, data: digits, set: {{start_from: run:first}}}}
"""
DISTILLED = f"""{HEAD.replace("epochs: 2", "epochs: 2, distill.teacher: run:teacher")}
- {{name: without, set: {{distill.teacher: null}}}}
- {{name: with}}
- {{name: teacher, against: teacher, seeds: 1, set: {{distill.teacher: null, model: ceit_nano_32}}}}
"""


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_study_continues_in_its_directory(tmp_path, trainer):
    """Finished runs are kept, also after the directory was moved; rows and curves of the report are the same."""
    file = study_file(tmp_path, STUDY)
    done = run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.taken() == ["with-seed0", "without-seed0", "with-seed1", "without-seed1"]
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()
    (tmp_path / "out").rename(tmp_path / "there")
    again = run_study(file, out=tmp_path / "there", quiet=True)
    assert trainer.taken() == []
    assert (again.rows, again.seconds) == (done.rows, done.seconds)

    more = run_study(file, out=tmp_path / "there", seeds=3, only=["with"], quiet=True)
    assert trainer.taken() == ["with-seed2"]
    assert [len(row.top1) for row in more.rows] == [3, 2, 3]  # larger shares the runs of with
    assert more.rows[1].effect == done.rows[1].effect  # paired by the seeds that both have


def test_the_table_is_output_only(tmp_path, trainer):
    file, out = study_file(tmp_path, STUDY), tmp_path / "out"
    run_study(file, out=out, quiet=True)
    before = (out / "runs.csv").read_text()
    assert [(row["variant"], row["seed"], row["img_size"]) for row in table(out)] == [
        *(("with", seed, "") for seed in "01"),
        *(("without", seed, "") for seed in "01"),
        *(("larger", seed, "48") for seed in "01"),  # one job, evaluated at two sizes
    ]
    trainer.taken()
    (out / "runs.csv").write_text("damaged")
    run_study(file, out=out, quiet=True)
    assert (trainer.taken(), (out / "runs.csv").read_text()) == ([], before)


def test_an_interrupted_study_keeps_its_finished_runs(tmp_path, trainer, monkeypatch):
    file, out = study_file(tmp_path, STUDY), tmp_path / "out"

    def stop(text: str) -> None:
        if text.startswith("without-seed0"):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.study.experiment.say", stop)
        with pytest.raises(KeyboardInterrupt, match=r"Repeat the command to resume; finished runs are kept in .*out"):
            run_study(file, out=out, quiet=True)
    assert [(row["variant"], row["seed"]) for row in table(out)][:2] == [("with", "0"), ("without", "0")]
    ran = trainer.taken()
    run_study(file, out=out, quiet=True)
    assert sorted([*ran, *trainer.taken()]) == ["with-seed0", "with-seed1", "without-seed0", "without-seed1"]


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (("pos_embed: true", "pos_embed: false"), ["without-seed0"]),
        (("model: levit_nano_32", "model: levit_nano_32, optim.lr: 1"), ["with-seed0", "without-seed0"]),
    ],
)
def test_a_run_with_other_settings_is_not_used(change, again, tmp_path, trainer):
    file = study_file(tmp_path, STUDY)
    run_study(file, out=tmp_path / "out", seeds=1, quiet=True)
    trainer.taken()
    study_file(tmp_path, STUDY.replace(*change))
    run_study(file, out=tmp_path / "out", seeds=1, quiet=True)
    assert trainer.taken() == again


def test_other_settings_are_named(tmp_path, trainer):
    file = study_file(tmp_path, STUDY)
    run_study(file, out=tmp_path / "out", settings={"optim.lr": 0.5}, quiet=True)
    message = r"out has results of optim\.lr=0\.5, epochs=None; got optim\.lr=1, epochs=3\. Pass the same to continue"
    with pytest.raises(UsageError, match=message):
        run_study(file, out=tmp_path / "out", settings={"optim.lr": 1, "epochs": 3}, quiet=True)
    run_study(file, out=tmp_path / "out", force=True, quiet=True)
    assert trainer.jobs["with-seed0"].settings.get("optim.lr") is None


def test_a_directory_in_use_is_refused(tmp_path, trainer):
    file = study_file(tmp_path, STUDY)
    run_study(file, out=tmp_path / "out", quiet=True)
    with locked(tmp_path / "out"), pytest.raises(UsageError, match=r"out is in use by process \d+"):
        run_study(file, out=tmp_path / "out", quiet=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="must be new or empty"):
        run_study(file, out=tmp_path / "other", quiet=True)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.txt"]


def test_a_failed_run_is_repeated(tmp_path, trainer):
    file = study_file(tmp_path, STUDY)
    trainer.failing = {"without-seed0"}
    done = run_study(file, out=tmp_path / "out", quiet=True)
    assert done.rows[1].errors == ((0, "no memory."),)
    assert table(tmp_path / "out")[2]["error"] == "no memory."
    trainer.taken()
    trainer.failing.clear()
    again = run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.taken() == ["without-seed0"]
    assert again.rows[1].errors == ()


def test_a_study_without_a_finished_run_is_an_error(tmp_path, trainer, capsys):
    trainer.failing = {"with-seed0", "without-seed0"}
    command = ["study", str(study_file(tmp_path, STUDY)), "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(command) == UsageError.exit_code
    out, err = capsys.readouterr()
    assert "failed: with, seed 0: no memory" in out
    assert "with-seed0: failed: no memory. 1 of 2 runs finished." in err
    assert "None of the runs of study mine finished." in err
    trainer.failing = {"with-seed0"}
    assert main(command) == 0


def test_what_no_run_could_train_with_is_refused_before_the_first_run(tmp_path):
    options = dict(settings={"sync_bn": True, "device": "cpu"}, out=tmp_path / "out", quiet=True)
    with pytest.raises(UsageError, match="sync_bn needs GPUs; got sync_bn true on device cpu"):
        run_study(study_file(tmp_path, STUDY), **options)
    with pytest.raises(UsageError, match="sync_bn needs GPUs; got sync_bn true on device cpu"):
        compare("digits", models=["levit_nano_32", "ceit_nano_32"], **options)
    assert not (tmp_path / "out").exists()


def test_a_teacher_is_trained_first_and_once(tmp_path, trainer):
    file = study_file(tmp_path, DISTILLED)
    done = run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.taken() == ["without-seed0", "teacher-seed0", "without-seed1", "with-seed0", "with-seed1"]
    teachers = {name: job.settings["distill.teacher"] for name, job in trainer.jobs.items()}
    assert teachers == {
        **dict.fromkeys(("without-seed0", "without-seed1", "teacher-seed0"), None),
        **dict.fromkeys(("with-seed0", "with-seed1"), "run:teacher-seed0"),
    }
    assert [len(row.top1) for row in done.rows] == [2, 2, 1]
    assert done.rows[2].effect is None
    run_study(file, out=tmp_path / "more", seeds=1, only=["with"], quiet=True)
    assert trainer.taken() == ["without-seed0", "teacher-seed0", "with-seed0"]


def test_a_failed_run_fails_those_that_need_its_model_and_no_others(tmp_path, trainer):
    trainer.failing = {"teacher-seed0", "first-seed0"}
    done = run_study(study_file(tmp_path, DISTILLED), out=tmp_path / "out", quiet=True)
    reason = "it needs the model of {}-seed0, whose run failed".format
    teacher = reason("teacher")
    assert [row.errors for row in done.rows] == [(), ((0, teacher), (1, teacher)), ((0, "no memory."),)]
    done = run_study(study_file(tmp_path, CHAIN), {"others": "digits"}, out=tmp_path / "chain", quiet=True)
    assert [row.errors for row in done.rows] == [
        ((0, reason(needed)),) if needed else ((0, "no memory."),) for needed in ("second", "", "first")
    ]


def test_a_run_waits_for_the_one_whose_model_it_needs(tmp_path, trainer):
    file, places, out = study_file(tmp_path, CHAIN), {"others": "digits"}, tmp_path / "out"
    done = run_study(file, places, out=out, only=["third"], jobs=3, quiet=True)
    assert trainer.taken() == ["first-seed0", "second-seed0", "third-seed0"]
    assert [row.name for row in done.rows] == ["third", "first", "second"]
    starts = {name: job.settings.get("start_from") for name, job in trainer.jobs.items()}
    assert starts == {"first-seed0": None, "second-seed0": "run:first-seed0", "third-seed0": "run:second-seed0"}

    # a model that is lost is trained again only where an unfinished run needs it
    shutil.rmtree(out / "runs" / "first-seed0" / "run")
    shutil.rmtree(out / "runs" / "second-seed0" / "run")
    run_study(file, places, out=out, quiet=True)
    assert trainer.taken() == []
    (out / "runs" / "third-seed0" / "result.json").unlink()
    run_study(file, places, out=out, quiet=True)
    assert trainer.taken() == ["first-seed0", "second-seed0", "third-seed0"]

    # other settings of a run are other initial weights of those that start from it
    study_file(tmp_path, CHAIN.replace("data: others,", "data: others, set: {optim.lr: 1},"))
    run_study(file, places, out=out, quiet=True)
    assert trainer.taken() == ["first-seed0", "second-seed0", "third-seed0"]


def test_only_keeps_the_finished_variants_of_other_datasets(tmp_path, trainer):
    file, places = study_file(tmp_path, CHAIN), {"others": "digits"}
    run_study(file, places, out=tmp_path / "out", quiet=True)
    again = run_study(file, places, out=tmp_path / "out", seeds=2, only=["first"], quiet=True)
    assert [len(row.top1) for row in again.rows] == [1, 2, 1]


def test_a_study_of_two_datasets_needs_their_names(tmp_path, trainer, capsys):
    file = study_file(tmp_path, CHAIN)
    with pytest.raises(UsageError, match=r"several datasets, so DATA must name them: digits=FOLDER others=FOLDER"):
        run_study(file, "digits", out=tmp_path / "out", quiet=True)
    with pytest.raises(UsageError, match=r"Unknown dataset of mine 'other'\. Nearest: others"):
        run_study(file, {"other": "digits"}, out=tmp_path / "out", quiet=True)
    assert main(["study", str(file), "others=digits", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert trainer.taken() == ["first-seed0", "second-seed0", "third-seed0"]


def test_the_rows_of_deit_have_the_recipe_of_deit():
    study = load_study("cvt-position")
    assert [variant.base for variant in study.at_scale("paper")] == ["cvt_13_pretrain"] * 4 + ["deit_pretrain"] * 2
    assert {variant.base for variant in study.at_scale("small")} == {"small_images"}


def test_emulated_bf16_is_noted_once(tmp_path, trainer, monkeypatch, capsys):
    note = {"bf16": "bf16 is slow."}
    monkeypatch.setattr(running, "bf16_note", lambda device, precision: note.get(precision))
    for precision, count in (("bf16", 1), ("fp32", 0)):
        settings = {"precision": precision}
        run_study(study_file(tmp_path, STUDY), out=tmp_path / precision, settings=settings)
        assert capsys.readouterr().err.count("bf16 is slow.") == count


def test_seeds_begin_with_the_given_one_and_share_the_split(tmp_path, trainer):
    text = DISTILLED.replace("set: {model: levit_nano_32,", "set: {seed: 3, model: levit_nano_32,")
    run_study(study_file(tmp_path, text), settings={"seed": 5}, out=tmp_path / "out", quiet=True)
    jobs = {name: (job.settings["seed"], job.settings["data.seed"]) for name, job in trainer.jobs.items()}
    assert jobs == {
        "teacher-seed5": (5, 5),
        **{f"{variant}-seed{seed}": (seed, 5) for variant in ("with", "without") for seed in (5, 6)},
    }
    assert {row["seed"] for row in table(tmp_path / "out")} == {"5", "6"}


def test_a_variant_has_no_seed_of_its_own(tmp_path, trainer):
    text = STUDY.replace("paper: 71.9}", "paper: 71.9, set: {seed: 4}}")
    with pytest.raises(UsageError, match=r"'with' \(small\): The variants of a study share their seeds .* got seed=4"):
        run_study(study_file(tmp_path, text), out=tmp_path / "out", quiet=True)


def test_variants_have_one_precision(tmp_path, trainer, monkeypatch):
    """Decided once, and kept in experiment.json; a variant may name its own."""
    measured = []

    def find_precision(recipe, num_classes, runtime):
        measured.append(recipe)
        is_first = len(measured) == 1
        return dataclasses.replace(runtime, precision="bf16" if is_first else "fp32"), ""

    monkeypatch.setattr(protocol, "find_precision", find_precision)
    text = STUDY.replace("recipe: digits", "recipe: small_images").replace("seeds: 2", "seeds: 1")
    file = study_file(tmp_path, text + "- {name: named, set: {precision: bf16}}\n")
    run_study(file, out=tmp_path / "out", quiet=True)
    precisions = {name: job.settings["precision"] for name, job in trainer.jobs.items()}
    assert precisions == {"with-seed0": "fp32", "without-seed0": "fp32", "named-seed0": "bf16"}
    assert json.loads((tmp_path / "out" / "experiment.json").read_text())["decisions"] == {
        "groups of digits": "",
        "shared": {"precision": "fp32"},
    }
    count = len(measured)
    run_study(file, seeds=2, out=tmp_path / "out", quiet=True)
    assert trainer.jobs["with-seed1"].settings["precision"] == "fp32"
    assert len(measured) == count


def test_an_unknown_engine_is_refused():
    with pytest.raises(UsageError, match=r"engine must be one of local, ray; got 'spark'\."):
        Engine("spark")
