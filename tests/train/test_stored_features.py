"""The features that a run stores: whole, or refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weft.errors import CheckpointError
from weft.inference.features import DamagedFileError, read_arrays
from weft.train.stored_features import StoredFeatures


def features(count: int = 6) -> StoredFeatures:
    rng = np.random.default_rng(0)
    return StoredFeatures(
        "0123456789abcdef",
        rng.normal(size=(count, 2, 8)).astype(np.float32),
        np.arange(count) % 3,
        np.arange(count) < 2,
        np.array([f"cat/{number}.jpg" for number in range(count)]),
        np.array([""] * count),
        rng.integers(0, 256, (count, 32), np.uint8),
    )


def test_stored_features_are_read_as_they_were_written(tmp_path: Path) -> None:
    stored = features()
    stored.write(tmp_path / "features.npz")
    read = StoredFeatures.read(tmp_path / "features.npz")
    assert read.network == stored.network
    assert np.array_equal(read.features, stored.features.astype(np.float16).astype(np.float32))
    for name in ("labels", "is_held_out", "keys", "groups", "hashes"):
        assert np.array_equal(getattr(read, name), getattr(stored, name))


def test_features_above_the_range_of_float16_stay_finite(tmp_path: Path) -> None:
    stored = features()
    stored.features[0, 0, 0] = 70_000
    stored.write(tmp_path / "features.npz")
    assert np.array_equal(StoredFeatures.read(tmp_path / "features.npz").features, stored.features)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_is_refused_with_a_sentence(seed: int, tmp_path: Path) -> None:
    """Changed, cut and added bytes; damage that changes no array may go unnoticed."""
    path = tmp_path / "features.npz"
    features().write(path)
    whole, before = path.read_bytes(), StoredFeatures.read(path)
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        path.write_bytes(data if rng.random() < 0.8 else data[: rng.integers(0, len(data))])
        try:
            read = StoredFeatures.read(path)
        except CheckpointError:
            refused += 1
        else:
            assert np.array_equal(read.features, before.features)
    assert refused > 200


def test_arrays_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").rename(path)
    with pytest.raises(CheckpointError, match="it is damaged"):
        StoredFeatures.read(path)
    with pytest.raises(DamagedFileError):
        read_arrays(tmp_path / "none.npz", ["keys"])
