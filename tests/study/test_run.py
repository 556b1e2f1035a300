"""A study from its file to its page: runs that end, runs that die, runs that are stopped and go on."""

from __future__ import annotations

import csv
import dataclasses
import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from weft.cli import main
from weft.errors import UsageError
from weft.study import compare, load_study, run_study
from weft.study.engine import Engine
from weft.study.experiment import verdict
from weft.study.jobs import Job, Result, failure_of, read_result, start_process
from weft.study.report import lines_figure
from weft.study.result import ExperimentResult, Row
from weft.study.statistics import Estimate

pytestmark = pytest.mark.figures

STUDY = """
title: What attention bias brings | to digits
claim: It brings 1.5 points.
source: LeViT, arXiv 2104.01136, table 5
scales:
  small:
    recipe: digits
    data: digits
    seeds: 2
    set: {model: levit_nano_32, model_args.depth: [1, 1, 1], epochs: 1, batch_size: 16, data.limit: 120}
variants:
- {name: with, paper: 71.9}
- {name: without, paper: 70.4, set: {model_args.attn_bias: false, model_args.pos_embed: true}}
- {name: larger, test_ratio: 1.5, against: with}
- {name: broken, set: {batch_size: 1}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bias.yaml"
    path.write_text(STUDY)
    return path


@pytest.mark.slow
def test_lines_are_drawn_over_what_was_run():
    study = load_study("data-efficiency")
    estimate = Estimate(50.0, 49.0, 51.0)
    rows = tuple(
        Row(variant.name, variant.against, (50.0,), estimate) for variant in study.variants if variant.at in (1, 10)
    )
    figure = lines_figure(ExperimentResult(Path(), study, "small", "cifar10", 1, rows))
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "10"]
    assert len(figure.legends[0].get_texts()) == 5


@pytest.mark.slow
def test_a_study_from_its_file_to_its_page(file, capfd):
    """One of its variants cannot be trained; then once more, and then another in its place."""
    done = run_study(file, out=file.parent / "out", jobs=2, quiet=True)
    assert [row.name for row in done.rows] == ["with", "without", "larger", "broken"]
    base, without, larger, broken = done.rows
    assert len(base.top1) == len(without.top1) == len(larger.top1) == 2
    assert base.effect is None
    assert without.paper_effect == -1.5
    differences = [a - b for a, b in zip(without.top1, base.top1, strict=True)]
    assert without.effect.value == pytest.approx(np.mean(differences))
    assert without.effect.low < without.effect.value < without.effect.high
    assert base.macs == larger.macs  # one run, evaluated at two sizes
    assert (len(base.curve), larger.curve) == (1, ())
    assert (broken.top1, broken.mean, broken.verdict) == ((), None, "failed")
    assert [seed for seed, _ in broken.errors] == [0, 1]
    assert "needs at least 2 images per forward pass" in broken.errors[0][1]

    runs = sorted(path.name for path in (done.out / "runs").iterdir())
    assert runs == [f"{name}-seed{seed}" for name in ("broken", "with", "without") for seed in (0, 1)]
    with (done.out / "runs.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    sizes = [("with", "0", ""), ("without", "0", ""), ("larger", "0", "48")]
    assert [(row["variant"], row["seed"], row["img_size"]) for row in rows[:6:2]] == sizes
    fields = json.loads((done.out / "results.json").read_text())
    assert fields["rows"][1]["paper_effect"] == -1.5
    assert fields["rows"][1]["effect"] == pytest.approx(list(without.effect))
    page = (done.out / "report.html").read_text()
    for word in ("What attention bias brings", "Failed runs", "at least 2 images", without.verdict):
        assert word in page
    assert "brings | to digits" in page
    assert page.count("data:image/svg+xml;base64,") == 1  # effects; one epoch makes no curve

    before = {path: path.stat().st_mtime_ns for path in done.out.glob("runs/*/result.json")}
    assert len(before) == 4
    assert main(["study", str(file), "--out", str(done.out), "--only", "without", "--json"]) == 0
    output = json.loads(capfd.readouterr().out)
    assert [row["name"] for row in output["rows"]] == ["with", "without", "larger"]  # all that are finished
    assert output["rows"][0]["top1"] == list(base.top1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(UsageError, match="out"):
        run_study(file, out=done.out, settings={"epochs": 2}, quiet=True)
    assert (done.out / "report.html").exists()


def job(folder: Path, **settings: object) -> Job:
    base = {"model": "levit_nano_32", "model_args.depth": [1, 1, 1], "data.limit": 160, "batch_size": 16, "seed": 0}
    return Job(folder, "digits", "digits", {**base, "epochs": 3, "save.every_steps": 1, **settings})


def killed_with_a_state(job: Job) -> int:
    """Kill a job when it has saved a state; return its exit code."""
    process = start_process(job, 1)
    deadline = time.monotonic() + 120
    while not list((job.folder / "run").glob("state/step-*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    return process.wait()


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_first_state_begins_again(tmp_path):
    killed = job(tmp_path / "killed", epochs=1)
    killed_with_a_state(killed)
    for state in (killed.folder / "run").glob("state/step-*.safetensors"):
        state.write_bytes(state.read_bytes()[:100])
    (result,) = Engine().run([killed]).values()
    assert (result.error, len(result.curve)) == (None, 1)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_same_answers(tmp_path):
    whole, killed = job(tmp_path / "whole"), job(tmp_path / "killed")
    code = killed_with_a_state(killed)
    assert failure_of(killed, code) == f"killed by signal 9 ({signal.SIGKILL.name})"
    assert read_result(killed) is None
    results = Engine(at_once=2).run([whole, killed])
    first, second = (results[each.folder] for each in (whole, killed))
    assert first.error is None
    assert first.curve == second.curve
    assert first.correct == second.correct
    assert len(first.curve) == 3
    assert read_result(job(tmp_path / "whole", epochs=2)) is None  # another job has no result there


@pytest.mark.nightly
@pytest.mark.slow
def test_over_two_workers_of_ray(tmp_path):
    """Results as by the engine of this machine; what dies takes nothing with it."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        tasks = [job(tmp_path / name, epochs=1, **more) for name, more in (("a", {}), ("b", {"batch_size": 1}))]
        results = Engine("ray", threads=1).run(tasks)
    finally:
        ray.shutdown()
    (here,) = Engine().run([job(tmp_path / "here", epochs=1)]).values()
    assert results[tasks[0].folder].correct == here.correct
    assert "at least 2 images" in results[tasks[1].folder].error


PLUGIN = """
import os, time
from pathlib import Path
folder = Path({folder!r})
(folder / f"{{os.getpid()}}.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
deadline = time.monotonic() + 100
while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_each_run_on_ray_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    """Two workers with a fake GPU each. Their processes wait for each other, so that both run at the same time."""
    ray = pytest.importorskip("ray")
    (tmp_path / "seen").mkdir()
    (tmp_path / "plugin.py").write_text(PLUGIN.format(folder=str(tmp_path / "seen")))
    monkeypatch.setenv("WEFT_PLUGINS", str(tmp_path / "plugin.py"))
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        results = Engine("ray", threads=1).run([job(tmp_path / name) for name in ("a", "b")])
    finally:
        ray.shutdown()
    assert all("plugin.py" in result.error for result in results.values())  # it has no family
    assert sorted(file.read_text() for file in (tmp_path / "seen").iterdir()) == ["0", "1"]


@pytest.mark.slow
def test_a_study_that_is_stopped_stops_its_runs(tmp_path):
    def stop(ended: Job, result: Result) -> None:
        raise KeyboardInterrupt

    short, long = job(tmp_path / "short", batch_size=1), job(tmp_path / "long", epochs=500)
    with pytest.raises(KeyboardInterrupt):
        Engine(at_once=2).run([short, long], on_done=stop)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in commands if b"weft.study.job_process" in line and bytes(tmp_path) in line]
    assert read_result(long) is None
    log = (tmp_path / "long" / "log.txt").read_text()
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_job_that_stops_early_goes_on_later(tmp_path):
    """Each leaves its own result, and neither is run again."""
    early, whole = (dataclasses.replace(job(tmp_path / "job", epochs=2), until=until) for until in (1, None))
    (first,) = Engine().run([early]).values()
    assert [epoch for epoch, _ in first.curve] == [1]
    (last,) = Engine().run([whole]).values()
    assert [epoch for epoch, _ in last.curve] == [1, 2]
    assert last.curve[:1] == first.curve
    before = {path: path.stat().st_mtime_ns for path in (early.result_file, whole.result_file)}
    (again,) = Engine().run([early]).values()
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("effect", "paper", "arguments"),
    [
        (None, None, ""),
        (Estimate(1.0, -0.2, 2.2), 1.5, "no difference shown"),
        (Estimate(1.0, 0.2, 1.8), 1.5, "higher, as in the paper"),
        (Estimate(-1.0, -1.8, -0.2), 1.5, "lower, against the paper"),
        (Estimate(-1.0, -1.8, -0.2), None, "lower"),
        (Estimate(1.0, 0.2, 1.8), 0.0, "higher, no effect in the paper"),
        (Estimate(1.0, -0.2, 2.2), 0.0, "no difference shown"),
    ],
)
def test_nothing_is_called_equal(effect, paper, arguments):
    assert verdict(effect, paper) == arguments


def test_settings_of_the_data_hold_before_the_first_run(file, tmp_path):
    """Data that need `follow_links` or `max_bad` are opened with them."""
    opened = []

    class Opened(Exception):
        pass

    def note(source, plan, **arguments):
        opened.append((arguments["follow_links"], arguments["max_bad"]))
        raise Opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.study.run.open_data", note)
        patch.setattr("weft.train.plan.open_data", note)
        settings = {"data.follow_links": True, "data.max_bad": 0.7}
        with pytest.raises(Opened):
            run_study(file, "digits", settings=settings, out=tmp_path / "study", quiet=True)
        with pytest.raises(Opened):
            compare("digits", settings=settings, out=tmp_path / "compared", quiet=True)
    assert opened == [(True, 0.7)] * 2
