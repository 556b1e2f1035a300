import pytest
import timm
import torch

import weft
from tests.helpers import images, lively
from weft.bench.cost import cost


@pytest.mark.parametrize(
    ("stages", "layers", "two_heads", "one_head"),  # millions; with two heads, Table 1 of the LeViT paper, as rounded
    [(0, 12, 22.1, None), (1, 9, 17.1, 16.76), (2, 6, 13.1, 12.75), (3, 3, 15.1, 14.72)],
)
def test_parameters_of_table_1(stages, layers, two_heads, one_head):
    name = f"grafted_r50s{stages}_deit_small_{layers}"
    assert round(cost(weft.create_model(name, device="meta"), 224).params / 1e6, 1) == two_heads
    if one_head:
        assert round(cost(weft.create_model(name, distilled=False, device="meta"), 224).params / 1e6, 2) == one_head


def test_no_stage_is_deit_small():
    ours = weft.create_model("grafted_r50s0_deit_small_12", depth=2).eval()
    theirs = timm.create_model("deit_small_patch16_224", depth=2).eval()
    state = {key.replace("patch_embed.proj", "proj"): value for key, value in theirs.state_dict().items()}
    ours.load_state_dict(state)
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_no_layer_is_resnet_50():
    ours = lively("grafted_r50s4_deit_small_0", img_size=64)
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
    switches = dict(num_classes=3, num_stages=1, depth=1, embed_dim=24, num_heads=3)
    model = lively("grafted_r50s2_deit_small_6", **switches)
    model.set_input_size(size)
    assert model(torch.randn(1, 3, *size)).shape == (1, 3)
    assert weft.create_model("grafted_r50s2_deit_small_6", img_size=size, **switches).grid == model.grid
