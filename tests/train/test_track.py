"""Other programs that follow a run."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
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


def losses_of(run: Path) -> list[float]:
    return [float(line.split(",")[3]) for line in (run / "steps.csv").read_text().splitlines()[1:]]


def test_tensorboard_gets_every_step(photos: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = train(photos, out=tmp_path / "run", track="tensorboard", **SHORT)
    events = EventAccumulator(str(result.out / "tensorboard"))
    events.Reload()
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 7))
    assert [event.value for event in losses] == pytest.approx(losses_of(result.out), rel=1e-6)
    assert [event.step for event in events.Scalars("val_top1")] == [3, 6]


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format (blocks of 32 KiB, checksum, length, type) after 7 bytes."""
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # a header does not fit: the rest of the block is padding
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.nightly
def test_wandb_gets_settings_and_every_step(photos: Path, tmp_path: Path) -> None:
    """The command line hides wandb from timm, and must find it again. The file is what it would upload."""
    show_wandb()
    pb: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment |= {f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG")}
    out = tmp_path / "run"
    done = tiny.finish([*tiny.command(photos, out), "--track", "wandb"], **environment)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    records = [pb.Record.FromString(data) for data in log_records(file.read_bytes())]
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    losses = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == list(range(1, 7))
    assert list(losses.values()) == pytest.approx(losses_of(out), rel=1e-5)
    assert [row["_step"] for row in rows if "val_top1" in row] == [3, 6]
    config = {item.key for record in records if record.HasField("config") for item in record.config.update}
    config |= {item.key for record in records if record.HasField("run") for item in record.run.config.update}
    assert {"model", "optim", "augment"} <= config


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "wandb" or real(name, *more))


def test_wandb_is_given_every_step_and_closed(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[int, Any] = {}
    closed: list[bool] = []
    run = SimpleNamespace(
        log=lambda values, step: logged.setdefault(step, {}).update(values), finish=lambda: closed.append(True)
    )
    fake_wandb(monkeypatch, lambda **settings: run)
    result = train(photos, out=tmp_path / "run", track="wandb", **SHORT)
    assert [values["loss"] for values in logged.values()] == pytest.approx(losses_of(result.out), rel=1e-6)
    assert (list(logged), closed) == ([1, 2, 3, 4, 5, 6], [True])


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
