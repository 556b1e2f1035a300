"""Public weights, from a hub's cache on this disk: nothing is fetched."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch

import weft
from tests.helpers import enliven, put_in_cache
from tests.reference.deterministic import fill
from weft.checkpoints import hub
from weft.errors import CheckpointError
from weft.models.families import VARIANTS, family_named

transformers = pytest.importorskip("transformers")
PUBLIC = {name: variant.weights for name, variant in VARIANTS.items() if variant.weights}
URLOPEN = hub.urlopen


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def unreachable(url, *args, **kwargs):
        raise OSError(f"nobody answers at {url}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "urlopen", unreachable)


@pytest.fixture
def levit(tmp_path):
    theirs = enliven(timm.create_model("levit_128s")).eval()
    put_in_cache(tmp_path, PUBLIC["levit_128s"].repo, "model.safetensors", theirs.state_dict())
    return theirs


def test_levit_from_timms_repository(tmp_path, levit):
    ours = weft.create_model("levit_128s", pretrained=True, cache_dir=tmp_path).eval()
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), levit(x), rtol=1e-5, atol=1e-5)


def test_fitted_to_size_channels_and_classes(tmp_path, levit):
    ours = weft.create_model(
        "levit_128s", pretrained=True, cache_dir=tmp_path, img_size=(192, 256), in_chans=1, num_classes=7
    ).eval()
    assert ours(torch.randn(1, 1, 192, 256)).shape == (1, 7)
    summed = levit.stem.conv1.linear.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(ours.stem.conv1.linear.weight, summed)
    theirs = levit.stages[1].blocks[0].attn.attention_biases
    assert torch.equal(ours.stages[1].blocks[0].attn.attention_biases[:, 0], theirs[:, 0])


def test_timm_itself_loads_them(tmp_path, levit, monkeypatch):
    """By the name in timm's registry, from the hub id, with the licence and the tag that are stated there."""
    assert timm.is_model_pretrained("weft_levit_128s")
    cfg = timm.get_pretrained_cfg("weft_levit_128s")
    assert (cfg.hf_hub_id, cfg.tag, cfg.license) == ("timm/levit_128s.fb_dist_in1k", "fb_dist_in1k", "apache-2.0")
    ours = timm.create_model("weft_levit_128s", pretrained=True, cache_dir=tmp_path).eval()
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), levit(x), rtol=1e-5, atol=1e-5)
    other = timm.create_model(
        "weft_levit_128s.fb_dist_in1k", pretrained=True, cache_dir=tmp_path, num_classes=7, in_chans=1, img_size=192
    ).eval()
    assert other(torch.randn(1, 1, 192, 192)).shape == (1, 7)


def test_timm_itself_loads_cvt(tmp_path):
    theirs = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000))).eval()
    put_in_cache(tmp_path, PUBLIC["cvt_13"].repo, "model.safetensors", theirs.state_dict())
    ours = timm.create_model("weft_cvt_13", pretrained=True, cache_dir=tmp_path, act_layer="gelu").eval()
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


def test_timm_knows_which_have_public_weights():
    known = {name.partition(".")[0] for name in timm.list_pretrained("weft_*")}
    assert known == {f"weft_{name}" for name, source in PUBLIC.items() if source.repo}
    for name, source in PUBLIC.items():
        if source.repo:
            cfg = timm.get_pretrained_cfg(f"weft_{name}")
            assert (cfg.hf_hub_id, cfg.license, cfg.input_size[1]) == (source.repo, "apache-2.0", VARIANTS[name].size)


def test_as_a_backbone(tmp_path, levit):
    maps = weft.create_model("levit_128s", pretrained=True, cache_dir=tmp_path, features_only=True).eval()(
        torch.zeros(1, 3, 224, 224)
    )
    theirs = levit.forward_intermediates(torch.zeros(1, 3, 224, 224), intermediates_only=True)
    torch.testing.assert_close(maps, theirs, rtol=1e-4, atol=1e-5)


def test_cvt_from_transformers_repository_in_the_older_format(tmp_path):
    theirs = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000))).eval()
    put_in_cache(tmp_path, PUBLIC["cvt_13"].repo, "pytorch_model.bin", theirs.state_dict())
    ours = weft.create_model("cvt_13", pretrained=True, cache_dir=tmp_path).eval()
    x = torch.randn(1, 3, 224, 224)
    assert not torch.allclose(ours(x), theirs(x).logits)  # the activation that the weights were trained with
    same = weft.create_model("cvt_13", pretrained=True, cache_dir=tmp_path, act_layer="gelu").eval()
    torch.testing.assert_close(same(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A file in the released layout, served from this disk under a name that ends in its sha256."""
    shapes = json.loads((Path(__file__).parent / "reference" / "official_state_dicts.json").read_text())["LeViT_128S"]
    filled = {key: fill(key, tuple(shape)) for key, shape in shapes["state_dict"].items()}
    state = {key: torch.from_numpy(value) for key, value in filled.items() if value is not None}
    torch.save({"model": state}, tmp_path / "made.pth")
    sha256 = hashlib.sha256((tmp_path / "made.pth").read_bytes()).hexdigest()
    (tmp_path / "made.pth").rename(tmp_path / f"LeViT-128S-{sha256[:8]}.pth")
    address = (tmp_path / f"LeViT-128S-{sha256[:8]}.pth").as_uri()
    family, variant = family_named("levit_128s"), VARIANTS["levit_128s"]
    assert family is not None
    assert variant.weights is not None
    served = dataclasses.replace(variant, weights=variant.weights._replace(file=address))
    monkeypatch.setitem(cast("dict[str, Any]", family.variants), "levit_128s", served)
    monkeypatch.setattr(hub, "urlopen", URLOPEN)
    return state, tmp_path / f"LeViT-128S-{sha256[:8]}.pth"


def test_levit_from_its_authors_where_the_hub_fails(tmp_path, released):
    state, file = released
    ours = weft.create_model("levit_128s", pretrained=True, cache_dir=tmp_path / "cache")
    expected = weft.create_model("levit_128s")
    weft.load_checkpoint(expected, state)
    torch.testing.assert_close(ours.state_dict(), expected.state_dict(), rtol=0, atol=0)
    file.unlink()  # from now on there is only what was kept
    weft.create_model("levit_128s", pretrained=True, cache_dir=tmp_path / "cache")


def test_a_file_with_another_hash_is_not_used(tmp_path, released):
    _, file = released
    file.write_bytes(file.read_bytes() + b"!")
    with pytest.raises(CheckpointError, match="its sha256 must begin with"):
        weft.create_model("levit_128s", pretrained=True, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.pth")) == []


def test_files_of_authors_carry_their_hash():
    files = [source.file for source in PUBLIC.values() if source.file]
    assert len(files) == 5
    for file in files:
        assert file.startswith("https://")
        assert len(bytes.fromhex(file.removesuffix(".pth").rpartition("-")[2])) == 4


def test_nothing_in_the_cache(tmp_path):
    with pytest.raises(CheckpointError, match=r"timm/levit_256.fb_dist_in1k must be on the hub or in its cache"):
        weft.create_model("levit_256", pretrained=True, cache_dir=tmp_path)


def test_weights_that_no_hub_has():
    with pytest.raises(CheckpointError, match=r"the weights of ceit_tiny_patch16_224: .*1S19SQUic9ILBGN"):
        weft.create_model("ceit_tiny_patch16_224", pretrained=True)
    with pytest.raises(CheckpointError, match=r"cvt_nano_32 has no public weights. Nearest models that have: cvt_13"):
        weft.create_model("cvt_nano_32", pretrained=True)


def test_every_variant_in_print_of_the_three_papers_has_weights():
    in_print = {name for name in VARIANTS if name.startswith(("ceit", "cvt", "levit")) and "nano" not in name}
    assert set(PUBLIC) == in_print
