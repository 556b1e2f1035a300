"""`weft data bench`: how fast images are loaded, and whether that is enough."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.train import tiny
from weft.cli import main
from weft.train import Loading, loading, loading_speed
from weft.train.loading import LoadingRate


def found(*rates: float, training: float) -> Loading:
    return Loading("levit_256", "cuda:0", "bf16", training, [LoadingRate(*row) for row in enumerate(rates)])


@pytest.mark.parametrize(
    ("result", "enough", "headline"),
    [
        (found(900.0, 1800.0, training=1000.0), 1, "--workers 1 loads as fast as levit_256 trains on cuda:0 in bf16"),
        (found(1000.0, training=1000.0), 0, "--workers 0 loads as fast"),
        (found(100.0, 250.0, 200.0, training=1000.0), None, "with --workers 1, training waits 75 % of the time"),
    ],
)
def test_the_smallest_number_that_loads_as_fast_as_training(result: Loading, enough: int, headline: str) -> None:
    assert result.enough == enough
    assert headline in result.headline()
    assert "1,000 images/s" in result.headline()


def test_rates_of_all_numbers_of_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "available_cores", lambda: 2)
    photos = tiny.paint(tmp_path / "photos", per_class=9)
    words = ["--model", "levit_nano_32", "--seconds", "0.05", "--batch-size", "6", "--quiet", "--json"]
    assert main(["data", "bench", str(photos), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [rate["workers"] for rate in result["rates"]] == [0, 1, 2]
    assert min(result["training"], *(rate["images_per_second"] for rate in result["rates"])) > 0
    assert (result["model"], result["device"], result["precision"]) == ("levit_nano_32", "cpu", "fp32")
    assert list(tmp_path.iterdir()) == [photos]


def test_batches_loaded_in_advance_do_not_count(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves one second with every batch: six images per second, with any number of processes."""
    clock = itertools.count(step=1.0)
    monkeypatch.setattr(loading.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(loading, "available_cores", lambda: 2)
    monkeypatch.setattr(loading, "time_step", lambda *arguments: 0.5)
    result = loading_speed(photos, "levit_nano_32", batch_size=6, seconds=4.0, quiet=True)
    assert [rate.images_per_second for rate in result.rates] == [6.0, 6.0, 6.0]
    assert result.training == 12.0
