"""`weft bench`: every way of running a model, in turns, with numbers that fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import lively
from weft.bench.speed import WAYS, matrix_peak, speed
from weft.cli import main
from weft.deploy import export
from weft.errors import UsageError


def test_every_way(tmp_path: Path) -> None:
    ways = [way for way in WAYS if way != "compiled"]  # minutes of a compiler
    rows = speed(["levit_nano_32"], ways=ways, precisions=["fp32", "bf16"], batch_sizes=[1, 3], rounds=3, threads=1)
    pairs = [(way, precision) for precision in ("fp32", "bf16") for way in ways]
    pairs.remove(("onnx", "bf16"))
    assert [(row.way, row.precision) for row in rows] == pairs * 2
    assert [row.batch_size for row in rows] == [1] * len(pairs) + [3] * len(pairs)
    for row in rows:
        assert 0 < row.p50_ms <= row.p95_ms
        assert row.images_per_second == pytest.approx(1000 * row.batch_size / row.p50_ms)
        assert row.macs is not None
        assert row.peak_percent is not None
        assert row.peak_percent > 0  # over 100 where something else runs while the peak is measured
    for first in (rows[0], rows[len(pairs)]):
        assert first.ratio == 1
        same = [row for row in rows if row.batch_size == first.batch_size]
        ratios = [row.images_per_second / first.images_per_second for row in same]
        assert [row.ratio for row in same] == pytest.approx(ratios)


def test_exports_and_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(lively("levit_nano_32", num_classes=3), tmp_path / "out", format="openvino")
    words = ["bench", str(tmp_path / "out"), "--batch-size", "2", "--rounds", "2", "--threads", "1", "--json"]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["way"], row["precision"], row["macs"], row["peak_percent"]) == ("openvino", "fp32", None, None)
    assert main(["bench", "levit_128s", "--ways", "eager", "--peers", "--batch-size", "1", "--rounds", "1"]) == 0
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["model", "levit_128s", "timm levit_128s"]


def test_the_peak_is_a_machines() -> None:
    assert 1e9 < matrix_peak() < 1e14
    assert matrix_peak("int8") != matrix_peak("int8")  # not a number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ways", "tpu"], "ways must be some of eager, folded, compiled, onnx, openvino; got tpu."),
        (["--precision", "fp8"], "precisions must be some of fp32, bf16; got fp8."),
        (["--batch-size", "0"], "--batch-size must be a whole number of at least 1; got 0."),
        (["--rounds", "many"], "--rounds must be a whole number of at least 1; got many."),
        (["--peers"], "levit_nano_32 has no peer that is known here"),
    ],
)
def test_what_does_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "levit_nano_32", *words]) == UsageError.exit_code
    assert message in capsys.readouterr().err
