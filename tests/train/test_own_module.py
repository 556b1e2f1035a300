"""Any module that returns logits is a model: trained, resumed, evaluated, exported and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import weft
from weft.checkpoints import load_model_dir
from weft.errors import CheckpointError, StoppedError, UsageError
from weft.inference import predict
from weft.inference.exports import export_run
from weft.train import RunResult, evaluate, train
from weft.train.own_module import register_module

SETTINGS = {"optim.layer_decay": 0.9, "save.every_steps": 1}
ARGUMENTS: Any = dict(img_size=24, epochs=2, batch_size=12, settings=SETTINGS, quiet=True)


class Own(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(images)).relu().mean((2, 3)))


class FixedSize(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 24 * 24, 3))


@pytest.fixture(scope="module")
def trained(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Own, dict[str, Tensor], RunResult]:
    """A module after the run that trained it, its state before, and the run."""
    torch.manual_seed(0)
    network = Own()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    return network, before, train(noise, network, out=tmp_path_factory.mktemp("runs") / "own", **ARGUMENTS)


def test_a_module_is_a_model(trained: tuple[Own, Any, RunResult], noise: Path, tmp_path: Path) -> None:
    network, before, result = trained
    assert result.model == "Own"
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items()), "a copy is trained"
    assert not hasattr(network, "pretrained_cfg")
    model, classes = load_model_dir(result.out / "best")
    assert isinstance(model, Own)
    assert classes == ["class0", "class1", "class2"]
    assert evaluate(result.out, noise, quiet=True).top1 == result.top1
    report = export_run(result.out, tmp_path / "export", data=noise, quiet=True)
    assert report.top1 == pytest.approx(result.top1)
    image = noise / "class0" / "000.png"
    one, other = (predict(model, [image], quiet=True)[0].top[0] for model in (result.out, tmp_path / "export"))
    assert one[1] == pytest.approx(other[1], abs=1e-5)


@pytest.mark.parametrize("kind", [Own, FixedSize])
def test_a_run_resumes_with_the_module(kind: type[nn.Module], noise: Path, tmp_path: Path) -> None:
    network = kind()
    whole = train(noise, network, out=tmp_path / "whole", **ARGUMENTS)
    with pytest.raises(StoppedError):
        train(noise, network, out=tmp_path / "run", stop_after=1, **ARGUMENTS)
    result = train(resume=tmp_path / "run", model=kind(), quiet=True)  # the weights are those of the saved state
    assert (tmp_path / "run" / "steps.csv").read_text() == (tmp_path / "whole" / "steps.csv").read_text()
    assert result.loss == whole.loss


def test_a_linear_probe_finds_the_last_layer(noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    settings = {"head_init": "probe", "epochs": 0, "batch_size": 8}
    result = train(noise, Own(), img_size=24, settings=settings, out=tmp_path / "run", quiet=True)
    assert result.top1 > 60  # the classes differ in brightness


def test_a_module_of_timm_adapts_to_the_classes(noise: Path, tmp_path: Path) -> None:
    network = timm.create_model("test_resnet.r160_in1k", num_classes=7)
    result = train(noise, network, img_size=32, epochs=1, batch_size=8, out=tmp_path / "run", quiet=True)
    assert load_model_dir(result.out / "best")[0].num_classes == 3


class Broken(nn.Module):
    def __init__(self, output: object) -> None:
        super().__init__()
        self.output, self.weight = output, nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> object:
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Own(4), "the dataset has 3 classes, the module 4 outputs"),
        (nn.Sequential(nn.Flatten()), "must have parameters to train; Sequential has none"),
        (Broken(torch.zeros(2, 3, 4, 4)), r"for 2 images Broken returns \(2, 3, 4, 4\)"),
        (Broken({"logits": 0}), "for 2 images Broken returns dict"),
        (Broken(torch.zeros(2, 1)), "with two classes or more"),
        (Broken(ValueError("no such size. Sorry.")), "fails with ValueError: no such size. Sorry. For another"),
        (FixedSize(), r"must take images \(3x32x32\) and return logits; FixedSize fails with RuntimeError"),
        (torch.nn.Linear, "must be a name or a torch.nn.Module; got a type"),
        (["levit_128s"], "got a list"),
    ],
)
def test_a_module_that_is_no_classifier_is_refused(model: Any, message: str, noise: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        train(noise, model, img_size=32, epochs=1, batch_size=8, out=tmp_path / "run", quiet=True)
    assert len(str(caught.value)) < 400, "it does not print the network"
    assert not (tmp_path / "run").exists()


def test_a_second_module_of_a_class_replaces_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for classes in (5, 6):
        assert register_module(type("Other", (Own,), {})(classes), 16) == "Other"
        assert weft.create_model("Other").num_classes == classes
    with pytest.raises(UsageError, match="resnet18 is a model of timm"):
        register_module(type("resnet18", (Own,), {})(), 16)


def test_a_process_without_the_module_says_what_is_missing(trained: tuple[Own, Any, RunResult], monkeypatch) -> None:
    monkeypatch.delitem(timm.models._registry._model_entrypoints, "Own")
    with pytest.raises(CheckpointError, match=r"builds it first: timm\.models\.register_model\(FUNCTION\)"):
        load_model_dir(trained[2].out / "best")
