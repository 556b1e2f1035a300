"""A comparison: stages within a budget, what is shown and what is not, and the page."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import weft
from tests.helpers import noise_images, put_in_cache
from tests.study.trainer import Process, build_once, write_result
from weft.bench.speed import SpeedRow
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main
from weft.data import SplitPlan, open_data
from weft.errors import DataError, UsageError
from weft.inference import open_model
from weft.recipes import Recipe, load_recipe
from weft.report.intervals import Estimate
from weft.study import candidates, compare, engine, forms, halving, load_study, protocol, stages
from weft.study import comparison as comparing
from weft.study.advice import advise, pareto
from weft.study.candidates import candidates_of, find_weights, recipe_from_scratch, study_of, with_weights
from weft.study.engine import Engine
from weft.study.experiment import Experiment
from weft.study.forms import measure_forms
from weft.study.halving import EVALUATION, START_S, Budget, epochs_within, stages_of, training_seconds
from weft.study.jobs import Job, Result
from weft.study.plan import Study
from weft.study.report import frontier_figure
from weft.study.result import ExperimentResult, Form, Limits, Row
from weft.train import evaluate, timing
from weft.train.decisions import fill_in

pytestmark = pytest.mark.figures

SMALL, LARGE = candidates_of([], 32), candidates_of([], 224)  # the default candidates
SETTINGS = {"data.limit": 160, "batch_size": 16, "epochs": 2, "model_args.drop_path_rate": 0.0}
MODELS = ("levit_nano_32", "test_resnet")


def form(name: str, top1: float, speed: float, ms: float = 1.0, size: float = 4.0) -> Form:
    return Form(name, "openvino bf16", top1, ms, speed, size)


def entry(name: str, top1: float, speed: float, behind: float | None = None, **more) -> Row:
    effect = None if behind is None else Estimate(behind, behind - 0.5, behind + 0.5)
    forms = (form("float", top1, speed),)
    return Row(name, None, (top1,), Estimate(top1, top1 - 1, top1 + 1), effect, forms=forms, **more)


def result_of(rows: tuple[Row, ...], **more) -> ExperimentResult:
    study = study_of({name: {} for name in FIELD}, "digits", "digits", {}, dict.fromkeys(FIELD, ""))
    return ExperimentResult(Path(), study, "small", "digits", 1, rows, limits=Limits(), **more)


ENTRIES = (
    entry("a", 90.0, 100),
    entry("b", 89.8, 400, -0.2),
    entry("c", 80.0, 300, -10.0),
    entry("d", 70.0, 900, -20.0),
)


def test_the_frontier_is_of_those_that_none_beats():
    assert pareto(ENTRIES, Limits()) == (("a", "float"), ("b", "float"), ("d", "float"))
    tight = Limits(latency_ms=0.5)
    quick = dataclasses.replace(ENTRIES[2], forms=(form("int8", 79.0, 50, ms=0.4),))
    assert pareto([*ENTRIES[:2], quick], tight) == (("c", "int8"),)
    assert pareto(ENTRIES, tight) == ()
    stopped = dataclasses.replace(ENTRIES[3], stopped_after=2)
    assert pareto([*ENTRIES[:3], stopped], Limits()) == (("a", "float"), ("b", "float"))
    assert pareto([entry("a", 90.0, 100), entry("twin", 90.0, 100)], Limits()) == (("a", "float"), ("twin", "float"))


def test_advice_calls_nothing_better_that_is_not_shown_to_be():
    words = advise(ENTRIES, Limits())
    assert "For accuracy, use a (float): 90.00 %." in words
    assert "The difference between a and b is not significant." in words
    assert "For speed without a significant loss, use b (float): 400 images/s" in words
    assert "The fastest is d (float): 900 images/s at 70.00 %." in words
    assert "No finished model is within the limits." in advise(ENTRIES, Limits(megabytes=1))
    stopped = dataclasses.replace(ENTRIES[3], stopped_after=2)
    assert "d stopped early" in advise([*ENTRIES[:3], stopped], Limits())
    assert "from scratch" not in words
    pair = (ENTRIES[0], dataclasses.replace(ENTRIES[1], weights="timm/x"))
    assert "a was trained from scratch, since there are no public weights" in advise(pair, Limits())
    assert "not which architecture is better" in advise(pair, Limits())
    assert [row[1] for row in result_of(pair).tables()["Training"][1]] == ["scratch", "timm/x"]


def test_a_p_value_is_never_printed_as_0():
    rows = tuple(dataclasses.replace(ENTRIES[2], p_value=p) for p in (None, 0.0, 1e-5, 0.25))
    header, cells = result_of(rows).tables()["Training"]
    assert [row[header.index("McNemar p")] for row in cells] == ["", "< 1e-06", "1e-05", "0.25"]


def test_names_cover_no_point_and_no_tick_is_above_a_hundred():
    rows = (entry("best", 99.2, 100), entry("worst", 30.0, 300, -69.2))
    found = result_of(rows, frontier=pareto(rows, Limits()))
    figure = frontier_figure(found)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"best", "worst", "frontier", "float", "int8"}
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    assert figure.bbox.containsx(legend.get_window_extent().x0)
    assert figure.bbox.containsx(legend.get_window_extent().x1)
    assert max(axes.get_yticks()) == 100


def test_the_cost_of_stages_is_that_of_the_costliest_that_stay():
    prices, few = [1.0, 2.0, 3.0, 10.0], 4 + 2 + 2  # starts of the stages
    # all, then two of them, then both to the end
    assert training_seconds(prices, 4, 1) == 16 + 13 + 2 * 13 + few * START_S
    assert training_seconds(prices, 1, 1) == 16 + 4 * START_S
    assert training_seconds(prices, 4, 3) == training_seconds(prices, 4, 1) + 2 * (4 * 13 + 2 * START_S)
    assert epochs_within(prices, training_seconds(prices, 4, 1), 1) == 4
    assert epochs_within(prices, training_seconds(prices, 4, 1) - 1, 1) == 3
    assert epochs_within(prices, 0.0, 1) == 1
    rest = training_seconds([2.0, 10.0], 8, 2) - (2 * START_S + 2 * 12)
    assert training_seconds([2.0, 10.0], 8, 2, done=2) == rest  # finished stages cost no more
    assert training_seconds([2.0, 10.0], 8, 2, done=8) == 0


def quick_forms(folder, jobs, left):
    """In place of measuring, which takes a minute per model."""
    return {name: [form("float", 50.0 + number, 100 - number)] for number, name in enumerate(jobs)}


@pytest.mark.slow
def test_a_comparison_from_one_end_to_the_other(tmp_path, monkeypatch):
    """Two models on some of the digits, one of them of timm; then once more, under limits that nothing keeps."""
    monkeypatch.setattr(stages, "measure_forms", quick_forms)
    out = tmp_path / "out"
    done = compare("digits", models=MODELS, settings=SETTINGS, out=out, jobs=2, quiet=True)
    assert {row.name for row in done.rows} == set(MODELS)
    first, second = done.rows
    assert first.errors == second.errors == ()
    assert first.mean.value >= second.mean.value
    assert (first.effect, first.p_value) == (None, None)
    assert second.effect.value == pytest.approx(second.top1[0] - first.top1[0])
    assert 0 < second.p_value <= 1
    for item in done.rows:
        assert math.isfinite(item.mean.high)
        assert item.stopped_after is None
        assert len(item.curve) == 2
        assert item.seconds > 0 < item.peak_mib
    assert len(done.frontier) == 2
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    for word in ("Comparison of models on digits", "the same for all models", "McNemar", done.advice.split(":")[0]):
        assert word in page
    assert json.loads((out / "results.json").read_text())["rows"][0]["name"] == first.name

    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    again = compare("digits", models=MODELS, settings=SETTINGS, out=out, max_latency=1e-7, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.rows == done.rows
    assert again.frontier == ()
    assert "No finished model is within the limits" in again.advice


def speed_row(model: str, way: str, precision: str, batch_size: int, ms: float) -> SpeedRow:
    return SpeedRow(model, way, precision, "cpu", batch_size, ms, ms, 1000 * batch_size / ms, 1.0, 300.0, None, 9, 1)


@pytest.mark.parametrize("precisions", [("fp32",), ("fp32", "bf16")])
def test_a_form_has_the_fastest_runtime_in_the_precisions_of_the_processor(precisions, tmp_path, monkeypatch):
    """Without bf16 instructions, OpenVINO computes bf16 in fp32."""
    asked = []

    def speed(models, **options):
        asked.append((models, options["backends"], options["precisions"]))
        float_rows = [("folded", "fp32", 1, 4.0), ("folded", "fp32", 32, 64.0), ("openvino", "fp32", 1, 2.0)]
        rows = [speed_row(str(models[0]), *row) for row in [*float_rows, ("openvino", "fp32", 32, 96.0)]]
        exports = [speed_row(str(model), "export", "", size, 1.0 * size) for model in models[1:] for size in (1, 32)]
        return rows + exports

    job, result = Job(tmp_path, None, "digits", {}), Result(correct=((None, "1"),), megabytes=4.0)
    report = SimpleNamespace(top1=90.0, bytes=1e6)
    replaced = {"has_bf16": lambda: "bf16" in precisions, "DEPLOY": (), "speed": speed, "_int8": lambda *_: report}
    for name, value in replaced.items():
        monkeypatch.setattr(forms, name, value)
    first, second = forms._forms_of(tmp_path / "exported", job, result, is_full=True)
    assert first == Form("float", "torch fp32", 100.0, 2.0, 500.0, 4.0)
    assert second == Form("int8", "openvino int8", 90.0, 1.0, 1000.0, 1.0)
    assert forms._forms_of(tmp_path / "exported", job, result, is_full=False) == [first]
    full = ([job.model, tmp_path / "exported"], ("folded", "openvino"), precisions)
    assert asked == [full, ([job.model], ("folded",), precisions)]


@pytest.mark.nightly
@pytest.mark.slow
def test_every_form_is_measured_once(tmp_path):
    """Of a trained model: the fastest float, and int8 with its own accuracy."""
    job = Job(tmp_path / "runs" / "levit", "digits", "digits", {**SETTINGS, "model": "levit_nano_32", "seed": 0})
    (result,) = Engine().run([job]).values()
    forms = measure_forms(tmp_path, {"LeViT": job}, lambda: math.inf)
    number, whole = forms["LeViT"]
    assert (number.name, whole.name, whole.way) == ("float", "int8", "openvino int8")
    assert number.way in ("torch fp32", "torch bf16", "openvino fp32", "openvino bf16")
    assert number.top1 == result.top1()
    assert number.megabytes == pytest.approx(result.megabytes)
    assert whole.megabytes < number.megabytes
    assert all(each.images_per_second >= 1000 / each.latency_ms * 0.5 for each in (number, whole))
    info = open_model(tmp_path / "exports" / "levit").info
    assert (info.precision, info.label_names) == ("int8", [str(digit) for digit in range(10)])
    held_out = evaluate(tmp_path / "exports" / "levit", "digits", limit=160, quiet=True)
    assert held_out.top1 == pytest.approx(whole.top1)
    kept = (tmp_path / "forms.json").stat().st_mtime_ns
    assert measure_forms(tmp_path, {"LeViT": job}, lambda: math.inf) == forms
    assert (tmp_path / "forms.json").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_the_field_by_default_can_be_saved_and_read_again(tmp_path):
    """Every candidate, of timm too."""
    for settings in (*SMALL.values(), *LARGE.values()):
        arguments = {key.removeprefix("model_args."): value for key, value in settings.items()}
        name = arguments.pop("model")
        size = arguments.pop("img_size", None)
        more = {} if size is None or name.startswith("resnet") else {"img_size": size}
        model = weft.create_model(name, num_classes=2, **arguments, **more).eval()
        again, _ = load_model_dir(save_model_dir(model, tmp_path / name, force=True))
        assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())


class Machine:
    """A made-up machine: its clock moves by the time that timed steps, training runs and measurements take.

    Args:
        monkeypatch: of the test.
        paces: seconds per training image, by model.
        slowdown: of training, against the timed steps.
        failing: model whose runs are killed.
    """

    def __init__(self, monkeypatch, paces, slowdown=1.0, failing=None):
        self.now, self.paces, self.slowdown, self.failing = 1000.0, paces, slowdown, failing
        self.epochs: dict[Path, int] = {}
        self.jobs: list[Job] = []
        build_once(monkeypatch)
        monkeypatch.setattr(comparing, "Budget", lambda total: Budget(total, lambda: self.now))
        monkeypatch.setattr(stages, "seconds_per_image", self.seconds_per_image)
        monkeypatch.setattr(engine, "start_process", self.start_process)
        monkeypatch.setattr(stages, "measure_forms", self.measure_forms)
        monkeypatch.setattr(comparing, "write_report", lambda result: None)

    @property
    def asked(self):
        """Name and last epoch of all jobs that were run."""
        return [(job.folder.name, job.until) for job in self.jobs]

    def seconds_per_image(self, recipe, splits):
        self.now += 3.0
        return self.paces[recipe.model]

    def start_process(self, job, threads):
        self.jobs.append(job)
        recipe = load_recipe(job.recipe, list(job.settings.items()))
        model, epochs = job.settings["model"], job.until or recipe.epochs or 0
        new, self.epochs[job.folder] = epochs - self.epochs.get(job.folder, 0), epochs
        epoch = (1438 + EVALUATION * 359) * self.paces[model] * self.slowdown
        self.now += new * epoch + 5.0
        if model == self.failing and job.until:
            return Process(-9)
        count = 60 - 10 * list(self.paces).index(model)
        curve = tuple((number, float(number)) for number in range(1, epochs + 1))
        correct = ((None, "1" * count + "0" * (72 - count)),)
        write_result(job, Result(job=job.record(), correct=correct, curve=curve, seconds=epochs * epoch))
        return Process(0)

    def measure_forms(self, folder, jobs, left):
        for _ in jobs:
            self.now += 8.0 if left() > 0 else 2.0
        return quick_forms(folder, jobs, left)


FIELD = ("levit_nano_32", "ceit_nano_32", "cvt_nano_32", "test_resnet")  # the best first
PACES = dict.fromkeys(FIELD, 0.001)


@pytest.mark.slow_except("0.5-1800-1", "1.0-400-1", "2.0-900-2")
@pytest.mark.parametrize(("budget", "seeds"), [(400, 1), (900, 2), (1800, 1)])
@pytest.mark.parametrize("slowdown", [0.5, 1.0, 2.0])
def test_the_whole_comparison_stays_within_its_budget(budget, seeds, slowdown, tmp_path, monkeypatch):
    """By the accounting of a made-up machine, on which training may take longer than the probes show."""
    machine = Machine(monkeypatch, {name: 0.001 * (1 + number) for number, name in enumerate(FIELD)}, slowdown)
    begun = machine.now
    compare("digits", models=FIELD, budget=budget, seeds=seeds, out=tmp_path / "out", quiet=True)
    spent = machine.now - begun
    known = json.loads((tmp_path / "out" / "experiment.json").read_text())["decisions"]
    assert known["seconds"] == pytest.approx(spent)
    assert known["length"]["stages"] == stages_of(known["length"]["epochs"])
    assert spent <= budget * (1.0 if slowdown <= 1 else 1.3)
    if slowdown == 1:
        assert spent > 0.3 * budget  # and it is used


def recipes_of(machine: Machine) -> list[Recipe]:
    return [load_recipe(job.recipe, [*job.settings.items(), ("data.source", job.data)]) for job in machine.jobs]


@pytest.mark.parametrize("is_file", [False, True])
def test_candidates_of_a_recipe_in_steps_train_these_steps(is_file, tmp_path, monkeypatch):
    machine = Machine(monkeypatch, PACES)
    (tmp_path / "mine.yaml").write_text("steps: 700\nbatch_size: 16\n")
    words = {"recipe": str(tmp_path / "mine.yaml")} if is_file else {"settings": {"steps": 700, "batch_size": 16}}
    done = compare("digits", models=FIELD, out=tmp_path / "out", quiet=True, **words)
    assert [(recipe.steps, recipe.epochs) for recipe in recipes_of(machine)] == [(700, None)] * len(FIELD)
    assert [job.until for job in machine.jobs] == [None] * len(FIELD)
    assert ", 700 steps, " in done.protocol
    compare("digits", models=FIELD, out=tmp_path / "out", quiet=True, **words)  # resumes: it is the same comparison


def test_candidates_of_a_linear_probe_train_no_epoch(tmp_path, monkeypatch, capfd):
    """One that has no public weights would be a probe of random features: it is left out."""
    monkeypatch.setattr(candidates, "public_weights", lambda model: ("", "none") if "ceit" in model else ("x/y", ""))
    machine = Machine(monkeypatch, PACES)
    done = compare("digits", models=FIELD, recipe="probe", out=tmp_path / "out")
    assert [(recipe.epochs, recipe.head_init) for recipe in recipes_of(machine)] == [(0, "probe")] * 3
    assert done.epochs == 0
    assert "Left out, since a linear probe needs public weights: ceit_nano_32." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "got"), [({"settings": {"steps": 9}}, "steps=9"), ({"recipe": "probe"}, "recipe probe with epochs 0")]
)
def test_a_budget_and_a_recipe_with_a_length_of_its_own_exclude_each_other(words, got, tmp_path):
    with pytest.raises(UsageError, match=rf"A budget decides the number of epochs; got {got}\. Omit it, or omit --b"):
        compare("digits", budget=100, out=tmp_path / "out", quiet=True, **words)


def test_all_candidates_have_one_precision_and_one_batch_size(tmp_path, monkeypatch):
    """bf16 is faster for one of them only; the sizes that suit them differ."""
    machine, measured = Machine(monkeypatch, PACES), []
    precisions, sizes = dict(zip(FIELD, ("bf16", "fp32"), strict=False)), dict(zip(FIELD, (64, 32), strict=False))

    def find_precision(recipe, num_classes, runtime):
        measured.append(recipe.model)
        return dataclasses.replace(runtime, precision=precisions[recipe.model]), ""

    monkeypatch.setattr(protocol, "find_precision", find_precision)
    monkeypatch.setattr(protocol, "find_batch_size", lambda recipe, *more: (sizes[recipe.model], ""))
    words = dict(models=FIELD[:2], recipe="small_images", settings={"batch_size": "auto", "epochs": 2}, quiet=True)
    done = compare("digits", out=tmp_path / "out", **words)
    assert {(recipe.precision, recipe.batch_size) for recipe in recipes_of(machine)} == {("fp32", 32)}
    assert "with batch_size=32, precision=fp32" in done.protocol
    compare("digits", out=tmp_path / "out", **words)
    assert len(measured) == 2  # once per comparison


def test_a_refused_budget_may_be_raised_and_a_used_one_not(tmp_path, monkeypatch):
    Machine(monkeypatch, PACES)
    words = dict(models=FIELD, out=tmp_path / "out", quiet=True)
    with pytest.raises(UsageError, match=r"one epoch of every candidate, about .* here \(an epoch of .*\); got 8 s\."):
        compare("digits", budget=8, **words)
    compare("digits", budget=400, **words)
    with pytest.raises(UsageError, match=r"has results of budget=400; got budget=800\..* --force"):
        compare("digits", budget=800, **words)
    compare("digits", budget=400, **words)


def test_every_model_that_is_timed_prints_what_it_costs(tmp_path, capfd, monkeypatch):
    Machine(monkeypatch, PACES)
    compare("digits", models=FIELD, budget=400, out=tmp_path / "out", threads=1)
    shown = capfd.readouterr().err
    for name in FIELD:
        assert f"{name}: about 2 s per epoch (1,000 images/s)." in shown
    assert "12 s are used, 100 s are kept for measuring speed." in shown
    assert shown.splitlines()[0] == "Reading data.source: digits."
    assert shown.splitlines()[1].startswith("Comparing levit_nano_32, ceit_nano_32, cvt_nano_32, test_resnet on 1,438 ")


def test_quiet_prints_nothing(tmp_path, capfd, monkeypatch):
    """Also with two concurrent runs, whose threads are started in a copy of the context."""
    Machine(monkeypatch, PACES)
    words = ["compare", "digits", "--models", *FIELD, "--jobs", "2", "--budget", "400s", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    assert "For accuracy, use " in shown.out


def test_a_budget_stops_the_worse_half(tmp_path, capfd, monkeypatch):
    """With made-up trainings: what is better goes on, what dies is named, seeds are for those that get to the end."""
    machine = Machine(monkeypatch, PACES, failing="test_resnet")
    words = ["--budget", "400s", "--seeds", "2", "--out", str(tmp_path / "out"), "--json"]
    models = ("levit_nano_32", "cvt_nano_32", "ceit_nano_32", "test_resnet")
    assert main(["compare", "digits", "--models", *models, *words]) == 0
    shown = capfd.readouterr()
    found = json.loads(shown.out)
    stages = json.loads((tmp_path / "out" / "experiment.json").read_text())["decisions"]["length"]["stages"]
    by_name = {row["name"]: row for row in found["rows"]}
    assert [by_name[name]["stopped_after"] for name in models] == [None, stages[0], None, None]
    assert by_name["test_resnet"]["errors"] == [[0, "killed by signal 9 (SIGKILL)"]]
    assert list(by_name) == list(FIELD)
    assert ("levit-nano-32-seed1", None) in machine.asked
    assert not any(name == "cvt-nano-32-seed1" for name, _ in machine.asked)
    assert f"Stopped after epoch {stages[0]}: cvt_nano_32." in shown.err
    assert "cvt_nano_32 stopped early; longer training could change the ranking." in found["advice"]
    assert by_name["cvt_nano_32"]["verdict"] == f"stopped after epoch {stages[0]}"


def timed_recipe(precision="fp32"):
    settings = {"model": "levit_nano_32", "epochs": 2, "batch_size": 8, "workers": 0, "precision": precision}
    return load_recipe("digits", [*settings.items(), ("data.source", "digits")])


def test_steps_of_training_are_timed():
    splits = open_data("digits", SplitPlan(limit=64))
    assert 0 < halving.seconds_per_image(timed_recipe(), pickle.loads(pickle.dumps(splits))) < 1  # as on Ray


def test_steps_are_timed_in_the_precision_and_with_the_threads_of_a_run(monkeypatch):
    used = []

    def step_times(learner, steps):
        used.append((learner.recipe.precision, learner.runtime.precision, torch.get_num_threads()))
        return iter([(0.0, 1.0)] * 4)

    monkeypatch.setattr(timing, "step_times", step_times)
    before, splits = torch.get_num_threads(), open_data("digits", SplitPlan(limit=16))
    for precision in ("bf16", "fp32"):
        Engine(threads=before + 1).call(halving.seconds_per_image, timed_recipe(precision), splits)
    assert used == [("bf16", "bf16", before + 1), ("fp32", "fp32", before + 1)]
    assert torch.get_num_threads() == before


def test_with_no_time_left_a_model_is_measured_in_torch_only(tmp_path, monkeypatch, capfd):
    """It is measured again when there is time."""
    jobs, asked = {}, []
    for name in ("best", "other"):
        jobs[name] = Job(tmp_path / name, "digits", "digits", {"seed": 0})
        write_result(jobs[name], Result(job=jobs[name].record()))

    def forms_of(exported, job, result, *, is_full):
        asked.append((job.folder.name, is_full))
        return [form("float", 50.0, 100)]

    monkeypatch.setattr(forms, "_forms_of", forms_of)
    left = iter((1.0, 0.0))
    measure_forms(tmp_path, jobs, lambda: next(left))
    assert asked == [("best", True), ("other", False)]
    note = "other is measured in torch only: no time is left to convert it to OpenVINO and int8."
    assert note in capfd.readouterr().err
    measure_forms(tmp_path, jobs, lambda: 0.0)
    assert len(asked) == 2
    measure_forms(tmp_path, jobs, lambda: math.inf)
    assert asked[2:] == [("other", True)]


def planned(chosen, base=None, settings=None) -> tuple[Study, dict[str, str]]:
    """Return a comparison as a study, and the weights of its models."""
    weights = find_weights(chosen, base, settings or {})
    return study_of(chosen, "photos", base, settings or {}, weights), weights


def without_hub(monkeypatch, *missing):
    """Let models have public weights, except those with a part of their name in `missing`."""
    weights = lambda model: ("", "no network") if any(part in model for part in missing) else ("x/y", "")  # noqa: E731
    monkeypatch.setattr(candidates, "public_weights", weights)


def test_candidates_with_public_weights_start_from_them(monkeypatch, capfd):
    """From a hub that has the weights of the default candidates; CeiT has none on any hub."""
    create_model = candidates.create_model

    def create(model, pretrained):
        with torch.device("meta"):
            return create_model(model, pretrained=pretrained and "ceit" in model)

    monkeypatch.setattr(candidates, "create_model", create)
    study, weights = planned(LARGE)
    assert weights == {
        "CeiT": "",
        "CvT": "microsoft/cvt-13",
        "LeViT": "timm/levit_256.fb_dist_in1k",
        "DeiT": "timm/deit_tiny_patch16_224.fb_in1k",
        "ResNet": "timm/resnet18.a1_in1k",
    }
    (note,) = [line for line in capfd.readouterr().err.splitlines() if "from scratch" in line]
    assert "CeiT is trained from scratch: weft cannot download the weights of ceit_tiny_patch16_224" in note
    bases = {variant.name: variant.base for variant in study.at_scale("small")}
    assert bases == {"CeiT": None, **dict.fromkeys(("CvT", "LeViT", "DeiT", "ResNet"), "small_folder")}
    assert study.scales["small"].recipe == "small_folder"
    recipes = [variant.recipe for variant in study.at_scale("small")]
    assert {(recipe.batch_size, recipe.precision) for recipe in recipes} == {(32, "fp32")}  # of both recipes


def test_frozen_layers_need_the_weights_of_each_candidate(monkeypatch):
    """Which of them has public weights is known before training, but not where the settings are read."""
    (one, own), (other, others) = list(LARGE.items())[:2]
    without_hub(monkeypatch, others["model"])
    study, _ = planned({one: own, other: others}, settings={"optim.freeze": "backbone"})
    for variant in study.at_scale("small"):
        variant.check(has_weights=True)
    first, second = (variant.recipe for variant in study.at_scale("small"))
    assert fill_in(first, (375, 500), 200)[0].optim.freeze == "backbone"
    with pytest.raises(UsageError, match=f"needs trained weights; {others['model']} starts from random ones"):
        fill_in(second, (375, 500), 200)


def test_models_without_weights_are_trained_from_scratch(monkeypatch, capfd):
    """Also where the recipe asks for weights; a linear probe of one model is no comparison."""
    without_hub(monkeypatch, "")
    study, weights = planned(LARGE)
    assert study.scales["small"].recipe is None
    assert not any(weights.values())
    assert capfd.readouterr().err.count("is trained from scratch: no network") == len(LARGE)
    without_hub(monkeypatch, "ceit")
    study, _ = planned(dict(list(LARGE.items())[:2]), base="small_folder")
    assert [variant.base for variant in study.at_scale("small")] == ["small_folder", "small_folder"]
    assert [variant.set.get("pretrained") for variant in study.variants] == [False, None]
    with pytest.raises(UsageError, match=r"at least two models with public weights; got b\. Name other --models"):
        with_weights({"A": {"model": "a"}, "B": {"model": "b"}}, {"A": "", "B": "x/b"})


def test_small_images_and_given_recipes_are_not_asked_about(monkeypatch):
    monkeypatch.setattr(candidates, "public_weights", lambda model: pytest.fail("asked for weights"))
    assert not any(planned(SMALL, base="small_images")[1].values())
    assert not any(planned(LARGE, settings={"pretrained": "false"})[1].values())
    assert recipe_from_scratch("photos", 32) == "small_images"
    assert recipe_from_scratch("photos", 224) is None


@pytest.mark.nightly
@pytest.mark.slow
def test_weights_and_scratch_in_one_comparison(tmp_path, monkeypatch):
    """The whole way, on large images: one network from public weights, one without any."""
    cache, rng = tmp_path / "hub", np.random.default_rng(0)
    put_in_cache(
        cache, "timm/levit_128s.fb_dist_in1k", "model.safetensors", timm.create_model("levit_128s").state_dict()
    )
    for name, value in (("HF_HUB_CACHE", str(cache)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv(name, str(int(value) if value is True else value))  # for processes of their own
    for number in range(2):
        (tmp_path / "photos" / f"c{number}").mkdir(parents=True)
        for index in range(26):
            pixels = rng.integers(0, 120, (128, 128, 3)) + 100 * number
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "photos" / f"c{number}" / f"{index}.png")
    settings = {"img_size": 64, "batch_size": 8, "epochs": 1}
    models = ["levit_128s", "ceit_nano_32"]
    found = compare(tmp_path / "photos", models=models, settings=settings, out=tmp_path / "out", quiet=True)
    weights = {row.model: row.weights for row in found.rows}
    assert weights == {"levit_128s": "timm/levit_128s.fb_dist_in1k", "ceit_nano_32": ""}
    assert "since there are no public weights: ceit_nano_32" in found.protocol
    log = (tmp_path / "out" / "runs" / "levit-128s-seed0" / "run" / "recipe.yaml").read_text()
    assert "pretrained: true" in log
    assert "initial weights" in (tmp_path / "out" / "report.html").read_text()


def test_seeds_are_compared_with_their_own(tmp_path):
    """A run that failed leaves its pair out, and moves no other."""
    study = load_study("ceit-lca")
    experiment = Experiment(study.at_scale("small"), study.scales["small"].common, tmp_path, {})
    ours, theirs = [70, None, 75], [80, 90, 84]
    for name, values in zip(experiment.variants, (theirs, ours), strict=True):
        for seed, top1 in enumerate(values):
            correct = ((None, "1" * (top1 or 0) + "0" * (100 - (top1 or 0))),)
            experiment.results[name, seed] = Result(error="killed") if top1 is None else Result(correct=correct)
    first, second = experiment.rows([])
    assert first.top1 == (80.0, 90.0, 84.0)
    assert second.effect.value == pytest.approx(-9.5)
    assert second.errors == ((1, "killed"),)
    first, second = experiment.rows([], best=second.name)
    assert (first.effect.value, second.effect) == (pytest.approx(9.5), None)


@pytest.mark.parametrize(
    ("cats", "advice"),
    [(8, r"Add images to these classes"), (17, r"hold out more of them: --set data\.val_fraction=0\.3\.")],
)
def test_too_few_held_out_images(cats: int, advice: str, tmp_path: Path):
    names = [f"{name}/{number}.png" for name, count in (("cat", cats), ("dog", 40)) for number in range(count)]
    noise_images(tmp_path / "few", *names)
    with pytest.raises(DataError, match=rf"at least 5 held-out images of every class; got cat: \d\. .*{advice}"):
        compare(tmp_path / "few", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
