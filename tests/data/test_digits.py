"""scikit-learn's digits: the pixels of the package, and one held-out part for everybody."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.data.zoo import class_folders
from weft.data import SplitPlan, image_size_hint, open_data, open_image
from weft.errors import DataError
from weft.recipes.load import default_recipe


@pytest.fixture(scope="module")
def digits():
    return open_data("digits")


def test_the_pixels_are_scikit_learns(digits):
    assert (len(digits.train), len(digits.val), digits.is_given) == (1438, 359, True)
    assert digits.classes == [str(digit) for digit in range(10)]
    assert image_size_hint(digits.train) == (8, 8)
    data, backwards = load_digits(), open_data("digits", classes=[str(digit) for digit in reversed(range(10))])
    seen = set()
    for side in ("train", "val"):
        source, other = getattr(digits, side), getattr(backwards, side)
        for i in range(len(source)):
            sample = source.read(i)
            number = int(sample.key.removeprefix("digits/"))
            levels = np.asarray(open_image(sample.data))[..., 0]
            np.testing.assert_array_equal(np.rint(levels * (16 / 255)), data.images[number])
            assert sample.label == source.labels[i] == data.target[number]
            assert (other.keys[i], other.labels[i]) == (sample.key, 9 - sample.label), "labels follow a list of classes"
            seen.add(number)
    assert seen == set(range(1797))


def test_a_fifth_of_every_digit_is_held_out_the_same_for_everybody(digits):
    everything, held_out = Counter(load_digits().target.tolist()), Counter(digits.val.labels)
    assert all(held_out[digit] == round(everything[digit] / 5) for digit in range(10))
    for options in ({"seed": 5}, {"val_fraction": 0.5}):
        assert open_data("digits", SplitPlan(**options)).val.keys == digits.val.keys
    assert hashlib.sha256(" ".join(digits.val.keys).encode()).hexdigest()[:16] == "715250f9ec2ec03b"


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(open_data("digits", SplitPlan(limit=20)).train) == 20
    (tmp_path / "digits").mkdir()
    with pytest.raises(DataError, match=r"must contain images; 'digits' contains none"):
        open_data("digits")
    class_folders(tmp_path / "digits", 5, ("one", "two"))
    splits = open_data("digits")
    assert splits.classes == ["one", "two"]
    assert any(note.startswith("'digits' is the folder here, not the known dataset") for note in splits.notes)
    assert default_recipe("digits") is None
