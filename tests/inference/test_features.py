"""Features of a network: the cache on disk never gives those of other pixels or of another network, and only saves
time."""

from __future__ import annotations

import contextlib
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import enliven, without_home
from tests.train import tiny
from weft.checkpoints import load_model_dir, save_model_dir
from weft.data import open_data
from weft.deploy import fold
from weft.errors import CheckpointError, UsageError
from weft.files import cache_dir
from weft.inference import features
from weft.inference.features import FeatureCache, FeatureReader, classifiers, network_key, read_features
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.models.building import create_model

CPU = Runtime.of("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "ceit_nano_32": {"depth": 1, "embed_dim": 48},
    "cvt_nano_32": {"depth": [1, 1, 1]},
    "levit_nano_32": {"depth": [1, 1, 1]},
    "resnet10t": {},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def small(name: str = "ceit_nano_32", **arguments: Any) -> Any:
    torch.manual_seed(0)
    return create_model(name, **{"num_classes": 3, **SMALL[name], **arguments}).eval()


def read(network: nn.Module, images: torch.Tensor) -> np.ndarray:
    with FeatureReader(network, CPU) as reader:
        return reader(images)


def test_only_new_pixels_and_new_weights_are_computed() -> None:
    network, computed = small(), []
    network.register_forward_pre_hook(lambda _, given: computed.append(len(given[0])))
    images = torch.rand(6, 3, 32, 32)
    first = read(network, images[:4])
    again = read(network, images[[5, 2, 0, 1, 4, 3]])
    assert computed == [4, 2]
    np.testing.assert_array_equal(again[[2, 3, 1, 5]], first)

    with torch.no_grad():
        classifiers(network)[0].weight.zero_()  # has no part in the features
    np.testing.assert_array_equal(read(network, images[:4]), first)
    assert computed == [4, 2]

    with torch.no_grad():
        next(network.parameters()).add_(0.01)
    assert not np.array_equal(read(network, images[:4]), first)
    assert computed == [4, 2, 4]


@pytest.mark.parametrize("name", SMALL)
def test_a_folded_copy_gives_the_features_of_the_network(name: str) -> None:
    network, side = enliven(small(name)).eval(), 64 if name == "resnet10t" else 32
    images = torch.rand(3, 3, side, side)
    state = {key: value.clone() for key, value in network.state_dict().items()}
    with features.classifier_inputs(network) as inputs, torch.inference_mode():
        network(images)
    expected = torch.cat(inputs, dim=1).numpy()
    assert np.abs(read(network, images) - expected).max() < 1e-4 * np.abs(expected).max()
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_images_of_another_shape_have_features_of_their_own() -> None:
    """Images of 32 x 64 and 64 x 32 pixels may have the same bytes."""
    network = small("resnet10t")
    wide = torch.zeros(1, 3, 32, 64)
    wide[..., 16:] = 1
    tall = wide.reshape(1, 3, 64, 32)
    read(network, wide)
    expected = FeatureReader(network, CPU, is_cached=False)(tall)
    np.testing.assert_array_equal(read(network, tall), expected)


@pytest.mark.parametrize(
    ("name", "change", "make"),
    [
        ("resnet10t", {"global_pool": "max"}, nn.Module.eval),
        *[
            (name, {"act_layer": "relu"}, make)
            for name in ("cvt_nano_32", "levit_nano_32")
            for make in (fold, nn.Module.eval)
        ],
    ],
)
def test_networks_with_equal_weights_have_features_of_their_own(name: str, change: dict[str, Any], make: Any) -> None:
    one, same, other = make(small(name)), make(small(name)), make(small(name, **change))
    for network in (same, other):
        network.load_state_dict(one.state_dict())
    assert network_key(one, CPU) == network_key(same, CPU) is not None
    assert network_key(one, CPU) != network_key(other, CPU)


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32", "resnet10t"])
def test_what_does_not_change_the_features_does_not_change_the_key(name: str, tmp_path: Path) -> None:
    """The number of classes, the rates of training, and a way through a model directory."""
    one, other = small(name), small(name, num_classes=5, drop_path_rate=0.2)
    heads = tuple(f"{place}." for place, layer in one.named_modules() if layer in classifiers(one))
    state = {key: value for key, value in one.state_dict().items() if not key.startswith(heads)}
    other.load_state_dict(state, strict=False)
    loaded, _ = load_model_dir(save_model_dir(other, tmp_path / name))
    assert network_key(one, CPU) == network_key(other, CPU) == network_key(loaded, CPU) is not None


def test_networks_that_no_name_describes_are_not_cached() -> None:
    """A module of the user's own, also if it is registered or is one of timm's that was changed."""
    own: Any = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    own.pretrained_cfg = {"classifier": "1"}
    changed, composed = small("resnet10t"), small("resnet10t")
    changed.act1 = nn.SiLU()
    changed.is_own_module = True  # as `register_module` marks it
    composed.act1 = type("Act", (nn.Module,), {"__module__": "mine", "forward": lambda self, x: x})()
    for network in (own, changed, composed):
        assert network_key(network, CPU) is None
    read(own, torch.rand(1, 3, 2, 2))
    assert not cache_dir().exists()


def test_a_network_without_a_linear_classifier_is_refused() -> None:
    with pytest.raises(UsageError, match="must end in a linear classifier to give features; CeiT does not"):
        classifiers(small(num_classes=0))


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    images, network = open_data(tiny.paint(tmp_path / "data", per_class=3)).train, small()
    with torch.no_grad():
        next(network.parameters()).fill_(torch.nan)
    with pytest.raises(CheckpointError, match=r"features of CeiT must be finite; those of class\d.*png are not\."):
        read_features(network, evaluation_batches(images, network, 2, 0), CPU)


WIDTH = 160
KEYS = [b"%032d" % number for number in range(400)]


def store(keys: list[bytes]) -> None:
    cache = FeatureCache("network", WIDTH)
    cache.put({key: np.full(WIDTH, int(key) + 0.5, np.float32) for key in keys})
    cache.save()


def stored(keys: list[bytes]) -> list[bytes]:
    """Return the keys that have features in the cache, all of which are right."""
    rows = FeatureCache("network", WIDTH).get(keys)
    assert all((row == int(key) + 0.5).all() for key, row in rows.items())
    return list(rows)


def test_the_features_that_were_added_first_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MAX_CACHED", 200_000)
    store(KEYS[:200])
    store(KEYS[200:])
    assert (cache_dir() / features.FILE).stat().st_size < 400_000
    kept = stored(KEYS)
    assert 100 < len(kept) < 350
    assert kept == KEYS[-len(kept) :]


def test_two_processes_keep_the_features_of_each_other() -> None:
    one, two = FeatureCache("network", WIDTH), FeatureCache("network", WIDTH)
    for cache, keys in ((one, KEYS[:25]), (two, KEYS[15:40])):
        cache.put({key: np.full(WIDTH, int(key) + 0.5, np.float32) for key in keys})
    one.save()
    two.save()
    assert stored(KEYS[:40]) == KEYS[:40]


def test_a_large_cache_needs_no_memory() -> None:
    cache = FeatureCache("network", 4_000)
    cache.put({b"%032d" % number: np.zeros(4_000, np.float32) for number in range(1_000)})  # written at once
    assert (cache_dir() / features.FILE).stat().st_size > 15_000_000
    tracemalloc.start()
    try:
        assert len(cache.get(KEYS[:1])) == 1
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("damage", "is_replaced"),
    [
        (lambda whole: b"", True),
        (lambda whole: b"no table" * 1000, True),
        (lambda whole: whole[: len(whole) // 2], True),
        (lambda whole: whole[:4096] + b"\xff" * (len(whole) - 4096), True),
        (lambda whole: whole.replace(np.float32(7.5).tobytes() * WIDTH, bytes(4 * WIDTH)), False),  # the row stays
    ],
    ids=["empty", "other", "half", "table", "changed"],
)
def test_a_damaged_cache_gives_no_wrong_features_and_is_replaced(damage: Any, is_replaced: bool) -> None:
    store(KEYS[:40])
    path = cache_dir() / features.FILE
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert len(stored(KEYS[:40])) < 40
    store(KEYS[:40])
    assert stored(KEYS[:40]) == [key for key in KEYS[:40] if is_replaced or int(key) != 7]


@pytest.mark.parametrize("obstacle", ["a lock", "a file", "no home"])
def test_a_cache_that_cannot_be_used_costs_nothing_but_time(obstacle, tmp_path, monkeypatch):
    network, images = small(), torch.rand(2, 3, 32, 32)
    expected = read(network, images)
    monkeypatch.setattr("weft.cache.LOCKED_SECONDS", 0)
    with contextlib.closing(sqlite3.connect(cache_dir() / features.FILE)) as table:
        if obstacle == "a lock":
            table.execute("BEGIN EXCLUSIVE")
        else:
            (tmp_path / "file").touch()
            monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
        if obstacle == "no home":
            without_home(monkeypatch)
        np.testing.assert_array_equal(read(network, images), expected)
