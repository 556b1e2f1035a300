"""A model on its way to the hub and back: what is sent, what the card says, and that it answers the same from there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

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
from tests.train.conftest import COLOURS, paint
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.hub import create_model
from weft.checkpoints.resolve import model_dir
from weft.cli import main
from weft.errors import CheckpointError, UsageError
from weft.recipes import dump, load_recipe
from weft.runs import hub as sharing
from weft.runs.hub import model_card, push
from weft.train import RunResult, predict, train
from weft.train.plan import sources_of

REPO = "me/colours"


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


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    out = tmp_path_factory.mktemp("runs") / "colours"
    settings = {"model_args.depth": [1, 1, 1], "steps": 2, "batch_size": 12, "data.group": "none"}
    return train(photos, out=out, model="levit_nano_32", settings=settings, device="cpu", quiet=True)


def test_a_model_answers_the_same_from_the_hub(hub: Hub, trained: RunResult, photos: Path, tmp_path: Path) -> None:
    """Also timm reads it; a run starts from it, and learns from it as a teacher."""
    name = f"hf-hub:{REPO}"
    assert push(trained.out, REPO, private=True) == f"https://hub.example/{REPO}"
    assert hub.created == {REPO: True}
    files = ["README.md", "config.json", "model.safetensors", "unknown.safetensors"]
    assert sorted(path.name for path in hub.snapshot(REPO).iterdir()) == files
    there, here = predict(name, photos), predict(trained.out, photos)
    assert [answer.as_dict() for answer in there] == [answer.as_dict() for answer in here]
    assert there[0].unknown is not None

    ours, _ = load_model_dir(trained.out / "best")
    theirs = timm.create_model(name, pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs(images), ours(images))

    settings = {"optim.lr": 1e-9, "steps": 1, "distill.teacher": name, "batch_size": 12}
    again = train(photos, start_from=name, out=tmp_path / "again", settings=settings, device="cpu", quiet=True)
    assert again.model == trained.model
    weights = dict(load_model_dir(again.out / "last")[0].named_parameters())
    for key, want in ours.named_parameters():
        assert torch.allclose(weights[key], want, atol=1e-6), key


def test_nothing_is_replaced_unasked(hub: Hub, trained: RunResult) -> None:
    push(trained.out, REPO)
    with pytest.raises(UsageError, match=r"must not have a model yet; me/colours has one\. Pass --force to replace it"):
        push(trained.out, REPO)
    push(trained.out / "last", REPO, force=True)


def test_the_card(trained: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    text = model_card(trained.out, REPO, license="apache-2.0")
    _, head, body = text.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert (fields["license"], fields["pipeline_tag"]) == ("apache-2.0", "image-classification")
    (result,) = fields["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(trained.top1 / 100, abs=1e-5)
    assert f"| held-out top-1 | {trained.top1:.2f} % of 9 images (95 % CI " in body
    assert "top-5" not in body  # of three classes
    assert f"| best epoch | {trained.best_epoch}, selected on the same images" in body
    assert "photos: 36 images for training, 9 held out" in body
    assert f"3: {', '.join(COLOURS)}" in body
    assert "hf-hub:me/colours" in body
    assert str(trained.out.parent) not in text
    assert str(Path(trained.data).parent) not in text
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert (recipe["model"], recipe["data"]["source"]) == ("levit_nano_32", "photos")
    monkeypatch.chdir(trained.out / "best")
    assert model_card(".", REPO, license="apache-2.0") == text


def test_a_card_has_no_paths(trained: RunResult, tmp_path: Path) -> None:
    """Every setting that names something to read is reduced to its last part."""
    run = Path(shutil.copytree(trained.out, tmp_path / "run"))
    keys = ("data.source", "data.unknown_images", "start_from", "distill.teacher")
    recipe = load_recipe(run / "recipe.yaml", [(key, f"/home/me/secret/{key}") for key in keys])
    assert sorted(sources_of(recipe)) == sorted(f"{key}: /home/me/secret/{key}" for key in keys)
    (run / "recipe.yaml").write_text(dump(dataclasses.replace(recipe, environment={"train_images": "many"})))
    text = model_card(run, REPO)
    assert "secret" not in text
    assert all(key in text for key in keys)
    assert "| data | data.source |" in text
    (run / "recipe.yaml").write_text(dump(load_recipe(run / "recipe.yaml", [("distill.teacher", "hf-hub:me/teacher")])))
    assert "teacher: hf-hub:me/teacher" in model_card(run, REPO)


def test_a_card_of_weights_alone(tmp_path: Path) -> None:
    names = ["a|b", "<img src=x>", "[x](y)"]
    save_model_dir(create_model("cvt_nano_32", num_classes=3), tmp_path / "m", label_names=names)
    text = model_card(tmp_path / "m", REPO)
    assert r"3: a\|b, &lt;img src=x&gt;, \[x\](y)" in text
    assert not any(part in text for part in ("held-out", "Training", "license"))


ANSWER = Response(403, request=SimpleNamespace(method="POST", url="https://hub.example"))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (LocalTokenNotFoundError("no token"), "me/colours needs a login to the hub; you are not logged in"),
        (HTTPError(""), "request to the hub failed for me/colours: HTTPError"),
        (OSError("the cable is out\nand more"), r"request to the hub failed for me/colours: the cable is out\.$"),
        (HfHubHTTPError("no rights", response=ANSWER), "request to the hub failed for me/colours: no rights"),
        (
            RepositoryNotFoundError("no rights", response=ANSWER),
            "me/colours must exist on the hub; .*, or it is private",
        ),
    ],
)
def test_what_the_hub_refuses(problem: Exception, message: str, hub: Hub, trained: RunResult, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise problem

    monkeypatch.setattr(hub, "create_repo", fail)
    with pytest.raises(CheckpointError, match=message):
        push(trained.out, REPO)


def test_models_that_are_missing_or_damaged(hub: Hub, trained: RunResult) -> None:
    push(trained.out, REPO)
    for name, message in (
        ("hf-hub:me/nowhere", "me/nowhere must be on the hub or in its cache; it is not in the cache"),
        ("hf-hub:a/b/c/d", "must be named OWNER/NAME; got 'a/b/c/d'"),
        ("hf-hub:me/colours@v2", "me/colours must be on the hub or in its cache"),
    ):
        with pytest.raises(CheckpointError, match=message):
            model_dir(name)
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

    export = shutil.copytree(trained.out / "best", tmp_path / "export")
    config = json.loads((export / "config.json").read_text())
    config["artefact"] = {"version": 1, "format": "onnx", "precision": "fp32", "input": [3, 32, 32], "sha256": {}}
    (export / "config.json").write_text(json.dumps(config))
    for run, repo, code, said in (
        (trained.out, "../me", 4, "must be named OWNER/NAME; got '../me'"),
        (tmp_path, REPO, 4, "is neither"),
        (export, REPO, 2, "is an export. Push the run that it was exported from."),
    ):
        assert main(["push", str(run), repo, "--force"]) == code
        assert said in capsys.readouterr().err
