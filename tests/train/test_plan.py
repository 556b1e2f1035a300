"""The plan of a run: `train`, `find_lr` and `preview` have the same one, and recipe.yaml records it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import weft
from tests.data.pictures import Whole
from tests.train import tiny
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.data import open_data
from weft.errors import UsageError
from weft.machine.runtime import Runtime
from weft.recipes import Recipe, load_recipe
from weft.train import decisions, find_lr, loop, preview, train
from weft.train.plan import Plan, training_images

LITE = "tf_efficientnet_lite0"  # its weights are in a package
HUB = "levit_256"  # those of recipe finetune are on the hub
NANO = {"model": "levit_nano_32", "model_args.depth": [1, 1, 1], "batch_size": 12, "device": "cpu"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.coloured(tmp_path_factory.mktemp("data") / "photos", per_class=7)


@pytest.fixture(scope="module")
def start(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from."""
    out = tmp_path_factory.mktemp("runs") / "start"
    return train(few, settings={**NANO, "epochs": 1, "seed": 5}, out=out, quiet=True).out


@pytest.fixture(params=["hub", "package", "nothing"])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Public weights that can be had; none of them are loaded."""
    monkeypatch.setattr(decisions, "is_reachable", lambda: request.param == "hub")
    monkeypatch.setattr(decisions, "is_cached", lambda name: False)
    monkeypatch.setattr(
        decisions, "bundle_of", lambda name: name if (name, request.param) == (LITE, "package") else None
    )
    return request.param


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public weights of every network: all values are the same."""

    def create(name: str, *, pretrained: bool = False, **arguments: Any) -> nn.Module:
        model = create_model(name, **arguments)
        if pretrained:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.25)
        return model

    monkeypatch.setattr("weft.train.network.create_model", create)


class Caught(Exception):
    """Carries a value out of a run that begins."""


def caught(call: Callable[[], object]) -> Any:
    with pytest.raises(Caught) as error:
        call()
    return error.value.args[0]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, a sweep and a preview end with their plan. No network is built, and no step is timed."""

    def build(recipe: Recipe, num_classes: int) -> nn.Module:
        assert not recipe.pretrained, "a preview loads no weights"
        return nn.Identity()

    monkeypatch.setattr("weft.train.series.in_series", lambda plan: plan)  # training alone looks for series
    monkeypatch.setattr("weft.train.begin.start", lambda plan, *_, **__: _raise(plan))
    monkeypatch.setattr("weft.train.lr_finder.sweep_lr", lambda plan, *_, **__: _raise(plan))
    monkeypatch.setattr("weft.train.augment_preview.augmented_figure", lambda recipe, *_: _raise(recipe))
    monkeypatch.setattr("weft.train.plan.build_model", build)
    monkeypatch.setattr("weft.train.decisions.find_batch_size", lambda *_: (16, "Batch size 16."))
    monkeypatch.setattr(
        "weft.train.decisions.find_precision", lambda recipe, num_classes, runtime: (runtime, "Precision.")
    )


def _raise(value: object) -> None:
    raise Caught(value)


REQUESTS: dict[str, dict[str, Any]] = {
    "few images": {},
    "few images, with settings": {"settings": {"optim.lr": 0.5, "augment.scale": [0.5, 1]}, "epochs": 3},
    "from scratch": {"from_scratch": True},
    "a model": {"model": "levit_128s"},
    "a recipe": {"recipe": "small_images"},
    "a recipe with weights": {"recipe": "finetune"},
    "a recipe with weights, from scratch": {"recipe": "finetune", "from_scratch": True},
    "a recipe and a model": {"recipe": "small_folder", "model": "cvt_13"},
    "a batch size": {"batch_size": "auto", "from_scratch": True},
    "a precision": {"precision": "bf16", "img_size": 96},
    "a run": {"start_from": "START"},
    "a run and a recipe with weights": {"start_from": "START", "recipe": "finetune"},
    "folds": {"folds": 3, "seed": 4, "device": "cpu"},
}


@pytest.mark.usefixtures("plans", "weights")
@pytest.mark.parametrize("name", REQUESTS)
def test_find_lr_and_preview_see_the_plan_of_train(name: str, photos: Path, start: Path, tmp_path: Path) -> None:
    request = {key: str(start) if value == "START" else value for key, value in REQUESTS[name].items()}
    plan: Plan = caught(lambda: train(photos, out=tmp_path / "run", quiet=True, **request))
    swept: Plan = caught(lambda: find_lr(photos, quiet=True, **request))
    shown: Recipe = caught(lambda: preview(photos, out=tmp_path / "seen.png", quiet=True, **request))
    assert swept.recipe == plan.recipe
    assert (swept.notes, swept.runtime.precision) == (plan.notes, plan.runtime.precision)
    assert list(swept.splits.val.keys) == list(plan.splits.val.keys)
    if request.get("batch_size") == "auto":
        assert shown.batch_size == "auto", "a preview times no steps"
        shown = dataclasses.replace(shown, batch_size=plan.recipe.batch_size)
    assert shown == plan.recipe


@pytest.mark.usefixtures("plans")
def test_few_images_are_planned_from_the_weights_at_hand(weights: str, photos: Path) -> None:
    """What the plans above are, so that all three cannot be wrong together."""
    recipe = caught(lambda: find_lr(photos, quiet=True)).recipe
    model = {"hub": HUB, "package": LITE, "nothing": "levit_128s"}[weights]
    assert (recipe.model, recipe.pretrained) == (model, weights != "nothing")
    assert recipe.head_init == ("random" if weights == "nothing" else "probe")
    scratch = caught(lambda: find_lr(photos, from_scratch=True, quiet=True)).recipe
    assert (scratch.model, scratch.pretrained, scratch.head_init) == ("levit_128s", False, "random")
    named = caught(lambda: find_lr(photos, recipe="finetune", quiet=True)).recipe
    assert named.model == (LITE if weights == "package" else HUB)


@pytest.mark.usefixtures("plans", "weights")
def test_notes_of_the_plan_are_printed_before_a_sweep(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = caught(lambda: find_lr(photos))
    printed = " ".join(capsys.readouterr().err.split())
    assert all(note in printed for note in plan.notes)


STARTS: dict[str, dict[str, Any]] = {
    "random weights": {},
    "public weights and a fitted classifier": {"pretrained": True, "head_init": "probe"},
    "a run": {"start_from": "START"},
    "a run and a fitted classifier": {"start_from": "START", "head_init": "probe"},
}


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("name", STARTS)
def test_find_lr_starts_from_the_weights_that_training_starts_from(name, few, start, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))

    def stop(learner: loop.Learner, *_: object) -> None:
        _raise({key: value.clone() for key, value in learner.model.state_dict().items()})

    more = {key: str(start) if value == "START" else value for key, value in STARTS[name].items()}
    settings = {**NANO, "epochs": 2, "data.group": "none", **more}
    with tiny.at_step(0, stop):
        trained = caught(lambda: train(few, settings=settings, out=tmp_path / "run", quiet=True))
        swept: dict[str, Tensor] = caught(lambda: find_lr(few, settings=settings, quiet=True))
    assert trained.keys() == swept.keys()
    assert all(torch.equal(trained[key], swept[key]) for key in trained)


def test_find_lr_trains_as_the_run_would(few: Path, start: Path) -> None:
    """With the teacher of the run, and one epoch after another."""
    learners: list[loop.Learner] = []
    settings = {**NANO, "batch_size": 6, "epochs": 1, "distill.teacher": str(start / "best"), "optim.ema_decay": 0.9}
    with tiny.at_step(3, lambda learner, *_: learners.append(learner)):
        finding = find_lr(few, settings=settings, steps=4, quiet=True)
    assert [point.lr for point in finding.points] == pytest.approx([1e-7, 1e-7 ** (2 / 3), 1e-7 ** (1 / 3), 1])
    (learner,) = learners
    assert learner.teacher is not None
    assert learner.ema is not None


PREPARED = "{} prepares a new run, and --resume continues one. Omit one of them."
EXCLUSIVE = "{} and {} exclude each other; got both. Omit one of them."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--find-lr --resume run", PREPARED.format("--find-lr")),
        ("--preview x.png --resume run", PREPARED.format("--preview")),
        ("--plan --resume run", PREPARED.format("--plan")),
        ("--plan --find-lr", EXCLUSIVE.format("--plan", "--find-lr")),
        ("--plan --preview x.png", EXCLUSIVE.format("--plan", "--preview")),
        ("--find-lr --preview x.png", EXCLUSIVE.format("--find-lr", "--preview")),
    ],
)
def test_one_purpose_at_a_time(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "photos", *options.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("draft", "size"), [(True, (100, 150)), (False, (400, 600))])
def test_large_photos_are_decoded_smaller(draft: bool, size: tuple[int, int], tmp_path: Path) -> None:
    """Twice 32 pixels must be left on both sides: of 400 a quarter is enough, an eighth is not."""
    for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (600, 400)).save(tmp_path / name)
    recipe = load_recipe(None, [("data.draft", draft)])
    images = training_images(recipe, open_data(tmp_path).train, weft.create_model("ceit_nano_32"))
    images.transform = Whole()
    assert images.__getitems__([(0, 0)]).pixels.shape[1:] == (*size, 3)


# recipe.yaml


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("name", ["random weights", "public weights", "a run", "a resumed run", "a changed run"])
def test_recipe_yaml_is_the_recipe_that_trained(name, few, start, tmp_path, monkeypatch):
    trained: list[Recipe] = []
    monkeypatch.setattr(
        "weft.train.decisions.find_precision", lambda recipe, num_classes, runtime: (runtime, "Precision.")
    )
    out = tmp_path / "run"
    settings: dict[str, Any] = {**NANO, "batch_size": 6, "precision": "auto", "optim.lr": "3e-4", "save.every_steps": 1}
    settings |= {"public weights": {"pretrained": True}, "a run": {"start_from": str(start)}}.get(name, {})
    with tiny.killed_after(1), tiny.at_step(0, lambda learner, *_: trained.append(learner.recipe)):
        train(few, settings={**settings, "epochs": 1}, out=out, quiet=True)
    if name in ("a resumed run", "a changed run"):
        changed = {"optim.lr": 1e-5} if name == "a changed run" else {}
        with tiny.at_step(1, lambda learner, *_: _raise(learner.recipe)):
            trained = [caught(lambda: train(resume=out, settings=changed, override=bool(changed), quiet=True))]
        assert trained[0].optim.lr == (1e-5 if changed else 3e-4)
    assert [dataclasses.replace(recipe, environment={}) for recipe in trained] == [load_recipe(out / "recipe.yaml")]


# Rules between settings

FROZEN = {"optim.freeze": "backbone"}


@pytest.mark.usefixtures("plans")
def test_frozen_layers_need_weights_in_the_plan_and_not_in_the_defaults(weights, photos, start, tmp_path):
    more = {"out": tmp_path / "run", "quiet": True}
    allowed: list[dict[str, Any]] = [{"recipe": "finetune"}, {"start_from": str(start)}]
    refused: list[dict[str, Any]] = [{"from_scratch": True}, {"model": "levit_128s"}, {"recipe": "small_images"}]
    refused += [{"recipe": "finetune", "from_scratch": True}]
    (refused if weights == "nothing" else allowed).append({})  # weft chooses, with a note
    for request in allowed:
        plan = caught(lambda request=request: train(photos, settings=FROZEN, **more, **request))
        assert plan.recipe.optim.freeze == "backbone"
        assert plan.recipe.pretrained or plan.recipe.start_from
    for request in refused:
        with pytest.raises(UsageError, match=r"freeze: backbone needs trained weights; .* starts from random ones"):
            train(photos, settings=FROZEN, **more, **request)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pretrained": True}, "--from-scratch and pretrained: true exclude each other"),
        ({"head_init": "probe"}, "--from-scratch and head_init: probe exclude each other"),
    ],
)
def test_random_weights_that_the_user_contradicts_are_refused(settings, message, few, tmp_path):
    with pytest.raises(UsageError, match=message):
        train(few, settings={**NANO, **settings}, from_scratch=True, out=tmp_path / "run", quiet=True)


def stopped_early(few: Path, out: Path, **settings: Any) -> Path:
    """A run that was killed after its first step."""
    with tiny.killed_after(1):
        train(few, settings={**NANO, "epochs": 2, "save.every_steps": 1, **settings}, out=out, quiet=True)
    return out


@pytest.mark.parametrize("start_freeze", ["none", "backbone"])
def test_a_resumed_run_keeps_what_is_frozen(start_freeze: str, few: Path, start: Path, tmp_path: Path) -> None:
    """The optimizer's state is that of the weights that were trained. Said again, the value is no change."""
    out = stopped_early(few, tmp_path / "run", **{"optim.freeze": start_freeze, "start_from": str(start)})
    other = "none" if start_freeze == "backbone" else "backbone"
    with pytest.raises(UsageError, match=f"cannot change its optim.freeze; in .* is {start_freeze}, got {other}"):
        train(resume=out, settings={"optim.freeze": other}, override=True, quiet=True)
    with tiny.killed_after(1):
        train(resume=out, settings={"optim.freeze": start_freeze}, quiet=True)


def test_a_resumed_run_keeps_the_rules_and_the_device(few, tmp_path, monkeypatch):
    out = stopped_early(few, tmp_path / "run", **{"data.sampling": "balanced"})
    with pytest.raises(UsageError, match=r"got data\.sampling: balanced and loss\.class_weights: balanced"):
        train(resume=out, settings={"loss.class_weights": "balanced"}, override=True, quiet=True)
    recipe = out / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("device: cpu", "device: cuda"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="device cuda needs a GPU"):
        train(resume=out, quiet=True)


# Several processes


@pytest.mark.parametrize("option", ["--find-lr", "--preview"])
def test_only_the_first_process_prints_and_writes(option, few, tmp_path, monkeypatch, capsys):
    seen = tmp_path / "seen.png"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(Runtime, "is_main", property(lambda self: False))
    monkeypatch.setattr("weft.train.lr_finder.DIVERGED", 0.0)  # it ends after a step
    more = [option] if option == "--find-lr" else [option, str(seen)]
    assert main(["train", str(few), *tiny.words({**NANO, "epochs": 1}), *more]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert not seen.exists()


@pytest.mark.usefixtures("plans")
def test_all_processes_start_from_the_weights_that_the_first_one_finds(photos, monkeypatch):
    """The hub may reply to one of them only."""
    monkeypatch.setattr(decisions, "is_cached", lambda name: False)
    monkeypatch.setattr(decisions, "bundle_of", lambda name: None)
    requests: list[dict[str, Any]] = [{}, {"recipe": "finetune"}]
    for request in requests:
        gathered: list[Any] = []
        monkeypatch.setattr(decisions, "is_reachable", lambda: True)
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "gather", lambda self, value, gathered=gathered: gathered.append(value) or [value])
            first = caught(lambda request=request: find_lr(photos, quiet=True, **request)).recipe
        replies = iter(gathered)
        monkeypatch.setattr(decisions, "is_reachable", lambda: False)
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "gather", lambda self, value, replies=replies: [next(replies), value])
            assert caught(lambda request=request: find_lr(photos, quiet=True, **request)).recipe == first
        assert first.model == HUB


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--find-lr", "--preview"])
def test_two_processes_print_once(option: str, few: Path, tmp_path: Path) -> None:
    seen = tmp_path / "new" / "seen.png"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "weft"]
    more = [option] if option == "--find-lr" else [option, str(seen)]
    done = tiny.fresh([*launcher, "train", str(few), *tiny.words({**NANO, "epochs": 1}), *more])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("suggested:" if option == "--find-lr" else "seen.png") == 1
    assert done.stderr.count("Reading data.source") == 1
    assert seen.exists() == (option == "--preview")
