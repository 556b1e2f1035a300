"""Classes that are mirror images of each other are found, and the setting that helps is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weft.cli import main
from weft.train.mirrored_classes import mirrored_pairs, mirrored_text


def features(mirror: dict[int, int], per_class: int = 20, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Features of four classes; the mirror images of a class look like those of the class that `mirror` names."""
    random = np.random.default_rng(0)
    centres, labels = 3 * random.normal(0, 1, (4, 8)), np.repeat(np.arange(4), per_class)
    seen = [labels, np.array([mirror.get(label, label) for label in labels.tolist()])]
    return np.stack([centres[one] + random.normal(0, noise, (len(labels), 8)) for one in seen]), labels


def test_classes_that_are_mirror_images_are_found() -> None:
    pairs = mirrored_pairs(*features({1: 3, 3: 1}))
    assert [(pair.first, pair.second) for pair in pairs] == [(1, 3)]
    assert pairs[0].changed > 0.9 * pairs[0].images == 36
    text = mirrored_text(pairs, ["cup", "left", "pot", "right"])
    assert "left and right" in text
    assert "--set augment.hflip=false" in text


def test_the_number_of_a_class_does_not_matter() -> None:
    views, labels = features({1: 3, 3: 1})
    (pair,), (same,) = mirrored_pairs(views, labels), mirrored_pairs(views, 7_000 * labels)
    assert same == pair._replace(first=7_000, second=21_000)


@pytest.mark.parametrize("mirror", [{}, {1: 3}, {0: 1, 1: 2, 2: 0}], ids=["none", "one-way", "cycle"])
def test_other_classes_are_not(mirror: dict[int, int]) -> None:
    assert mirrored_pairs(*features(mirror)) == []


def test_chance_is_not_taken_for_mirror_images() -> None:
    for seed in range(50):
        random = np.random.default_rng(seed)
        labels = random.integers(0, 2, 30)
        assert mirrored_pairs(random.normal(0, 1, (2, 30, 8)), labels) == []
    assert mirrored_pairs(np.zeros((2, 4, 8)), np.array([0, 1, 0, 1])) == []
    assert mirrored_text([], []) == ""


def test_a_run_on_mirrored_classes_names_the_setting_that_helps(tmp_path: Path, capsys) -> None:
    """Images of a blue square, at the left or at the right."""
    random = np.random.default_rng(0)
    for name, left in (("left", 2), ("right", 22)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(50):
            pixels, top = random.integers(90, 160, (32, 32, 3), dtype=np.uint8), int(random.integers(2, 20))
            pixels[top : top + 9, left : left + 9] = (30, 60, 230)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number:02}.png")
    probe = ["--model", "levit_nano_32", "--epochs", "0", "--set", "head_init=probe", "--group", "none", "--quiet"]
    words = ["train", str(tmp_path / "data"), *probe]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    assert "--set augment.hflip=false" in capsys.readouterr().out
    assert "left and right" in (tmp_path / "one" / "report" / "report.html").read_text(encoding="utf-8")
    assert main([*words, "--out", str(tmp_path / "two"), "--set", "augment.hflip=false", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["top1"], result["notes"]) == (100, [])
