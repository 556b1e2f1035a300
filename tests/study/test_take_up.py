"""A study continues from its table of runs; runs that start from others wait for them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from weft.cli import main
from weft.errors import UsageError
from weft.study import compare, load_study, protocol, run_study
from weft.study import run as running
from weft.study.run_table import read_runs
from weft.study.runner import Job, Measured, Result

STUDY = """
title: t
claim: c
source: s
scales:
  small: {recipe: digits, data: digits, seeds: 2, set: {model: levit_nano_32, epochs: 2}}
variants:
- {name: with, paper: 71.9}
- {name: without, paper: 70.4, set: {model_args.attn_bias: false, model_args.pos_embed: true}}
- {name: larger, test_ratio: 1.5, against: with}
"""

CHAIN = """
title: t
claim: c
source: s
scales:
  small: {recipe: digits, data: digits, seeds: 1, set: {model: levit_nano_32, epochs: 2}}
variants:
- {name: first, data: others}
- {name: second, start_from: first, data: digits}
- {name: third, start_from: second, against: second, data: digits}
"""


class Trainer:
    """Stands in for training: a result by folder name, and a directory of the best model."""

    def __init__(self) -> None:
        self.waves: list[list[str]] = []
        self.jobs: dict[str, Job] = {}
        self.failing: set[str] = set()
        self.fewest: int | None = None  # stop after this number of jobs

    def __call__(
        self, jobs: Sequence[Job], *, on_done: Callable[[Job, Result], None], **more: object
    ) -> dict[Path, Result]:
        self.waves.append([job.folder.name for job in jobs])
        results = {}
        for count, job in enumerate(jobs):
            if count == self.fewest:
                raise KeyboardInterrupt
            name = job.folder.name
            self.jobs[name] = job
            if name in self.failing:
                result = Result(error="no memory.")
            else:
                top1 = 50 + sum(map(ord, name)) % 40 + 1 / 3
                measured = {size: Measured(top1 + (size or 0) / 16, np.ones(3, bool)) for size in job.test_sizes}
                result = Result(None, measured, ((1, 12.5), (2, top1)), 1000, 2000, seconds=60.0)
                (job.folder / "run" / "best").mkdir(parents=True, exist_ok=True)
            results[job.folder] = result
            on_done(job, result)
        return results

    @property
    def ran(self) -> list[str]:
        """Names of the jobs that were run since the last call."""
        names = [name for wave in self.waves for name in wave]
        self.waves.clear()
        return names


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stand_in = Trainer()
    monkeypatch.setattr(running, "run_jobs", stand_in)
    return stand_in


def study_file(folder: Path, text: str = STUDY) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def finished(folder: Path) -> tuple[Path, Path]:
    """A study whose runs are all in the returned table."""
    file = study_file(folder)
    run_study(file, out=folder / "out", quiet=True)
    return file, folder / "out" / "runs.csv"


def test_a_study_continues_from_its_table_alone(tmp_path, trainer):
    """Only study.json and runs.csv are taken to another machine; rows and curves of the report are the same."""
    file = study_file(tmp_path)
    done = run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.ran == ["with-seed0", "without-seed0", "with-seed1", "without-seed1"]
    there = tmp_path / "there"
    there.mkdir()
    for name in ("study.json", "runs.csv"):
        shutil.copy(tmp_path / "out" / name, there)
        assert str(tmp_path) not in (there / name).read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text()
    again = run_study(file, out=there, quiet=True)
    assert trainer.ran == []
    assert (again.rows, again.curves, again.seconds) == (done.rows, done.curves, done.seconds)
    assert (there / "runs.csv").read_text() == (tmp_path / "out" / "runs.csv").read_text()

    more = run_study(file, out=there, seeds=3, only=["with"], quiet=True)
    assert trainer.ran == ["with-seed2"]
    assert [len(row.top1) for row in more.rows] == [3, 2, 2]
    assert more.rows[1].effect == done.rows[1].effect  # paired by the seeds that both have


def test_the_table_is_written_after_every_run(tmp_path, trainer):
    file = study_file(tmp_path)
    trainer.fewest = 1
    with pytest.raises(KeyboardInterrupt):
        run_study(file, out=tmp_path / "out", quiet=True)
    runs = {(run.variant, run.seed): run for run in read_runs(tmp_path / "out" / "runs.csv")}
    assert set(runs) == {("with", 0), ("larger", 0)}  # one job, evaluated at two sizes
    assert runs["larger", 0].img_size == 48
    shutil.rmtree(tmp_path / "out" / "runs")
    trainer.fewest = None
    trainer.waves.clear()
    run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.ran == ["without-seed0", "with-seed1", "without-seed1"]


@pytest.mark.parametrize(
    "change",
    [
        ("pos_embed: true", "pos_embed: false"),
        ("model: levit_nano_32", "model: levit_nano_32, optim.lr: 1"),
        ("digits, seeds", "digit, seeds"),
    ],
)
def test_a_run_with_other_settings_is_not_taken_up(change, tmp_path, trainer, monkeypatch):
    """Its line stays in the file, and no result uses it."""
    file = study_file(tmp_path)
    run_study(file, out=tmp_path / "out", quiet=True)
    before = read_runs(tmp_path / "out" / "runs.csv")
    trainer.waves.clear()
    shutil.rmtree(tmp_path / "out" / "runs")
    if change[0].startswith("digits"):  # other images under the same name
        monkeypatch.setattr(
            running, "open_data", lambda *_, **__: dataclasses.make_dataclass("D", ["classes"])(["a", "b"])
        )
    else:
        study_file(tmp_path, STUDY.replace(*change))
    run_study(file, out=tmp_path / "out", quiet=True, seeds=1)
    expected = ["without-seed0"] if change[0].startswith("pos") else ["with-seed0", "without-seed0"]
    assert trainer.ran == expected
    after = read_runs(tmp_path / "out" / "runs.csv")
    assert len(after) == len(before) + len([run for run in after if run not in before])

    # both settings have their lines now, and neither is run again
    trainer.waves.clear()
    run_study(file, out=tmp_path / "out", quiet=True, seeds=1)
    assert trainer.ran == []
    study_file(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(running, "run_jobs", trainer)
    run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.ran == []


def test_settings_of_a_command_line_are_those_of_python(tmp_path, trainer):
    file = study_file(tmp_path)
    run_study(file, out=tmp_path / "a", settings={"optim.lr": 0.5}, quiet=True)
    run_study(file, out=tmp_path / "b", settings={"optim.lr": "5e-1"}, quiet=True)
    assert (tmp_path / "a" / "runs.csv").read_text() == (tmp_path / "b" / "runs.csv").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {},
            r"out has results of scale=small, optim\.lr=0\.5; got scale=paper, no optim\.lr\. To continue them, pass"
            r" --scale small --set optim\.lr=0\.5; else choose another --out\. --force replaces the results\.",
        ),
        (
            {"scale": "small", "settings": {"optim.lr": 0.5, "epochs": 3}},
            r"no epochs; got epochs=3\. .* them, leave out epochs; else",
        ),
    ],
)
def test_other_settings_are_named_with_the_options_that_continue(given, message, tmp_path, trainer):
    file = study_file(
        tmp_path,
        STUDY.replace("variants:", "  paper: {recipe: digits, data: digits, set: {model: levit_nano_32}}\nvariants:"),
    )
    run_study(file, out=tmp_path / "out", settings={"optim.lr": 0.5}, quiet=True)
    with pytest.raises(UsageError, match=message):
        run_study(file, out=tmp_path / "out", quiet=True, **{"scale": "paper", **given})


def test_a_failed_run_is_repeated(tmp_path, trainer):
    file = study_file(tmp_path)
    trainer.failing = {"without-seed0"}
    done = run_study(file, out=tmp_path / "out", quiet=True)
    assert done.rows[1].errors == ((0, "no memory."),)
    trainer.waves.clear()
    trainer.failing.clear()
    shutil.rmtree(tmp_path / "out" / "runs")
    again = run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.ran == ["without-seed0"]
    assert again.rows[1].errors == ()


def test_a_study_without_a_finished_run_is_an_error(tmp_path, trainer, capsys):
    trainer.failing = {"with-seed0", "without-seed0"}
    command = ["study", str(study_file(tmp_path)), "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(command) == UsageError.exit_code
    out, err = capsys.readouterr()
    assert "failed: with, seed 0: no memory" in out
    assert "with-seed0: failed: no memory. 1 of 2 runs finished." in err
    assert "None of the runs of study mine finished." in err
    trainer.failing = {"with-seed0"}
    assert main(command) == 0


@pytest.mark.parametrize("verb", ["study", "compare"])
def test_what_no_run_could_train_with_is_refused_before_the_first_run(verb, tmp_path):
    start, options = run_study, {}
    if verb == "compare":
        start, options = compare, {"models": ["levit_nano_32", "ceit_nano_32"]}
    source = study_file(tmp_path) if verb == "study" else "digits"
    settings = {"sync_bn": True, "device": "cpu"}
    with pytest.raises(UsageError, match="sync_bn needs GPUs; got sync_bn true on device cpu"):
        start(source, settings=settings, out=tmp_path / "out", quiet=True, **options)
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_fails_is_named(tmp_path, trainer):
    trainer.failing = {"teacher"}
    text = STUDY.replace("epochs: 2}}", "epochs: 2}, teacher: {epochs: 1}}")
    with pytest.raises(UsageError, match=r"The teacher of study mine could not be trained: no memory\.$"):
        run_study(study_file(tmp_path, text), out=tmp_path / "out", quiet=True)


def test_the_accuracy_of_the_teacher_is_kept(tmp_path, trainer):
    file = study_file(tmp_path, STUDY.replace("epochs: 2}}", "epochs: 2}, teacher: {epochs: 1}}"))
    done = run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.waves[0] == ["teacher"]
    assert done.teacher == round(50 + sum(map(ord, "teacher")) % 40 + 1 / 3, 6)
    shutil.rmtree(tmp_path / "out" / "runs")
    again = run_study(file, out=tmp_path / "out", quiet=True)
    assert again.as_dict()["teacher"] == done.teacher
    assert f"teacher: top-1 {done.teacher:.2f} %" in (tmp_path / "out" / "report.md").read_text()


def test_one_pair_from_the_table_has_no_interval(tmp_path, trainer):
    file = study_file(tmp_path)
    run_study(file, out=tmp_path / "out", seeds=1, quiet=True)
    shutil.rmtree(tmp_path / "out" / "runs")
    again = run_study(file, out=tmp_path / "out", seeds=1, quiet=True)
    effect = again.rows[1].effect
    assert (effect.low, effect.high) == (-np.inf, np.inf)
    assert effect.value == again.rows[1].top1[0] - again.rows[0].top1[0]


def test_a_damaged_table_is_named(tmp_path, trainer):
    file = study_file(tmp_path)
    run_study(file, out=tmp_path / "out", quiet=True)
    for text in ("variant,seed\nwith,zero\n", "\x00\xff", "a,b\n1,2\n"):
        (tmp_path / "out" / "runs.csv").write_text(text)
        with pytest.raises(UsageError, match=r"runs\.csv must be a table of runs with the columns variant, seed"):
            run_study(file, out=tmp_path / "out", quiet=True)


@pytest.mark.parametrize("top1", ["nan", "inf", "-5", "389.8"])
def test_an_accuracy_is_a_percentage(top1, tmp_path, trainer):
    file, table = finished(tmp_path)
    text = table.read_text()
    first = text.splitlines()[1].split(",")[3]
    for old, new in ((f",{first},", f",{top1},"), (" 2:", f" 2:{top1} 3:")):
        table.write_text(text.replace(old, new, 1))
        with pytest.raises(UsageError, match=rf"runs\.csv, line \d: accuracies must be percentages.*got {top1}\. Cor"):
            run_study(file, out=tmp_path / "out", quiet=True)


def test_a_run_has_one_line(tmp_path, trainer):
    file, table = finished(tmp_path)
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(UsageError, match=r"runs\.csv, line 8: a run must have one line; variant 'with' with seed 0 is"):
        run_study(file, out=tmp_path / "out", quiet=True)


def test_a_large_seed_in_the_table_costs_no_time(tmp_path, trainer):
    file, table = finished(tmp_path)
    table.write_text(table.read_text().replace("with,1,", f"with,{10**12},", 1))
    trainer.waves.clear()
    shutil.rmtree(tmp_path / "out" / "runs")
    run_study(file, out=tmp_path / "out", quiet=True)
    assert trainer.ran == ["with-seed1"]


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path, trainer):
    file = study_file(tmp_path, CHAIN)
    places = {"others": "digits"}
    done = run_study(file, places, out=tmp_path / "out", only=["third"], quiet=True)
    assert trainer.waves == [["first-seed0"], ["second-seed0"], ["third-seed0"]]
    assert [row.variant for row in done.rows] == ["first", "second", "third"]
    starts = {name: job.settings.get("start_from") for name, job in trainer.jobs.items()}
    runs = tmp_path / "out" / "runs"
    assert starts == {
        "first-seed0": None,
        "second-seed0": str(runs / "first-seed0" / "run" / "best"),
        "third-seed0": str(runs / "second-seed0" / "run" / "best"),
    }

    # a model that is lost is trained again only where an unfinished run needs it
    trainer.waves.clear()
    shutil.rmtree(runs)
    run_study(file, places, out=tmp_path / "out", quiet=True)
    assert trainer.waves == []
    table = tmp_path / "out" / "runs.csv"
    table.write_text("\n".join(line for line in table.read_text().splitlines() if not line.startswith("third")) + "\n")
    run_study(file, places, out=tmp_path / "out", quiet=True)
    assert trainer.waves == [["first-seed0"], ["second-seed0"], ["third-seed0"]]


def test_only_keeps_the_finished_variants_of_other_datasets(tmp_path, trainer):
    file = study_file(tmp_path, CHAIN.replace("start_from: first, ", ""))
    places = {"others": "digits"}
    run_study(file, places, out=tmp_path / "out", quiet=True)
    again = run_study(file, places, out=tmp_path / "out", seeds=2, only=["first"], quiet=True)
    assert [len(row.top1) for row in again.rows] == [2, 1, 1]


def test_a_run_whose_start_failed_fails_with_the_reason(tmp_path, trainer):
    trainer.failing = {"first-seed0"}
    done = run_study(study_file(tmp_path, CHAIN), {"others": "digits"}, out=tmp_path / "out", quiet=True)
    assert trainer.waves == [["first-seed0"], [], []]
    assert done.rows[1].errors == ((0, "it needs the model of first-seed0, whose run failed"),)
    assert done.rows[2].errors == ((0, "it needs the model of second-seed0, whose run failed"),)


def test_a_study_of_two_datasets_needs_their_names(tmp_path, trainer, capsys):
    file = study_file(tmp_path, CHAIN)
    with pytest.raises(UsageError, match=r"several datasets, so DATA must name them: others=FOLDER digits=FOLDER"):
        run_study(file, "digits", out=tmp_path / "out", quiet=True)
    with pytest.raises(UsageError, match=r"Unknown dataset of mine 'other'\. Nearest: others"):
        run_study(file, {"other": "digits"}, out=tmp_path / "out", quiet=True)
    assert main(["study", str(file), "others=digits", "digits", "--out", str(tmp_path / "out")]) == 2
    assert "Several DATA must be NAME=DATA" in capsys.readouterr().err
    assert main(["study", str(file), "others=digits", "others=digits"]) == 2
    assert "Every dataset must be given once; got others=digits others=digits." in capsys.readouterr().err
    assert main(["study", str(file), "x=digits", "--plan"]) == 2
    assert "Unknown dataset of mine 'x'" in capsys.readouterr().err
    assert main(["study", str(file), "others=digits", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert trainer.ran == ["first-seed0", "second-seed0", "third-seed0"]


def test_the_rows_of_deit_have_the_recipe_of_deit():
    study = load_study("cvt-position")
    recipes = [study.recipe(variant, "paper") for variant in study.variants]
    assert recipes == ["cvt_13_pretrain"] * 4 + ["deit_pretrain"] * 2
    assert {study.recipe(variant, "small") for variant in study.variants} == {"small_images"}


def test_emulated_bf16_is_noted_once(tmp_path, trainer, monkeypatch, capsys):
    monkeypatch.setattr(
        running, "bf16_note", lambda device, precision: "bf16 is slow." if precision == "bf16" else None
    )
    run_study(study_file(tmp_path), out=tmp_path / "out", settings={"precision": "bf16"})
    assert capsys.readouterr().err.count("bf16 is slow.") == 1
    run_study(study_file(tmp_path), out=tmp_path / "fp32", settings={"precision": "fp32"})
    assert "bf16 is slow." not in capsys.readouterr().err


def test_seeds_begin_with_the_given_one_and_share_the_split(tmp_path, trainer):
    text = STUDY.replace("set: {model: levit_nano_32,", "teacher: {epochs: 1}, set: {seed: 3, model: levit_nano_32,")
    run_study(study_file(tmp_path, text), settings={"seed": 5}, out=tmp_path / "out", quiet=True)
    jobs = {name: (job.settings["seed"], job.settings["data.seed"]) for name, job in trainer.jobs.items()}
    assert jobs == {
        "teacher": (5, 5),
        **{f"{variant}-seed{seed}": (seed, 5) for variant in ("with", "without") for seed in (5, 6)},
    }
    assert {run.seed for run in read_runs(tmp_path / "out" / "runs.csv")} == {5, 6}


def test_a_variant_has_no_seed_of_its_own(tmp_path, trainer):
    text = STUDY.replace("paper: 71.9}", "paper: 71.9, set: {seed: 4}}")
    with pytest.raises(UsageError, match=r"'with' \(small\): The variants of a study share their seeds .* got seed=4"):
        run_study(study_file(tmp_path, text), out=tmp_path / "out", quiet=True)


def test_variants_have_one_precision(tmp_path, trainer, monkeypatch):
    """Decided once, and kept in study.json; a variant may name its own."""
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
    count = len(measured)
    run_study(file, seeds=2, out=tmp_path / "out", quiet=True)
    assert trainer.jobs["with-seed1"].settings["precision"] == "fp32"
    assert len(measured) == count
