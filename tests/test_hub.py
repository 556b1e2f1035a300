"""Public weights, from a hub's cache on this disk: nothing is fetched."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import weft
from tests.helpers import enliven
from weft.checkpoints.public import PUBLIC
from weft.errors import CheckpointError
from weft.models.zoo import ZOO

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def put_in_cache(cache, repo, file, state):
    """Lays a file out as huggingface_hub keeps what it downloaded."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    revision = "0" * 40
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, snapshot / file) if file.endswith(".safetensors") else torch.save(state, snapshot / file)


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


def test_nothing_in_the_cache(tmp_path):
    with pytest.raises(CheckpointError, match=r"timm/levit_256.fb_dist_in1k must be on the hub or in its cache"):
        weft.create_model("levit_256", pretrained=True, cache_dir=tmp_path)


def test_weights_that_no_hub_has():
    with pytest.raises(CheckpointError, match=r"No hub has the weights of ceit_tiny_patch16_224: .*1S19SQUic9ILBGN"):
        weft.create_model("ceit_tiny_patch16_224", pretrained=True)
    with pytest.raises(CheckpointError, match=r"cvt_nano_32 has no public weights. Nearest that have: cvt_13"):
        weft.create_model("cvt_nano_32", pretrained=True)


def test_weights_and_licences_agree():
    assert {name for name, row in ZOO.items() if row.weights_licence} == set(PUBLIC)
