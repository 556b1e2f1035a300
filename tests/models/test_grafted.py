import pytest
import timm
import torch

import weft
from tests.helpers import images, lively
from weft.bench.cost import cost
from weft.errors import UsageError


@pytest.mark.parametrize(
    ("name", "millions"),  # Table 1 of the LeViT paper, rounded as there
    [
        ("r50s0_deit_small_12", 22.1),
        ("r50s1_deit_small_9", 17.1),
        ("r50s2_deit_small_6", 13.1),
        ("r50s3_deit_small_3", 15.1),
    ],
)
def test_parameters_of_table_1(name, millions):
    assert round(cost(weft.create_model(f"grafted_{name}", device="meta"), 224).params / 1e6, 1) == millions


@pytest.mark.parametrize(("stages", "layers", "params"), [(1, 9, 16.76), (2, 6, 12.75), (3, 3, 14.72)])
def test_parameters_with_one_head(stages, layers, params):
    name = f"grafted_r50s{stages}_deit_small_{layers}"
    counted = cost(weft.create_model(name, distilled=False, device="meta"), 224).params
    assert round(counted / 1e6, 2) == params


def test_no_stage_is_deit_small():
    ours = weft.create_model("grafted_r50s0_deit_small_12").eval()
    theirs = timm.create_model("deit_small_patch16_224").eval()
    state = {key.replace("patch_embed.proj", "proj"): value for key, value in theirs.state_dict().items()}
    ours.load_state_dict(state)
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_no_layer_is_resnet_50():
    ours = lively("grafted_r50s4_deit_small_0")
    theirs = timm.create_model("resnet50").eval()
    names = {"stem.0": "conv1", "stem.1": "bn1", "head": "fc", **{f"stages.{i}": f"layer{i + 1}" for i in range(4)}}
    state = {}
    for key, value in ours.state_dict().items():
        prefix = next(prefix for prefix in names if key.startswith(f"{prefix}."))
        state[names[prefix] + key[len(prefix) :]] = value
    theirs.load_state_dict(state)
    x = images(ours, 1)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(256, 192), (225, 170)])
def test_any_size(size):
    model = lively("grafted_r50s2_deit_small_6", num_classes=3)
    model.set_input_size(size)
    assert model(torch.randn(1, 3, *size)).shape == (1, 3)
    assert weft.create_model("grafted_r50s2_deit_small_6", img_size=size, num_classes=3).grid == model.grid


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (dict(num_stages=5), "num_stages must be 0 to 4, the stages of ResNet-50; got 5"),
        (dict(num_stages=0, depth=0), "num_stages and depth must not both be 0"),
        (dict(img_size=8), "img_size must leave at least one token of 16x16 pixels; got 8x8"),
    ],
)
def test_bad_switches(switches, message):
    with pytest.raises(UsageError, match=message):
        weft.create_model("grafted_r50s2_deit_small_6", **switches)
