"""Other programs that follow a run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import show_wandb
from tests.train import tiny
from tests.train.conftest import SHORT
from weft.errors import UsageError
from weft.train import train

pytestmark = pytest.mark.filterwarnings("ignore")  # of tensorboard


def test_tensorboard_gets_every_step(photos: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(photos, out=tmp_path / "run", track="tensorboard", **SHORT)
    events = EventAccumulator(str(result.out / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 7))
    assert [event.value for event in losses] == pytest.approx(tiny.losses(result.out), rel=1e-6)
    assert [event.step for event in events.Scalars("val_top1")] == [3, 6]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_line_finds_wandb_again(photos: Path, tmp_path: Path) -> None:
    """Which it hides from timm. The file is what wandb would upload."""
    show_wandb()
    pytest.importorskip("wandb")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment |= {f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG")}
    done = tiny.finish([*tiny.command(photos, tmp_path / "run"), "--track", "wandb"], **environment)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert b"val_top1" in file.read_bytes()


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "wandb" or real(name, *more))


def test_wandb_is_given_every_step_and_closed(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[int, Any] = {}
    given: dict[str, Any] = {}
    closed: list[bool] = []
    run = SimpleNamespace(
        log=lambda values, step: logged.setdefault(step, {}).update(values), finish=lambda: closed.append(True)
    )
    fake_wandb(monkeypatch, lambda **settings: given.update(settings) or run)
    result = train(photos, out=tmp_path / "run", track="wandb", **SHORT)
    assert [values["loss"] for values in logged.values()] == pytest.approx(tiny.losses(result.out), rel=1e-6)
    assert (list(logged), closed) == ([1, 2, 3, 4, 5, 6], [True])
    assert [step for step, values in logged.items() if "val_top1" in values] == [3, 6]
    assert {"model", "optim", "augment"} <= given["config"].keys()


def test_a_tracker_that_cannot_start(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("api.wandb.ai does not answer")

    fake_wandb(monkeypatch, init)
    with pytest.raises(UsageError, match=r"--track wandb must be able to start; .*does not answer.* Or omit --track\."):
        train(photos, out=tmp_path / "run", track="wandb", **SHORT)


def test_a_library_that_is_not_installed(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else real(name, *more))
    with pytest.raises(UsageError, match=r"wandb is needed for this, .* pip install 'weft-vision\[track\]'"):
        train(photos, out=tmp_path / "run", track="wandb", **SHORT)
    assert not (tmp_path / "run").exists()
