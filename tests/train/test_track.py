"""Other programs that follow a run."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    written = [float(line.split(",")[3]) for line in (result.out / "steps.csv").read_text().splitlines()[1:]]
    assert [event.value for event in losses] == pytest.approx(written, rel=1e-6)
    assert [event.step for event in events.Scalars("val_top1")] == [3, 6]


def test_an_unknown_tracker(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Unknown tracker 'tensorbord'\. Nearest: tensorboard"):
        train(photos, out=tmp_path / "run", track="tensorbord", **SHORT)
    assert not (tmp_path / "run").exists()
