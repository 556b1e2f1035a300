"""A comparison: stages within a budget, what is shown and what is not, and the page."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import weft
from tests.helpers import put_in_cache
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main
from weft.data import SplitPlan, open_data
from weft.deploy import open_model
from weft.errors import DataError, UsageError
from weft.intervals import Estimate
from weft.models.papers import row_of
from weft.progress import working
from weft.recipes import Recipe, load_recipe
from weft.runtime import Runtime
from weft.study import compare, comparison_plan, protocol, speeds
from weft.study import comparison as comparing
from weft.study import probe as probing
from weft.study.budget import Price, Stopwatch, epochs_within, seconds, stages_of
from weft.study.comparison import _chosen
from weft.study.frontier import frontier_figure
from weft.study.outcome import Comparison, Entry, Limits, advise, pareto, trained_cells
from weft.study.runner import Job, Measured, Result, run_jobs
from weft.study.speeds import Form, measure_forms
from weft.train import evaluate
from weft.train.plan import open_splits

pytestmark = pytest.mark.figures

SMALL, LARGE = _chosen([], 32), _chosen([], 224)  # the default candidates
SETTINGS = {"data.limit": 160, "batch_size": 16, "epochs": 2, "model_args.drop_path_rate": 0.0}
MODELS = ("levit_nano_32", "test_resnet")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with public weights, random ones; nothing else can be had."""
    cache = tmp_path / "hub"
    for repo in (
        "deit_tiny_patch16_224.fb_in1k",
        "resnet18.a1_in1k",
        "levit_256.fb_dist_in1k",
        "levit_128s.fb_dist_in1k",
    ):
        put_in_cache(cache, f"timm/{repo}", "model.safetensors", timm.create_model(repo).state_dict())
    transformers = pytest.importorskip("transformers")
    theirs = transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000))
    put_in_cache(cache, "microsoft/cvt-13", "model.safetensors", theirs.state_dict())
    for name, value in (("HF_HUB_CACHE", str(cache)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))  # for processes of their own
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


def form(name: str, top1: float, speed: float, ms: float = 1.0, size: float = 4.0) -> Form:
    return Form(name, "openvino bf16", top1, ms, speed, size)


def entry(name: str, top1: float, speed: float, behind: float | None = None, **more) -> Entry:
    to_best = None if behind is None else Estimate(behind, behind - 0.5, behind + 0.5)
    forms = (form("float", top1, speed),)
    return Entry(name, name, Estimate(top1, top1 - 1, top1 + 1), (top1,), to_best=to_best, forms=forms, **more)


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


def test_a_chance_is_never_called_nought():
    cells = [trained_cells(dataclasses.replace(ENTRIES[2], p_value=p))[4] for p in (None, 0.0, 1e-5, 0.25)]
    assert cells == ["", "< 1e-06", "1e-05", "0.25"]


def test_names_cover_no_point_and_no_tick_is_above_a_hundred():
    entries = (entry("best", 99.2, 100), entry("worst", 30.0, 300, -69.2))
    found = Comparison(Path(), "digits", 9, 1, Limits(), "", (), entries, pareto(entries, Limits()), "")
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
    prices = [Price(epoch, start=0.0) for epoch in (1.0, 2.0, 3.0, 10.0)]
    assert seconds(prices, 4, 1) == 16 + 13 + 2 * 13  # all, then two of them, then both on to the end
    assert seconds(prices, 1, 1) == 16
    assert seconds(prices, 4, 3) == seconds(prices, 4, 1) + 2 * 4 * 13
    slow = [price._replace(start=5.0) for price in prices]
    assert seconds(slow, 4, 1) == seconds(prices, 4, 1) + 5 * (4 + 2 + 2)  # stages have their beginnings
    assert seconds(slow, 4, 2) == seconds(prices, 4, 2) + 5 * (4 + 2 + 2 + 2)
    assert epochs_within(slow, seconds(slow, 4, 1), 1) == 4
    assert epochs_within(slow, seconds(slow, 4, 1) - 1, 1) == 3


def test_finished_stages_cost_no_more():
    prices = [Price(2.0, 5.0), Price(10.0, 5.0)]
    assert seconds(prices, 8, 2, done=2) == seconds(prices, 8, 2) - (2 * 5 + 2 * 12)
    assert seconds(prices, 8, 2, done=8) == 0


def quick_forms(folder, jobs, tell, **more):
    """In place of measuring, which takes a minute per model."""
    return {name: [form("float", 50.0 + number, 100 - number)] for number, name in enumerate(jobs)}


@pytest.mark.slow
def test_a_comparison_from_one_end_to_the_other(tmp_path, monkeypatch):
    """Two models on some of the digits, one of them of timm; then once more, under limits that nothing keeps."""
    monkeypatch.setattr(comparing, "measure_forms", quick_forms)
    out = tmp_path / "out"
    done = compare("digits", models=MODELS, settings=SETTINGS, out=out, jobs=2, quiet=True)
    assert {item.name for item in done.entries} == set(MODELS)
    first, second = done.entries
    assert first.error is second.error is None
    assert first.accuracy.value >= second.accuracy.value
    assert (first.to_best, first.p_value) == (None, None)
    assert second.to_best.value == pytest.approx(second.top1[0] - first.top1[0])
    assert 0 < second.p_value <= 1
    for item in done.entries:
        assert math.isfinite(item.accuracy.high)
        assert item.stopped_after is None
        assert len(item.curve) == 2
        assert item.seconds > 0 < item.peak_mib
    overheads = [json.loads(file.read_text())["overhead"] for file in out.glob("runs/*/result.json")]
    assert len(overheads) == 2
    assert all(0 < overhead < 300 for overhead in overheads)
    assert len(done.frontier) == 2
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    for word in ("Comparison of models on digits", "the same for all models", "McNemar", done.advice.split(":")[0]):
        assert word in page
    assert json.loads((out / "results.json").read_text())["entries"][0]["name"] == first.name

    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    again = compare("digits", models=MODELS, settings=SETTINGS, out=out, max_latency_ms=1e-4, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert again.entries == done.entries
    assert again.frontier == ()
    assert "No finished model is within the limits" in again.advice
    with pytest.raises(UsageError, match="out"):
        compare("digits", models=("levit_nano_32", "ceit_nano_32"), settings=SETTINGS, out=out, quiet=True)


@pytest.mark.parametrize("precisions", [("fp32",), ("fp32", "bf16")])
def test_all_runtimes_are_measured_in_the_precisions_of_the_processor(precisions, tmp_path, monkeypatch):
    """Without bf16 instructions, OpenVINO computes bf16 in fp32."""
    network, ways = torch.nn.Identity(), []
    network.pretrained_cfg = {"input_size": (3, 4, 4)}

    def alternating(calls, size, progress):
        ways.extend(calls)
        return {way: {1: 1.0, 32: 1.0} for way in calls}

    replaced = dict(has_bf16=lambda: "bf16" in precisions, DEPLOY=(), load_model_dir=lambda path: (network, None))
    replaced |= dict(_int8=lambda *_: None, write_graph=lambda *_: None, run_file=lambda *_: None)
    for name, value in (replaced | {"_alternating": alternating}).items():
        monkeypatch.setattr(speeds, name, value)
    job, result = Job(tmp_path, None, "digits", {}), Result(measured={None: Measured(90.0, np.ones(1))})
    with working("measuring", quiet=True) as progress:
        speeds._forms_of(tmp_path / "exports", job, result, print, progress, is_full=True)
    assert ways == [f"{runtime} {precision}" for runtime in ("torch", "openvino") for precision in precisions]


@pytest.mark.slow
def test_every_form_is_measured_once(tmp_path):
    """Of a trained model: the fastest float, and int8 with its own accuracy."""
    job = Job(tmp_path / "runs" / "levit", "digits", "digits", {**SETTINGS, "model": "levit_nano_32", "seed": 0})
    (result,) = run_jobs([job]).values()
    forms = measure_forms(tmp_path, {"LeViT": job}, lambda text: None)
    number, whole = forms["LeViT"]
    assert (number.name, whole.name, whole.way) == ("float", "int8", "openvino int8")
    assert number.way in ("torch fp32", "torch bf16", "openvino fp32", "openvino bf16")
    assert number.top1 == result.top1
    assert number.megabytes == pytest.approx(result.megabytes)
    assert whole.megabytes < number.megabytes
    assert all(each.images_per_second >= 1000 / each.latency_ms * 0.5 for each in (number, whole))
    exported, names = open_model(tmp_path / "exports" / "levit")
    assert (exported.precision, names) == ("int8", [str(digit) for digit in range(10)])
    held_out = evaluate(tmp_path / "exports" / "levit", "digits", limit=160, quiet=True)
    assert held_out.top1 == pytest.approx(whole.top1)
    kept = (tmp_path / "forms.json").stat().st_mtime_ns
    assert measure_forms(tmp_path, {"LeViT": job}, lambda text: None) == forms
    assert (tmp_path / "forms.json").stat().st_mtime_ns == kept


@pytest.mark.slow
def test_the_field_by_default_can_be_saved_and_read_again(tmp_path):
    """Every candidate, of timm too."""
    for candidate in (*SMALL, *LARGE):
        arguments = {key.removeprefix("model_args."): value for key, value in candidate.settings.items()}
        size = arguments.pop("img_size", None)
        more = {} if size is None or candidate.model.startswith("resnet") else {"img_size": size}
        model = weft.create_model(candidate.model, num_classes=2, **arguments, **more).eval()
        again, _ = load_model_dir(save_model_dir(model, tmp_path / candidate.model, force=True))
        assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())


class Machine:
    """A made-up machine: its clock moves by the time that probes, training runs and measurements take.

    Args:
        monkeypatch: of the test.
        paces: seconds per training image, by model.
        slowdown: of training, against what a probe shows.
        failing: model whose runs are killed.
    """

    OVERHEAD = 5.0

    def __init__(self, monkeypatch, paces, slowdown=1.0, failing=None):
        self.now, self.paces, self.slowdown, self.failing = 1000.0, paces, slowdown, failing
        self.probed: list[str] = []
        self.asked: list[tuple[str, int | None]] = []
        self.epochs: dict[Path, int] = {}
        self.jobs: list[Job] = []
        monkeypatch.setattr(comparing, "Stopwatch", lambda before=0.0: Stopwatch(before, lambda: self.now))
        monkeypatch.setattr(comparison_plan, "probe", self.probe)
        monkeypatch.setattr(comparison_plan, "run_jobs", self.run_jobs)
        monkeypatch.setattr(comparing, "measure_forms", self.measure_forms)

    def probe(self, recipe, macs, splits, threads):
        self.probed.append(recipe.model)
        self.now += 3.0
        return probing.Probe(self.paces[recipe.model], 1e9, 64)

    def run_jobs(self, jobs, *, on_done=lambda job, result: None, **more):
        results = {}
        for job in jobs:
            self.jobs.append(job)
            recipe = load_recipe(job.recipe, list(job.settings.items()))
            model, epochs = job.settings["model"], job.until or recipe.epochs or 0
            new, self.epochs[job.folder] = epochs - self.epochs.get(job.folder, 0), epochs
            train = min(job.settings.get("data.limit", 1438), 1438)
            evaluated = comparison_plan.EVALUATION * min(train, 359)
            pace = self.paces[model] * self.slowdown
            trained, overhead = new * (train + evaluated) * pace, self.OVERHEAD + evaluated * pace
            self.now += trained + overhead
            if "probes" not in job.folder.parts:
                self.asked.append((job.folder.name, job.until))
            right = np.arange(72) < 60 - 10 * list(self.paces).index(model)
            result = Result(
                None,
                {None: Measured(100 * float(right.mean()), right)},
                tuple((epoch, float(epoch)) for epoch in range(1, epochs + 1)),
                seconds=epochs * (train + evaluated) * pace,
                overhead=overhead,
                images_per_second=1 / pace,
            )
            if model == self.failing and job.until:
                result = Result(error="killed by signal 9 (SIGKILL)")
            results[job.folder] = result
            on_done(job, result)
        return results

    def measure_forms(self, folder, jobs, tell, *, num_val, left, quiet):
        paces = {name: self.paces[job.settings["model"]] for name, job in jobs.items()}
        for number, pace in enumerate(paces.values()):
            rest = sum(
                speeds.form_seconds(other, num_val, is_full=False) for other in list(paces.values())[number + 1 :]
            )
            full = speeds.form_seconds(pace, num_val, is_full=True)
            is_full = left() - rest >= full
            self.now += full if is_full else speeds.form_seconds(pace, num_val, is_full=False)
        return quick_forms(folder, jobs, tell)


FIELD = ("levit_nano_32", "ceit_nano_32", "cvt_nano_32", "test_resnet")  # the best first
PACES = dict.fromkeys(FIELD, 0.001)


@pytest.mark.parametrize(("budget", "seeds"), [(120, 1), (300, 2), (1800, 1)])
@pytest.mark.parametrize("slowdown", [0.5, 1.0, 2.0])
def test_the_whole_comparison_stays_within_its_budget(budget, seeds, slowdown, tmp_path, monkeypatch):
    """By the accounting of a made-up machine, on which training may take longer than the probes show."""
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
    machine = Machine(monkeypatch, {name: 0.001 * (1 + number) for number, name in enumerate(FIELD)}, slowdown)
    begun = machine.now
    compare("digits", models=FIELD, budget=budget, seeds=seeds, out=tmp_path / "out", quiet=True)
    spent = machine.now - begun
    known = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert known["seconds"] == pytest.approx(spent)
    assert known["stages"] == stages_of(known["epochs"])
    assert spent <= budget * (1.0 if slowdown <= 1 else 1.3)
    if slowdown == 1:
        assert spent > 0.4 * budget  # and it is used


def recipes_of(machine: Machine) -> list[Recipe]:
    return [load_recipe(job.recipe, [*job.settings.items(), ("data.source", job.data)]) for job in machine.jobs]


@pytest.mark.parametrize("is_file", [False, True])
def test_candidates_of_a_recipe_in_steps_train_these_steps(is_file, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
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
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
    monkeypatch.setattr(
        comparison_plan, "public_weights", lambda model: ("", "none") if "ceit" in model else ("x/y", "")
    )
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


def test_seeds_begin_with_the_given_one_and_share_the_split(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
    machine = Machine(monkeypatch, PACES)
    splits = []
    summary = comparing._summary
    monkeypatch.setattr(comparing, "_summary", lambda plan, *more: splits.append(plan.splits) or summary(plan, *more))
    settings = {"seed": 5, "data.limit": 200}
    compare("digits", models=FIELD[:2], seeds=2, settings=settings, out=tmp_path / "out", quiet=True)
    recipes = recipes_of(machine)
    assert sorted(recipe.seed for recipe in recipes) == [5, 5, 6, 6]
    assert {job.folder.name for job in machine.jobs} == {
        f"{name}-nano-32-seed{seed}" for name in ("levit", "ceit") for seed in (5, 6)
    }
    held_out = [list(open_splits(recipe).val.keys) for recipe in recipes]
    assert all(keys == list(splits[0].val.keys) for keys in held_out)


def test_all_candidates_have_one_precision_and_one_batch_size(tmp_path, monkeypatch):
    """bf16 is faster for one of them only; the sizes that suit them differ."""
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
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


def test_a_budget_that_is_much_too_small_is_refused_after_one_probe(tmp_path, capfd, monkeypatch):
    """The other models are estimated from their multiply-adds; nothing is trained."""
    machine = Machine(monkeypatch, dict.fromkeys(FIELD, 1.0))
    words = ["compare", "digits", "--models", *FIELD, "--out", str(tmp_path / "out")]
    assert main([*words, "--budget", "90s"]) == 2
    shown = capfd.readouterr().err
    assert (len(machine.probed), machine.asked) == (1, [])
    assert f"{machine.probed[0]}: about 26:04 per epoch (1.0 images/s), 1.0 GB of memory at batch size 64." in shown
    assert "one epoch of every candidate, at least " in shown
    assert shown.splitlines()[-1].endswith("; got 90 s. Raise --budget, or use fewer --models or --limit N.")


def test_a_refused_budget_may_be_raised_and_a_used_one_not(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
    Machine(monkeypatch, PACES)
    words = dict(models=FIELD, out=tmp_path / "out", quiet=True)
    with pytest.raises(UsageError, match=r"one epoch of every candidate, .* here \(.* alone .*\); got 8 s\."):
        compare("digits", budget=8, **words)
    compare("digits", budget=200, **words)
    with pytest.raises(UsageError, match="--force"):
        compare("digits", budget=400, **words)
    compare("digits", budget=200, **words)


def test_every_model_that_is_probed_prints_what_it_costs(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("weft.study.frontier.write_comparison", lambda comparison: None)
    Machine(monkeypatch, PACES)
    compare("digits", models=FIELD, budget=200, out=tmp_path / "out", threads=1)
    shown = capfd.readouterr().err
    for name in FIELD:
        assert f"{name}: about 2 s per epoch (1,000 images/s), 1.0 GB of memory at batch size 64." in shown
    assert "Starting and finishing a run takes about 5 s." in shown
    assert shown.splitlines()[0].startswith("Comparing levit_nano_32, ceit_nano_32, cvt_nano_32, test_resnet on 1,438 ")


def test_a_budget_stops_the_worse_half(tmp_path, capfd, monkeypatch):
    """With made-up trainings: what is better goes on, what dies is named, seeds are for those that get to the end."""
    machine = Machine(monkeypatch, PACES, failing="test_resnet")
    words = ["--budget", "200s", "--seeds", "2", "--out", str(tmp_path / "out"), "--json"]
    models = ("levit_nano_32", "cvt_nano_32", "ceit_nano_32", "test_resnet")
    assert main(["compare", "digits", "--models", *models, *words]) == 0
    shown = capfd.readouterr()
    found = json.loads(shown.out)
    known = json.loads((tmp_path / "out" / "compare.json").read_text())
    stages = known["stages"]
    by_name = {item["name"]: item for item in found["entries"]}
    assert [by_name[name]["stopped_after"] for name in models] == [None, stages[0], None, None]
    assert by_name["test_resnet"]["error"] == "killed by signal 9 (SIGKILL)"
    assert list(by_name) == list(FIELD)
    assert ("levit-nano-32-seed1", None) in machine.asked
    assert not any(name == "cvt-nano-32-seed1" for name, _ in machine.asked)
    assert f"Stopped after epoch {stages[0]}: cvt_nano_32." in shown.err
    assert "cvt_nano_32 stopped early; longer training could change the ranking." in found["advice"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "killed by signal 9" in page
    assert f"stopped after epoch {stages[0]}" in page


@pytest.mark.slow
def test_a_budget_that_holds_nothing_says_what_it_would_take(tmp_path):
    with pytest.raises(UsageError, match=r"one epoch of every candidate, .* here \(.* alone .*\); got 0 s\."):
        compare("digits", models=MODELS, budget=0.01, settings={"data.limit": 64}, out=tmp_path / "out", quiet=True)


def recipe_for_probe(batch_size):
    settings = {"model": "levit_nano_32", "epochs": 2, "batch_size": batch_size, "workers": 0}
    return load_recipe("digits", list(settings.items()))


def test_a_probe_is_small_and_estimates_time_and_memory():
    splits = open_data("digits", SplitPlan(limit=128))
    recipe = recipe_for_probe(64)
    macs = probing.macs_of(recipe, 10)
    assert macs == pytest.approx(row_of("levit_nano_32").macs, rel=0.02)  # 10 classes
    found = probing.probe(recipe, macs, splits)
    assert found.image > 0
    assert found.batch_size == 64
    larger = probing.probe(recipe_for_probe(128), 1e12, splits)  # a network so large that the probe has 4 images
    activations = found.memory - probing.PROCESS_BYTES
    assert activations > 64 * 3 * 32 * 32 * 4
    assert larger.memory - probing.PROCESS_BYTES == pytest.approx(2 * activations, rel=0.3)
    assert probing.macs_of(dataclasses.replace(recipe, model="ceit_nano_32"), 10) > macs


def test_a_probe_computes_in_the_precision_that_a_run_would_choose(monkeypatch):
    used: list[tuple[str, str]] = []
    in_bf16 = Runtime(Runtime.of("cpu").accelerator, "bf16")
    monkeypatch.setattr(probing, "find_precision", lambda recipe, classes, runtime: (in_bf16, ""))
    monkeypatch.setattr(
        probing,
        "_timed",
        lambda plan, learner: used.append((plan.recipe.precision, plan.runtime.precision)) or (0, 1, 1),
    )
    for precision in ("auto", "fp32"):
        recipe = dataclasses.replace(recipe_for_probe(8), precision=precision)
        probing.probe(recipe, 1e6, open_data("digits", SplitPlan(limit=16)))
    assert used == [("bf16", "bf16"), ("fp32", "fp32")]


def test_a_probe_uses_the_threads_of_a_run_and_no_more_after_it(monkeypatch):
    used: list[int] = []
    monkeypatch.setattr(probing, "_timed", lambda plan, learner: used.append(torch.get_num_threads()) or (0, 1, 1))
    before = torch.get_num_threads()
    probing.probe(recipe_for_probe(64), 1e9, open_data("digits", SplitPlan(limit=128)), threads=before + 1)
    assert used == [before + 1]
    assert torch.get_num_threads() == before


def test_a_budget_measures_all_forms_of_the_first_and_torch_of_the_others(tmp_path, monkeypatch):
    """What was measured in torch only is measured again when there is time."""
    jobs, asked = {}, []
    for name in ("best", "other"):
        jobs[name] = Job(tmp_path / name, "digits", "digits", {"seed": 0})
        jobs[name].folder.mkdir()
        record = {"job": jobs[name].record(), "measured": [], "curve": [], "images_per_second": 100.0}
        jobs[name].result_file.write_text(json.dumps(record))

    def forms_of(exported, job, result, tell, progress, is_full):
        asked.append((job.folder.name, is_full))
        return [form("float", 50.0, 100)]

    monkeypatch.setattr(speeds, "_forms_of", forms_of)
    quick, full = (speeds.form_seconds(0.01, 100, is_full=is_full) for is_full in (False, True))
    assert 0 < quick < full
    output: list[str] = []

    def measure(left):
        return measure_forms(tmp_path, jobs, output.append, num_val=100, left=lambda: left, quiet=True)

    measure(quick)
    assert asked == [("best", False), ("other", False)]
    assert "other is measured in torch only: the budget does not suffice to convert it to OpenVINO and int8." in output
    measure(quick)
    assert len(asked) == 2
    measure(math.inf)
    assert asked[2:] == [("best", True), ("other", True)]
    measure(quick)
    assert len(asked) == 4


def planned(tmp_path, candidates, output, base=None, settings=None):
    plan = comparison_plan.ComparisonPlan(
        tmp_path, "photos", base, settings or {}, None, candidates, "local", 1, 1, {"budget": None}, Stopwatch(), True
    )
    plan.tell = output.append
    plan.start_from(plan.find_weights())
    return plan


def test_candidates_with_public_weights_start_from_them(tmp_path, hub):
    """From a hub's cache that holds the default candidates' weights; CeiT has none on any hub."""
    output: list[str] = []
    plan = planned(tmp_path, LARGE, output)
    assert {candidate.name: candidate.weights for candidate in plan.candidates} == {
        "CeiT": "",
        "CvT": "microsoft/cvt-13",
        "LeViT": "timm/levit_256.fb_dist_in1k",
        "DeiT": "timm/deit_tiny_patch16_224.fb_in1k",
        "ResNet": "timm/resnet18.a1_in1k",
    }
    assert len(output) == 1
    assert "CeiT is trained from scratch: weft cannot download the weights of ceit_tiny_patch16_224" in output[0]
    jobs = {candidate.name: plan.job(candidate, 0, 3, None) for candidate in plan.candidates}
    assert {name: job.recipe for name, job in jobs.items()} == {
        "CeiT": None,
        **dict.fromkeys(("CvT", "LeViT", "DeiT", "ResNet"), "small_folder"),
    }
    assert plan.recipe == "small_folder"


def test_frozen_layers_need_the_weights_of_each_candidate(tmp_path, monkeypatch):
    """Which of them has public weights is known before training, but not where the settings are read."""
    one, other = LARGE[:2]
    monkeypatch.setattr(comparison_plan, "public_weights", lambda name: ("owner/weights" * (name == one.model), ""))
    monkeypatch.setattr(comparison_plan, "image_size_hint", lambda images: (375, 500))
    settings = {"optim.freeze": "backbone"}
    for candidate in (one, other):
        comparing._check(candidate, None, settings)
    plan = planned(tmp_path, (one, other), [], settings=settings)
    plan.splits = SimpleNamespace(train=range(200))
    assert plan.recipe_of(plan.candidates[0]).optim.freeze == "backbone"
    with pytest.raises(UsageError, match=f"needs trained weights; {other.model} starts from random ones"):
        plan.recipe_of(plan.candidates[1])


def test_without_any_weights_all_are_trained_from_scratch(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(comparison_plan, "public_weights", lambda model: ("", "no network"))
    output: list[str] = []
    plan = planned(tmp_path, LARGE, output)
    assert plan.recipe is None
    assert not any(candidate.weights for candidate in plan.candidates)
    assert len(output) == len(LARGE)


def test_small_images_and_given_recipes_are_not_asked_about(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison_plan, "public_weights", lambda model: pytest.fail("asked for weights"))
    assert not any(c.weights for c in planned(tmp_path, SMALL, [], base="small_images").candidates)
    assert not any(c.weights for c in planned(tmp_path, LARGE, [], settings={"pretrained": "false"}).candidates)
    assert comparing._recipe_for("photos", 32) == "small_images"
    assert comparing._recipe_for("photos", 224) is None


def test_a_recipe_that_asks_for_weights_goes_without_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(
        comparison_plan, "public_weights", lambda model: ("", "none") if "ceit" in model else ("x/y", "")
    )
    plan = planned(tmp_path, LARGE[:2], [], base="small_folder")
    jobs = [plan.job(candidate, 0, 3, None) for candidate in plan.candidates]
    assert [job.recipe for job in jobs] == ["small_folder", "small_folder"]
    assert [job.settings.get("pretrained") for job in jobs] == [False, None]


def test_the_advice_says_what_starting_from_scratch_means():
    first, second = ENTRIES[0], dataclasses.replace(ENTRIES[1], weights="timm/x")
    advice = advise([first, second], Limits())
    assert f"{first.name} was trained from scratch, since there are no public weights" in advice
    assert "not which architecture is better" in advice
    assert "from scratch" not in advise(ENTRIES[:2], Limits())
    assert [trained_cells(entry)[1] for entry in (first, second)] == ["scratch", "timm/x"]


@pytest.mark.slow
def test_weights_and_scratch_in_one_comparison(tmp_path, hub):
    """The whole way, on large pictures: one network from public weights, one without any."""
    rng = np.random.default_rng(0)
    for number in range(2):
        (tmp_path / "photos" / f"c{number}").mkdir(parents=True)
        for index in range(26):
            pixels = rng.integers(0, 120, (128, 128, 3)) + 100 * number
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "photos" / f"c{number}" / f"{index}.png")
    settings = {"img_size": 64, "batch_size": 8, "epochs": 1}
    models = ["levit_128s", "ceit_nano_32"]
    found = compare(tmp_path / "photos", models=models, settings=settings, out=tmp_path / "out", quiet=True)
    weights = {entry.model: entry.weights for entry in found.entries}
    assert weights == {"levit_128s": "timm/levit_128s.fb_dist_in1k", "ceit_nano_32": ""}
    assert "since there are no public weights: ceit_nano_32" in found.protocol
    log = (tmp_path / "out" / "runs" / "levit-128s-seed0" / "run" / "recipe.yaml").read_text()
    assert "pretrained: true" in log
    assert "initial weights" in (tmp_path / "out" / "report.md").read_text()


def test_seeds_are_compared_with_their_own():
    """A run that died leaves its pair out, and moves no other."""

    def run(top1, error=None):
        return Result(error, None if error else {None: Measured(top1, np.ones(4, bool))})

    mine, best = [run(70.0), run(0, "died"), run(75.0)], [run(80.0), run(90.0), run(84.0)]
    assert comparing._difference_to_best(mine, best).value == pytest.approx(-9.5)


@pytest.mark.parametrize(
    ("cats", "advice"),
    [(8, r"Add images to these classes"), (17, r"hold out more of them: --set data\.val_fraction=0\.3\.")],
)
def test_too_few_held_out_images(cats: int, advice: str, tmp_path: Path):
    for name, count in (("cat", cats), ("dog", 40)):
        (tmp_path / "few" / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((32, 32, 3), 5 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "few" / name / f"{number}.png")
    with pytest.raises(DataError, match=rf"at least 5 held-out images of every class; got cat: \d\. .*{advice}"):
        compare(tmp_path / "few", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "levit_nano_32"], "A comparison needs at least two models, each once; got levit_nano_32."),
        (["--models", "levit_nano_32", "levit_nano"], "Unknown model 'levit_nano'"),
        (["--max-latency", "fast"], "--max-latency must be a time such as 10ms or 0.5s; got 'fast'."),
        (["--max-size", "20"], "--max-size must be a size such as 20MB; got '20'."),
        (["--budget", "soon"], "--budget must be a duration such as 90s, 45m or 1h30m; got 'soon'."),
        (
            ["--budget", "1h", "--epochs", "3"],
            "number of epochs; pass --budget or --epochs, not both.",
        ),
        (["--seeds", "0"], "--seeds must be a whole number of at least 1; got 0."),
    ],
)
def test_words_that_do_not_fit(words, message, tmp_path, capsys):
    assert main(["compare", "digits", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
