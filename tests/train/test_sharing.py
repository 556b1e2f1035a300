"""A model on its way to the hub and back: what is sent, what the card says, and that it answers the same from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import timm
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    Response,
)

import weft.models.registry  # noqa: F401, registers the networks with timm
from tests.train.conftest import COLOURS
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.hub import create_model
from weft.checkpoints.resolve import model_dir
from weft.cli import main
from weft.errors import CheckpointError, UsageError
from weft.recipes import dump, load_recipe
from weft.runs import hub as sharing
from weft.runs.directory import EpochRow, best_of, read_metrics, write_metrics
from weft.runs.hub import _without_paths, model_card, push
from weft.train import RunResult, predict, train
from weft.train.plan import sources_of

REPO = "me/colours"
SMALL = dict(model="levit_nano_32", batch_size=12, device="cpu", quiet=True)


class Hub:
    """What `HfApi` does, to a folder: one for each repository, in the form of the cache."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.created = cache, {}

    def snapshot(self, repo: str) -> Path:
        return self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        self.created.setdefault(repo, private)
        return f"https://hub.example/{repo}"

    def file_exists(self, repo: str, name: str) -> bool:
        return (self.snapshot(repo) / name).exists()

    def create_commit(self, repo: str, operations: list[Any], *, commit_message: str) -> None:
        folder = self.snapshot(repo)
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent.parent / "refs").mkdir(exist_ok=True)
        (folder.parent.parent / "refs" / "main").write_text("0" * 40)
        for operation in operations:
            source = operation.path_or_fileobj
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
            (folder / operation.path_in_repo).write_bytes(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "cache")
    real = create_autospec(HfApi, instance=True)  # calls that the real one would not take are errors
    for name in ("create_repo", "file_exists", "create_commit"):
        getattr(real, name).side_effect = lambda *args, name=name, **arguments: getattr(hub, name)(*args, **arguments)
    monkeypatch.setattr(sharing, "HfApi", lambda: real)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return hub


@pytest.mark.slow
def test_there_and_back(hub: Hub, trained: RunResult, photos: Path, tmp_path: Path) -> None:
    assert push(trained.out, REPO, private=True) == f"https://hub.example/{REPO}"
    assert hub.created == {REPO: True}
    sent = hub.snapshot(REPO)
    files = ["README.md", "config.json", "model.safetensors", "unknown.safetensors"]
    assert sorted(path.name for path in sent.iterdir()) == files
    there, here = predict(f"hf-hub:{REPO}", photos), predict(trained.out, photos)
    assert [answer.as_dict() for answer in there] == [answer.as_dict() for answer in here]
    assert there[0].unknown is not None
    settings = {"optim.lr": 1e-9, "steps": 1}
    again = train(photos, start_from=f"hf-hub:{REPO}", out=tmp_path / "again", settings=settings, **SMALL)
    for folder in (again.out / "last", hub.snapshot(REPO)):
        weights = dict(load_model_dir(folder)[0].named_parameters())
        for name, want in load_model_dir(trained.out / "best")[0].named_parameters():
            assert torch.allclose(weights[name], want, atol=1e-6), name


def test_timm_reads_it(hub: Hub, trained: RunResult) -> None:
    push(trained.out, REPO)
    theirs = timm.create_model(f"hf-hub:{REPO}", pretrained=True).eval()
    ours, _ = load_model_dir(trained.out / "best")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs(images), ours(images))


def test_nothing_is_replaced_unasked(hub: Hub, trained: RunResult) -> None:
    push(trained.out, REPO)
    with pytest.raises(UsageError, match=r"must not have a model yet; me/colours has one\. Pass --force to replace it"):
        push(trained.out, REPO)
    push(trained.out / "last", REPO, force=True)


def test_the_card(trained: RunResult) -> None:
    text = model_card(trained.out, REPO, license="apache-2.0")
    _, head, body = text.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert (fields["license"], fields["pipeline_tag"]) == ("apache-2.0", "image-classification")
    (result,) = fields["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(trained.top1 / 100, abs=1e-5)
    assert f"| held-out top-1 | {trained.top1:.2f} % of 9 images (95 % CI 70.1 to 100.0 %) |" in body
    assert "top-5" not in body  # of three classes
    assert f"| best epoch | {trained.best_epoch}, selected on the same images" in body
    assert "photos: 36 images for training, 9 held out" in body
    assert f"3: {', '.join(COLOURS)}" in body
    assert "hf-hub:me/colours" in body
    assert str(trained.out.parent) not in text
    assert str(Path(trained.data).parent) not in text
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert (recipe["model"], recipe["data"]["source"]) == ("levit_nano_32", "photos")


def test_the_recipe_of_a_card_has_no_paths() -> None:
    """Every setting that names something to read is reduced to its last part."""
    folder = "/home/me/secret"
    keys = ("data.source", "data.unknown_images", "start_from", "distill.teacher")
    recipe = load_recipe(None, [(key, f"{folder}/{key}") for key in keys])
    assert sorted(sources_of(recipe)) == sorted(f"{key}: {folder}/{key}" for key in keys)
    text = dump(_without_paths(recipe, "data.source"))
    assert folder not in text
    assert all(key in text for key in keys)


def test_a_card_of_weights_alone(tmp_path: Path) -> None:
    names = ["a|b", "<img src=x>", "[x](y)"]
    save_model_dir(create_model("cvt_nano_32", num_classes=3), tmp_path / "m", label_names=names)
    text = model_card(tmp_path / "m", REPO)
    assert r"3: a\|b, &lt;img src=x&gt;, \[x\](y)" in text
    assert "held-out" not in text
    assert "Training" not in text
    assert "license" not in text


def test_the_best_epoch_is_that_of_the_run() -> None:
    nan = float("nan")
    scores = [(0.9, 50.0), (0.8, 60.0), (nan, nan), (0.5, 70.0), (0.6, 70.0), (0.5, 70.0)]
    rows = [EpochRow(epoch, 0, 0, 0, 0, loss, top1, 0, 0, 0, 0) for epoch, (loss, top1) in enumerate(scores, 1)]
    best = best_of(rows)
    assert best is not None
    assert best.epoch == 4
    assert best_of(rows[2:3]) is None


@pytest.mark.parametrize(("measure", "epoch"), [("top1", 2), ("balanced", 3), ("loss", 4)])
def test_the_best_epoch_is_that_of_the_measure(measure: str, epoch: int, tmp_path: Path) -> None:
    scores = [(0.9, 50.0, 50.0), (0.8, 95.0, 50.0), (0.7, 90.0, 80.0), (0.6, 94.0, 70.0), (0.6, 93.0, 80.0)]
    rows = [
        EpochRow(number, 0, 0, 0, 0, loss, top1, 0, 0, 0, 0, balanced)
        for number, (loss, top1, balanced) in enumerate(scores[:4], 1)
    ]
    write_metrics(tmp_path / "metrics.csv", rows)
    for history in (rows, read_metrics(tmp_path / "metrics.csv")):
        best = best_of(history, measure)
        assert best is not None
        assert best.epoch == epoch


def test_the_best_epoch_does_not_depend_on_who_asks(tmp_path: Path) -> None:
    """Epoch by epoch as in training, over the whole history, and from metrics.csv, which rounds."""
    random = np.random.default_rng(0)
    for trial in range(20):
        losses = 0.5 + random.integers(0, 3, 12) * random.choice([1e-9, 1e-2], 12)
        losses[random.integers(0, 12)] = np.nan  # outputs that overflowed
        top1 = 50 + random.integers(0, 2, 12) * random.choice([1e-9, 1.0])
        rows = [
            EpochRow(epoch, 0, 0.0, 0.0, 0.0, loss, accuracy, 0.0, 0.0, 0.0, 0.0)
            for epoch, (loss, accuracy) in enumerate(zip(losses.tolist(), top1.tolist(), strict=True), 1)
        ]
        saved = [row for place, row in enumerate(rows, 1) if best_of(rows[:place]) is row]  # as `best/` is written
        write_metrics(tmp_path / "metrics.csv", rows)
        read = best_of(read_metrics(tmp_path / "metrics.csv"))
        assert read is not None
        assert saved[-1] is best_of(rows), trial
        assert saved[-1].epoch == read.epoch, trial


def test_a_card_tells_no_places(trained: RunResult, tmp_path: Path) -> None:
    run = shutil.copytree(trained.out, tmp_path / "run")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe |= {"start_from": "/home/me/secret/weights.pth", "environment": {"train_images": "many"}}
    recipe["distill"]["teacher"] = "hf-hub:me/teacher"
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    text = model_card(run, REPO)
    assert "start_from: weights.pth" in text
    assert "teacher: hf-hub:me/teacher" in text
    assert "secret" not in text
    assert "| data | photos |" in text


def test_a_record_that_was_changed(trained: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(trained.out, tmp_path / "run")
    monkeypatch.chdir(run / "best")
    assert f"| best epoch | {trained.best_epoch}, selected" in model_card(".", REPO)
    (run / "metrics.csv").write_text("epoch,top1\n1,many\n")
    with pytest.raises(CheckpointError, match=r"metrics\.csv must have the columns and values that the run wrote"):
        model_card(run, REPO)


def test_a_teacher_from_the_hub(hub: Hub, trained: RunResult, photos: Path, tmp_path: Path) -> None:
    push(trained.out, REPO)
    settings = {"distill.teacher": f"hf-hub:{REPO}", "steps": 1}
    assert train(photos, out=tmp_path / "pupil", settings=settings, **SMALL).epochs == 1


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (LocalTokenNotFoundError("no token"), r"me/colours needs a login to the hub; you are not logged in\. Run"),
        (HTTPError(""), r"request to the hub failed for me/colours: HTTPError"),
        (OSError("the cable is out\nand more"), r"request to the hub failed for me/colours: the cable is out\.$"),
    ],
)
def test_what_the_hub_says(
    problem: Exception, message: str, hub: Hub, trained: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise problem

    monkeypatch.setattr(hub, "create_repo", fail)
    with pytest.raises(CheckpointError, match=message):
        push(trained.out, REPO)


def test_answers_of_the_hub(hub: Hub, trained: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = type("Asked", (), {"method": "POST", "url": "https://hub.example"})()
    response = Response(403, request=asked)
    for kind, message in (
        (HfHubHTTPError, "request to the hub failed for me/colours: no rights"),
        (RepositoryNotFoundError, "me/colours must exist on the hub; it does not, or it is private"),
    ):

        def fail(*args: object, kind: type[HfHubHTTPError] = kind, **kwargs: object) -> str:
            raise kind("no rights", response=response)

        monkeypatch.setattr(hub, "create_repo", fail)
        with pytest.raises(CheckpointError, match=message):
            push(trained.out, REPO)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf-hub:me/nowhere", "me/nowhere must be on the hub or in its cache; it is not in the cache"),
        ("hf-hub:a/b/c/d", "must be named OWNER/NAME; got 'a/b/c/d'"),
        ("hf-hub:me/colours@v2", "me/colours must be on the hub or in its cache"),
    ],
)
def test_models_that_are_not_there(name: str, message: str, hub: Hub, trained: RunResult) -> None:
    push(trained.out, REPO)
    with pytest.raises(CheckpointError, match=message):
        model_dir(name)


def test_a_damaged_copy_is_noticed(hub: Hub, trained: RunResult) -> None:
    push(trained.out, REPO)
    weights = hub.snapshot(REPO) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="must have the sha256 that"):
        load_model_dir(model_dir(f"hf-hub:{REPO}"))


def test_on_the_command_line(hub: Hub, trained: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(trained.out), REPO, "--print-card"]) == 0
    assert capsys.readouterr().out == model_card(trained.out, REPO)
    assert hub.created == {}
    assert main(["push", str(trained.out), REPO]) == 0
    assert capsys.readouterr().out == f"https://hub.example/{REPO}\n"
    assert main(["push", str(trained.out), "../me"]) == 4
    assert "must be named OWNER/NAME; got '../me'" in capsys.readouterr().err
    assert main(["push", str(tmp_path), REPO]) == 4
    assert "is neither" in capsys.readouterr().err
    folder = shutil.copytree(trained.out / "best", tmp_path / "export")
    config = folder / "config.json"
    export = {"version": 1, "format": "onnx", "precision": "fp32", "input": [3, 32, 32], "sha256": {}}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"artefact": export}))
    assert main(["push", str(folder), REPO, "--force"]) == 2
    assert "is an export. Push the run that it was exported from." in capsys.readouterr().err
