"""Notes on images that a network sees other than a person does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weft.cli import main
from weft.inference import evaluate
from weft.train import train


def test_every_verb_on_a_dataset_of_wide_images_has_the_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bolt", "nut"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 100, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    assert main(["data", "check", str(tmp_path / "data")]) == 0
    note = r"images are wider than the input of \d+x\d+: by a factor of 5\.0"
    assert re.search(note, capsys.readouterr().out)
    run = train(tmp_path / "data", model="levit_nano_32", epochs=1, batch_size=6, out=tmp_path / "run").out
    assert re.search(note, capsys.readouterr().err)
    evaluate(run, tmp_path / "data")
    assert re.search(note, capsys.readouterr().err)
