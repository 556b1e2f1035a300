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

PUBLIC = {name: variant.weights for name, variant in VARIANTS.items() if variant.weights}
URLOPEN = hub.urlopen


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def unreachable(url, *args, **kwargs):
        raise OSError(f"nobody answers at {url}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "urlopen", unreachable)


@pytest.fixture(scope="module")
def levit(tmp_path_factory):
    """timm's network, and a cache that has its weights."""
    cache, theirs = tmp_path_factory.mktemp("levit"), enliven(timm.create_model("levit_128s")).eval()
    put_in_cache(cache, PUBLIC["levit_128s"].repo, "model.safetensors", theirs.state_dict())
    return theirs, cache


def test_levit_from_timms_repository(levit):
    """Also as a backbone."""
    theirs, cache = levit
    x = torch.randn(1, 3, 224, 224)
    ours = weft.create_model("levit_128s", pretrained=True, cache_dir=cache).eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    backbone = weft.create_model("levit_128s", pretrained=True, cache_dir=cache, features_only=True).eval()
    maps = theirs.forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(backbone(x), maps, rtol=1e-4, atol=1e-5)


def test_fitted_to_size_channels_and_classes(levit):
    theirs, cache = levit
    more = dict(img_size=(192, 256), in_chans=1, num_classes=7)
    ours = weft.create_model("levit_128s", pretrained=True, cache_dir=cache, **more).eval()
    assert ours(torch.randn(1, 1, 192, 256)).shape == (1, 7)
    summed = theirs.stem.conv1.linear.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(ours.stem.conv1.linear.weight, summed)
    biases = theirs.stages[1].blocks[0].attn.attention_biases
    assert torch.equal(ours.stages[1].blocks[0].attn.attention_biases[:, 0], biases[:, 0])


def test_timm_itself_loads_them(levit):
    """By the name in timm's registry, from the hub id, with the licence and the tag that are stated there."""
    theirs, cache = levit
    assert timm.is_model_pretrained("weft_levit_128s")
    cfg = timm.get_pretrained_cfg("weft_levit_128s")
    assert (cfg.hf_hub_id, cfg.tag, cfg.license) == ("timm/levit_128s.fb_dist_in1k", "fb_dist_in1k", "apache-2.0")
    ours = timm.create_model("weft_levit_128s", pretrained=True, cache_dir=cache).eval()
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    more = dict(num_classes=7, in_chans=1, img_size=192)
    other = timm.create_model("weft_levit_128s.fb_dist_in1k", pretrained=True, cache_dir=cache, **more).eval()
    assert other(torch.randn(1, 1, 192, 192)).shape == (1, 7)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_cvt_from_transformers_repository(file, tmp_path):
    """In both formats, by weft and by timm."""
    transformers = pytest.importorskip("transformers")
    theirs = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000))).eval()
    put_in_cache(tmp_path, PUBLIC["cvt_13"].repo, file, theirs.state_dict())
    x = torch.randn(1, 3, 224, 224)
    create, name = (timm.create_model, "weft_cvt_13") if file == "model.safetensors" else (weft.create_model, "cvt_13")
    same = create(name, pretrained=True, cache_dir=tmp_path, act_layer="gelu").eval()
    torch.testing.assert_close(same(x), theirs(x).logits, rtol=1e-4, atol=1e-5)
    if create is weft.create_model:
        ours = create(name, pretrained=True, cache_dir=tmp_path).eval()
        assert not torch.allclose(ours(x), theirs(x).logits)  # the activation that the weights were trained with


def test_timm_knows_which_have_public_weights():
    on_a_hub = {name: source for name, source in PUBLIC.items() if source.repo}
    known = {name.partition(".")[0] for name in timm.list_pretrained("weft_*")}
    assert known == {f"weft_{name}" for name in on_a_hub}
    for name, source in on_a_hub.items():
        cfg = timm.get_pretrained_cfg(f"weft_{name}")
        assert (cfg.hf_hub_id, cfg.license, cfg.input_size[1]) == (source.repo, "apache-2.0", VARIANTS[name].size)


@pytest.fixture
def released(tmp_path, monkeypatch):
    """A file in the released layout, served from this disk under a name that ends in its sha256."""
    shapes = json.loads((Path(__file__).parent / "reference" / "official_state_dicts.json").read_text())["LeViT_128S"]
    filled = {key: fill(key, tuple(shape)) for key, shape in shapes["state_dict"].items()}
    state = {key: torch.from_numpy(value) for key, value in filled.items() if value is not None}
    torch.save({"model": state}, tmp_path / "made.pth")
    sha256 = hashlib.sha256((tmp_path / "made.pth").read_bytes()).hexdigest()
    file = (tmp_path / "made.pth").rename(tmp_path / f"LeViT-128S-{sha256[:8]}.pth")
    variant = VARIANTS["levit_128s"]
    served = dataclasses.replace(variant, weights=variant.weights._replace(file=file.as_uri()))
    monkeypatch.setitem(cast("dict[str, Any]", family_named("levit_128s").variants), "levit_128s", served)
    monkeypatch.setattr(hub, "urlopen", URLOPEN)
    return state, file


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


def test_the_variants_in_print_have_weights_and_files_of_authors_carry_their_hash():
    in_print = {name for name in VARIANTS if name.startswith(("ceit", "cvt", "levit")) and "nano" not in name}
    assert set(PUBLIC) == in_print
    files = [source.file for source in PUBLIC.values() if source.file]
    assert len(files) == 5
    for file in files:
        assert file.startswith("https://")
        assert len(bytes.fromhex(file.removesuffix(".pth").rpartition("-")[2])) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("levit_256", r"timm/levit_256.fb_dist_in1k must be on the hub or in its cache"),
        ("ceit_tiny_patch16_224", r"the weights of ceit_tiny_patch16_224: .*1S19SQUic9ILBGN"),
        ("cvt_nano_32", r"cvt_nano_32 has no public weights. Nearest models that have: cvt_13"),
        ("test_vit.r160_in1k", r"The weights timm/test_vit\.r160_in1k must be on the hub or in its"),
    ],
)
def test_weights_that_cannot_be_fetched_are_named(name, message, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        hub.create_model(name, pretrained=True, **({"cache_dir": tmp_path} if name in VARIANTS else {}))
