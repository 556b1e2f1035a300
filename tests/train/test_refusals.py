"""What can be refused is refused before the first training step, and leaves nothing behind."""

from __future__ import annotations

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
from weft.train import RunResult, begin, evaluate, loop, preview, run, train
from weft.train import plan as planning
from weft.train.track import Tracker

BASE = {"epochs": 1, "batch_size": 12, "device": "cpu"}
LEVIT = {"model": "levit_nano_32", "model_args.depth": [1, 1, 1]}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise", per_class=6)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
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


def named(name: str) -> Callable[[Place], dict[str, Any]]:
    """A class of that name."""

    def prepare(place: Place) -> dict[str, Any]:
        (place.data / "class1").rename(place.data / name)
        return {}

    return prepare


def at(path: str | bytes) -> Callable[[Place], dict[str, Any]]:
    """A run directory of that path."""

    def prepare(place: Place) -> dict[str, Any]:
        place.out = place.folder / os.fsdecode(path)
        return {}

    return prepare


def foreign(place: Place) -> dict[str, Any]:
    place.out.mkdir(parents=True)
    (place.out / "thesis.tex").write_text("years of work")
    return {}


def below_a_file(place: Place) -> dict[str, Any]:
    (place.folder / "file").write_text("")
    place.out = place.folder / "file" / "run"
    return {}


def teacher_of(name: str, classes: int, **arguments: Any) -> Callable[[Place], dict[str, Any]]:
    def prepare(place: Place) -> dict[str, Any]:
        save_model_dir(create_model(name, num_classes=classes, **arguments), place.folder / "teacher")
        return {"distill.teacher": str(place.folder / "teacher")}

    return prepare


def no_weights(place: Place) -> dict[str, Any]:
    (place.folder / "notes.pth").write_text("no weights")
    return {"start_from": str(place.folder / "notes.pth")}


def single_class(place: Place) -> dict[str, Any]:
    shutil.rmtree(place.data / "class1")
    shutil.rmtree(place.data / "class2")
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


def messages(**settings: Any) -> Callable[[Place], dict[str, Any]]:
    return lambda place: {key.replace("__", "."): value for key, value in settings.items()}


CASES: dict[str, tuple[Callable[[Place], dict[str, Any]], int, str]] = {
    "class with a newline": (named("a\nb"), 3, r"Class names must have no control characters; got 'a\\nb'"),
    "class with a bidirectional override": (named("a\u202eb"), 3, "no control characters"),
    "single class": (single_class, 3, "at least two classes"),
    "held-out images that cannot be read": (broken_held_out, 3, "0 held out"),
    "out that is no text": (at(b"caf\xe9"), 2, "must be a path in UTF-8"),
    "out with NUL": (at("a\0b"), 2, "without NUL"),
    "out with too long a name": (at("new/" + "x" * 256), 6, "File name too long"),
    "out with too long a path for its files": (at("/".join(["new", *["x" * 200] * 19, "y" * 160])), 6, "too long"),
    "out below a file": (below_a_file, 6, "must be writable"),
    "out where nothing can be written": (at("/proc/new/run"), 6, "/proc/new/run must be writable"),
    "out that holds something else": (foreign, 2, "must be new or empty"),
    "out in the data": (at("data/run"), 2, "must be outside the data folder"),
    "unknown tracker": (messages(track="tensorbord"), 2, "Unknown tracker"),
    "tracker that cannot start": (messages(track="wandb"), 2, "--track wandb must be able to start; No API key"),
    "teacher that does not exist": (messages(distill__teacher="nowhere"), 2, "Unknown model 'nowhere'"),
    "teacher of other classes": (teacher_of("levit_nano_32", 4), 2, "has 4, the dataset 3"),
    "teacher that cannot take the size": (teacher_of("inception_v3", 3), 2, "must support 32x32 pixels"),
    "weights that do not exist": (messages(start_from="nowhere"), 4, "nowhere is none of these"),
    "weights that are none": (no_weights, 4, "must hold weights"),
    "too few states": (messages(save__keep=1), 2, "save.keep must be"),
    "states every zeroth step": (messages(save__every_steps=0), 2, "save.every_steps must be"),
    "evaluation every zeroth epoch": (messages(evaluate_every=0), 2, "evaluate_every must be"),
    "epochs and steps": (messages(steps=5), 2, "epochs and steps exclude each other"),
    "too small an image size": (messages(img_size=4), 2, "img_size must be"),
    "image size below a patch": (
        messages(model="vit_tiny_patch16_224", img_size=8),
        2,
        "must support these images",
    ),
    "image size below a network's strides": (messages(model="vgg11", img_size=16), 2, "at 16x16 pixels; .*too small"),
    "batches of one image": (messages(model="resnet10t", img_size=32, batch_size=1), 2, "batches of 1 at 32x32 pixels"),
    "odd batch for mixup": (messages(augment__mixup=0.5, batch_size=11), 2, "mix pairs of images"),
    "parts that do not divide": (messages(accumulate=5), 2, "must be divisible into equal batches"),
    "network without checkpointing": (
        messages(model="vgg11", img_size=32, grad_checkpointing=True),
        2,
        "not supported",
    ),
    "augmentation policy of another language": (
        messages(augment__rand_augment="strong"),
        2,
        "must be a policy such as",
    ),
    "unknown argument of the model": (messages(model_args__depht=3), 2, "depht"),
    "unknown setting": (messages(optim__learning_rate=3), 2, "Unknown setting"),
    "time that is none": (messages(max_time="soon"), 2, "--max-time must be a duration"),
    "no GPU": (messages(device="cuda"), 2, "needs a GPU"),
}


@pytest.fixture
def no_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, and no address that could be reached."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("no_accounts")
@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_takes_no_step_and_leaves_nothing(
    name: str, pictures: Path, tmp_path: Path, steps: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    prepare, code, message = CASES[name]
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    if "wandb" in message:
        show_wandb()
        pytest.importorskip("wandb")
    place = Place(tmp_path, pictures)
    settings = {**BASE, **LEVIT, **prepare(place)}
    if settings["model"] != LEVIT["model"]:
        del settings["model_args.depth"]
    track, max_time = settings.pop("track", None), settings.pop("max_time", None)
    words = ["train", str(place.data), "--out", str(place.out), "--quiet"]
    words += [] if track is None else ["--track", track]
    words += [] if max_time is None else ["--max-time", max_time]
    before = sorted(tmp_path.rglob("*"))
    assert main([*words, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]) == code
    output = capfd.readouterr().err
    assert re.search(message, output), output
    assert "Traceback" not in output
    assert steps == []
    after = [path for path in sorted(tmp_path.rglob("*")) if path.relative_to(tmp_path).parts[0] != "home"]
    assert after == before


def test_a_network_that_its_name_does_not_describe(
    pictures: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = planning.build_model

    def pruned(*args: Any) -> torch.nn.Module:
        model = build(*args)
        model.blocks = model.blocks[:1]  # type: ignore[index]
        return model

    monkeypatch.setattr(planning, "build_model", pruned)
    with pytest.raises(UsageError, match="was changed after it was built"):
        train(pictures, "ceit_nano_32", settings=BASE, out=tmp_path / "new" / "run", quiet=True)
    assert steps == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compilation_without_a_compiler(
    pictures: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"g\+\+.*Or set compile=false; compile=true needs a C\+\+ compiler"):
        train(pictures, settings={**BASE, **LEVIT, "compile": True}, out=tmp_path / "run", quiet=True)
    assert steps == []
    assert not (tmp_path / "run").exists()


def test_what_vanishes_while_a_run_begins_leaves_the_run_that_was_there(
    pictures: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--force replaces a run by one that begins, and not by one that is refused."""
    old = tmp_path / "run"
    train(pictures, settings={**BASE, **LEVIT}, out=old, quiet=True)
    before = {path: path.is_file() and path.read_bytes() for path in sorted(old.rglob("*")) if path.name != "lock"}

    def vanished(*args: Any) -> None:
        raise DataError("class0/000.png was there a moment ago, and is not any more.")

    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(begin, "fingerprint", vanished)
        with pytest.raises(DataError, match="a moment ago"):
            train(pictures, settings={**BASE, **LEVIT, "seed": 1}, out=old, force=True, quiet=True)
    after = {path: path.is_file() and path.read_bytes() for path in sorted(old.rglob("*")) if path.name != "lock"}
    assert after == before
    assert steps == []
    train(pictures, settings={**BASE, **LEVIT, "seed": 1}, out=old, force=True, quiet=True)
    assert (old / "last" / "model.safetensors").read_bytes() != before[old / "last" / "model.safetensors"]
    assert not list(old.glob(".*"))


def test_an_interruption_just_before_training_leaves_no_directory(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its name would be taken, by a run that cannot be resumed."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(begin, "batch_arithmetic", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(pictures, settings={**BASE, **LEVIT}, out=tmp_path / "run", track="tensorboard", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_cannot_start_leaves_the_run_that_was_there(
    pictures: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, start = tmp_path / "run", begin.Tracker
    train(pictures, settings={**BASE, **LEVIT}, out=old, quiet=True)
    before = {path: path.is_file() and path.read_bytes() for path in sorted(old.rglob("*")) if path.name != "lock"}

    def offline(names: Sequence[str], *more: Any) -> Tracker:
        if names:
            raise UsageError("--track wandb must be able to start; there is no network.")
        return start(names, *more)

    steps.clear()
    monkeypatch.setattr(begin, "Tracker", offline)
    with pytest.raises(UsageError, match="no network"):
        train(pictures, settings={**BASE, **LEVIT, "seed": 1}, out=old, track="wandb", force=True, quiet=True)
    after = {path: path.is_file() and path.read_bytes() for path in sorted(old.rglob("*")) if path.name != "lock"}
    assert after == before
    assert steps == []


def test_without_force_a_file_that_appears_while_the_plan_is_made_stays(
    pictures: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, rehearse = tmp_path / "run" / "best" / "theirs.txt", begin.rehearse_saving

    def rehearse_slowly(*arguments: Any) -> None:
        rehearse(*arguments)
        theirs.parent.mkdir()
        theirs.write_text("theirs")

    monkeypatch.setattr(begin, "rehearse_saving", rehearse_slowly)
    with pytest.raises(UsageError, match="must be new or empty"):
        train(pictures, settings={**BASE, **LEVIT}, out=tmp_path / "run", quiet=True)
    assert theirs.read_text() == "theirs"
    assert steps == []


def test_a_probe_that_cannot_be_saved_leaves_nothing(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be neither resumed, for lack of a state, nor replaced without --force."""

    def full(*args: Any, **more: Any) -> None:
        raise StorageError("no space is left")

    monkeypatch.setattr(run, "save_model_dir", full)
    with pytest.raises(StorageError, match="no space"):
        train(pictures, settings={**BASE, **LEVIT, "head_init": "probe"}, out=tmp_path / "run", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_does_not_suffice_is_met_before_the_first_step(
    pictures: Path, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(self: loop.Learner, *args: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(loop.Learner, "dry_run", greedy)
    with pytest.raises(UsageError, match=r"A step must fit into memory; batch_size 12 in 1 part\(s\) does not"):
        train(pictures, settings={**BASE, **LEVIT}, out=tmp_path / "run", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", tiny.ARGUMENTS)
def test_the_rehearsal_changes_nothing(
    model: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**tiny.EVERYTHING, **tiny.ARGUMENTS[model], "batch_size": 4, "epochs": 1}
    train(pictures, model, settings=settings, out=tmp_path / "with", quiet=True)
    monkeypatch.setattr(loop.Learner, "dry_run", lambda *args: None)
    train(pictures, model, settings=settings, out=tmp_path / "without", quiet=True)
    tiny.assert_same_run(tmp_path / "with", tmp_path / "without")


def test_data_with_a_split_may_hold_its_runs(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "data" / "train")
    train(tmp_path / "data", settings={**BASE, **LEVIT}, out=tmp_path / "data" / "runs" / "one", quiet=True)
    train(resume=tmp_path / "data" / "runs" / "one", quiet=True)
    with pytest.raises(UsageError, match="must be outside the data folder"):
        train(tmp_path / "data", settings={**BASE, **LEVIT}, out=tmp_path / "data" / "train" / "one", quiet=True)


@pytest.mark.parametrize("what", ["out", "real_labels"])
def test_an_evaluation_is_refused_before_it_measures(
    what: str, trained: RunResult, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "measured", lambda *args, **kwargs: pytest.fail("it was measured"))
    (tmp_path / "labels.json").write_text('{"elsewhere": [0]}')
    refused = {
        "out": ({"out": tmp_path / "labels.json" / "evaluated"}, StorageError, "must be writable"),
        "real_labels": (
            {"real_labels": tmp_path / "labels.json"},
            DataError,
            "The ReaL labels must list every image by its name",
        ),
    }
    words, error, message = refused[what]
    with pytest.raises(error, match=message):
        evaluate(trained.out, photos, quiet=True, **words)
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]


def test_a_preview_is_refused_before_the_data_is_read(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "open_splits", lambda *args: pytest.fail("data was opened"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file must be writable"):
        preview(photos, out=tmp_path / "file" / "seen.png")
