"""What can be refused is refused before the first training step, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import show_wandb
from tests.train import tiny
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import create_model
from weft.cli import main
from weft.errors import DataError, StorageError, UsageError
from weft.inference import measurement
from weft.train import begin, evaluate, loop, run, train
from weft.train import plan as planning
from weft.train.track import Tracker

BASE = {"epochs": 1, "batch_size": 12, "device": "cpu", "model": "levit_nano_32", "model_args.depth": [1, 1, 1]}
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def steps(monkeypatch: Patch) -> list[int]:
    """One entry for every training step."""
    taken: list[int] = []
    learn = loop.Learner.train_step

    def counted(self: loop.Learner, *args: Any) -> loop.StepResult:
        taken.append(self.step)
        return learn(self, *args)

    monkeypatch.setattr(loop.Learner, "train_step", counted)
    return taken


class Place:
    """Where a case makes what it needs: `data` is a copy of the pictures, `out` the run directory to be."""

    def __init__(self, folder: Path, pictures: Path) -> None:
        self.folder, self.data, self.out = folder, folder / "data", folder / "new" / "run"
        shutil.copytree(pictures, self.data)


CEIT = {"model": "ceit_nano_32", "model_args.depth": 2}
Prepare = Callable[[Place], dict[str, Any]]


def named(name: str) -> Prepare:
    """A class of that name."""

    def prepare(place: Place) -> dict[str, Any]:
        (place.data / "class1").rename(place.data / name)
        return {}

    return prepare


def at(path: str | bytes) -> Prepare:
    """A run directory of that path."""

    def prepare(place: Place) -> dict[str, Any]:
        place.out = place.folder / os.fsdecode(path)
        return {}

    return prepare


def too_long_for_its_files(place: Place) -> dict[str, Any]:
    """A path that a directory may have, but no file of a run in it: its names need 40 bytes or more."""
    path = place.folder / "new"
    while (missing := 4096 - 30 - len(os.fsencode(path))) > 1:
        path /= "x" * min(missing - 1, 200)
    place.out = path
    return {}


def foreign(place: Place) -> dict[str, Any]:
    place.out.mkdir(parents=True)
    (place.out / "thesis.tex").write_text("years of work")
    return {}


def below_a_file(place: Place) -> dict[str, Any]:
    (place.folder / "file").write_text("")
    place.out = place.folder / "file" / "run"
    return {}


def teacher_of(name: str, classes: int) -> Prepare:
    def prepare(place: Place) -> dict[str, Any]:
        save_model_dir(create_model(name, num_classes=classes), place.folder / "teacher")
        return {"distill.teacher": str(place.folder / "teacher")}

    return prepare


def weights_of_another(place: Place) -> dict[str, Any]:
    save_model_dir(create_model("levit_nano_32", num_classes=3), place.folder / "other")
    return {"start_from": str(place.folder / "other"), **CEIT}


def no_weights(place: Place) -> dict[str, Any]:
    (place.folder / "notes.pth").write_text("no weights")
    return {"start_from": str(place.folder / "notes.pth")}


def images(per_class: int, classes: int) -> Prepare:
    """So many images in so many classes."""

    def prepare(place: Place) -> dict[str, Any]:
        shutil.rmtree(place.data)
        tiny.paint(place.data, per_class, classes)
        return {}

    return prepare


def gone(place: Place) -> dict[str, Any]:
    shutil.rmtree(place.data)
    return {}


def broken_held_out(place: Place) -> dict[str, Any]:
    """A split of its own whose held-out images cannot be read."""
    inner = place.data / "train"
    inner.mkdir()
    for number in range(3):
        (place.data / f"class{number}").rename(inner / f"class{number}")
        (place.data / "val" / f"class{number}").mkdir(parents=True)
        (place.data / "val" / f"class{number}" / "0.png").write_bytes(b"no image")
    return {"data.max_bad": 1}


VGG = {"model": "vgg11", "model_args.mlp_ratio": 0.05}
CASES: dict[str, tuple[Prepare | dict[str, Any], int, str]] = {
    "class with a newline": (named("a\nb"), 3, r"Class names must have no control characters; got 'a\\nb'"),
    "no data": (gone, 3, "'.*data' does not"),
    "single class": (images(6, classes=1), 3, "at least two classes"),
    "an image per class": (images(1, classes=3), 3, "3 for training, 0 held out"),
    "held-out images that cannot be read": (broken_held_out, 3, "0 held out"),
    "out that is no text": (at(b"caf\xe9"), 2, "must be a path in UTF-8"),
    "out with NUL": (at("a\0b"), 2, "without NUL"),
    "out with too long a name": (at("new/" + "x" * 256), 6, "File name too long"),
    "out with too long a path for its files": (too_long_for_its_files, 6, "too long"),
    "out below a file": (below_a_file, 6, "must be writable"),
    "out where nothing can be written": (at("/proc/new/run"), 6, "/proc/new/run must be writable"),
    "out that holds something else": (foreign, 2, "must be new or empty"),
    "unknown tracker": ({"--track": "tensorbord"}, 2, "Unknown tracker 'tensorbord'. Nearest: tensorboard"),
    "tracker that cannot start": ({"--track": "wandb"}, 2, "--track wandb must be able to start; No API key"),
    "teacher that does not exist": ({"distill.teacher": "nowhere"}, 2, "Unknown model 'nowhere'"),
    "teacher of other classes": (teacher_of("levit_nano_32", 4), 2, "has 4, the dataset 3"),
    "teacher that cannot take the size": (teacher_of("inception_v3", 3), 2, "must support 32x32 pixels"),
    "weights that do not exist": ({"start_from": "nowhere"}, 4, "nowhere is none of these"),
    "weights that are none": (no_weights, 4, "must hold weights"),
    "weights of another network": (weights_of_another, 4, "ceit"),
    "synchronized BatchNorm on a CPU": ({"sync_bn": True}, 2, "sync_bn needs GPUs; .* --set sync_bn=false"),
    "too few states": ({"save.keep": 1}, 2, "save.keep must be"),
    "states every zeroth step": ({"save.every_steps": 0}, 2, "save.every_steps must be"),
    "evaluation every zeroth epoch": ({"evaluate_every": 0}, 2, "evaluate_every must be"),
    "epochs and steps": ({"steps": 5}, 2, "epochs and steps exclude each other"),
    "image size below a patch": ({"model": "vit_tiny_patch16_224", "img_size": 8}, 2, "must support these images"),
    "image size below strides": ({**VGG, "img_size": 16}, 2, "at 16x16 pixels; .*too small"),
    "batches of one image": ({"model": "resnet10t", "img_size": 32, "batch_size": 1}, 2, "batches of 1 at 32x32"),
    "batches of one image and BatchNorm": ({"batch_size": 1}, 2, "at least 2 images per forward pass .* batch_size 1"),
    "parts that do not divide": ({"accumulate": 5}, 2, "must be divisible into equal batches"),
    "pairs in parts of odd size": (
        {"augment.mixup": 0.8, "batch_size": 6, "accumulate": 2},
        2,
        r"pairs of images and need an even batch; got 3 images \(batch_size 6 in 2 parts\)",
    ),
    "checkpointing": ({**VGG, "img_size": 32, "grad_checkpointing": True}, 2, "not supported"),
    "unknown argument of the model": ({"model_args.depht": 3}, 2, r"no constructor value 'depht' .*Nearest: depth"),
}


@pytest.fixture
def no_accounts(tmp_path: Path, monkeypatch: Patch) -> None:
    """No credentials, and no address that could be reached."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("no_accounts")
@pytest.mark.slow_except(*(name for name in CASES if name != "tracker that cannot start"))  # it imports wandb
@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_takes_no_step_and_leaves_nothing(name, few, tmp_path, steps, capfd):
    prepare, code, message = CASES[name]
    if "wandb" in message:
        show_wandb()
        pytest.importorskip("wandb")
    place = Place(tmp_path, few)
    settings = {**BASE, **(prepare(place) if callable(prepare) else prepare)}
    if settings["model"] not in (BASE["model"], CEIT["model"]):
        del settings["model_args.depth"]
    options = ["--track", settings.pop("--track")] if "--track" in settings else []
    before = sorted(tmp_path.rglob("*"))
    arguments = ["train", str(place.data), "--out", str(place.out), "--quiet", *options, *tiny.words(settings)]
    assert main(arguments) == code
    said = capfd.readouterr().err
    assert re.search(message, said), said
    assert "Traceback" not in said
    assert steps == []
    after = [path for path in sorted(tmp_path.rglob("*")) if path.relative_to(tmp_path).parts[0] != "home"]
    assert after == before


def _pruned(build: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> torch.nn.Module:
        model = build(*args)
        model.blocks = model.blocks[:1]
        return model

    return call


NO_MEMORY = tiny.raising(RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."))
FULL = tiny.raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
FAILURES: dict[str, tuple[Any, str, Any, dict[str, Any], type[BaseException], str]] = {
    # what replaces a function of a module, further settings, and the error
    "a network that its name does not describe": (
        planning, "build_model", _pruned(planning.build_model), {"settings": CEIT}, UsageError, "was changed after it"
    ),
    "an interruption just before training": (
        begin, "batch_arithmetic", tiny.raising(KeyboardInterrupt()), {"track": "tensorboard"}, KeyboardInterrupt, ""
    ),
    # it would be neither resumed, for lack of a state, nor replaced without --force
    "a probe that cannot be saved": (
        run, "save_model_dir", FULL, {"settings": {"head_init": "probe"}}, StorageError,
        r"run/best must be writable; No space left on device\. Free some space",
    ),
    "memory that does not suffice": (
        loop.Learner, "dry_run", NO_MEMORY, {}, UsageError, r"must fit into memory; batch_size 12 in 1 part\(s\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_before_the_first_step_leaves_no_directory(failure, few, tmp_path, steps, monkeypatch):
    owner, name, replacement, arguments, error, message = FAILURES[failure]
    monkeypatch.setattr(owner, name, replacement)
    settings = {**BASE, **arguments.get("settings", {})}
    with pytest.raises(error, match=message or None):
        train(few, out=tmp_path / "new" / "run", quiet=True, **{**arguments, "settings": settings})
    assert steps == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compilation_without_a_compiler(few: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"g\+\+.*Or set compile=false; compile=true needs a C\+\+ compiler"):
        train(few, settings={**BASE, "compile": True}, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def content(folder: Path) -> dict[Path, bool | bytes]:
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*")) if path.name != "lock"}


def test_force_replaces_a_run_by_one_that_begins_and_not_by_one_that_is_refused(few, tmp_path, steps, monkeypatch):
    old, tracker = tmp_path / "run", begin.Tracker
    train(few, settings=BASE, out=old, quiet=True)
    before = content(old)
    steps.clear()

    def offline(names: Sequence[str], *more: Any) -> Tracker:
        if names:
            raise UsageError("--track wandb must be able to start; there is no network.")
        return tracker(names, *more)

    gone = tiny.raising(DataError("class0/000.png was there a moment ago, and is not any more."))
    for name, replacement, message in (("fingerprint", gone, "a moment ago"), ("Tracker", offline, "no network")):
        with monkeypatch.context() as patch:
            patch.setattr(begin, name, replacement)
            with pytest.raises((DataError, UsageError), match=message):
                train(few, settings={**BASE, "seed": 1}, out=old, track="wandb", force=True, quiet=True)
        assert content(old) == before
    assert steps == []
    train(few, settings={**BASE, "seed": 1}, out=old, force=True, quiet=True)
    assert content(old)[old / "last" / "model.safetensors"] != before[old / "last" / "model.safetensors"]
    assert not list(old.glob(".*"))


def test_without_force_a_file_that_appears_while_the_plan_is_made_stays(few, tmp_path, steps, monkeypatch):
    theirs, rehearse = tmp_path / "run" / "best" / "theirs.txt", begin.rehearse_saving

    def rehearse_slowly(*arguments: Any) -> None:
        rehearse(*arguments)
        theirs.parent.mkdir()
        theirs.write_text("theirs")

    monkeypatch.setattr(begin, "rehearse_saving", rehearse_slowly)
    with pytest.raises(UsageError, match="must be new or empty"):
        train(few, settings=BASE, out=tmp_path / "run", quiet=True)
    assert theirs.read_text() == "theirs"
    assert steps == []


@pytest.mark.parametrize("model", tiny.ARGUMENTS)
def test_the_rehearsal_changes_nothing(model: str, noise: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Compared after two steps."""
    for name in ("with", "without"):
        with tiny.killed_after(2):
            tiny.run(noise, tmp_path / name, model)
        monkeypatch.setattr(loop.Learner, "dry_run", lambda *args: None)
    first, second = (tiny.state_of(tmp_path / name) for name in ("with", "without"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len({(tmp_path / name / "steps.csv").read_text() for name in ("with", "without")}) == 1


def test_data_with_a_split_may_hold_its_runs(few: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(few, data / "train")
    settings = {**BASE, "epochs": None, "steps": 1}
    train(data, settings=settings, out=data / "runs" / "one", quiet=True)
    train(resume=data / "runs" / "one", quiet=True)
    with pytest.raises(UsageError, match="must be outside the data folder"):
        train(data, settings=settings, out=data / "train" / "one", quiet=True)


@pytest.mark.parametrize("what", ["out", "real_labels"])
def test_an_evaluation_is_refused_before_it_measures(what, trained, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "measured", lambda *args, **kwargs: pytest.fail("it was measured"))
    (tmp_path / "labels.json").write_text('{"elsewhere": [0]}')
    place, error, message = {
        "out": (tmp_path / "labels.json" / "evaluated", StorageError, "must be writable"),
        "real_labels": (tmp_path / "labels.json", DataError, "The ReaL labels must list every image by its name"),
    }[what]
    with pytest.raises(error, match=message):
        evaluate(trained.out, photos, quiet=True, **{what: place})
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]
