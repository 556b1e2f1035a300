"""T2T-ViT: sizes in print, both kinds of attention against their definitions, positions, names as released."""

import math

import pytest
import torch

import weft
from tests.helpers import images, lively
from weft.bench.cost import cost
from weft.errors import UsageError
from weft.models.baselines.t2t import NarrowingAttention, Performer, sines


@pytest.mark.parametrize(
    ("name", "millions", "billions"),
    [
        ("t2t_vit_14", 21.5, 4.8),
        ("t2t_vit_19", 39.1, 8.5),
        ("t2t_vit_24", 64.0, 13.7),
        ("t2t_vit_t_14", 21.5, 6.1),
        ("t2t_vit_t_19", 39.1, 9.8),
        ("t2t_vit_t_24", 64.0, 15.0),
    ],
)
def test_sizes(name, millions, billions):
    """The multiply-adds of the three with attention are those in the CvT paper, to the digit."""
    counted = cost(weft.create_model(name, device="meta"), 224)
    assert (round(counted.params / 1e6, 1), round(counted.macs / 1e9, 1)) == (millions, billions)


@torch.no_grad()
def test_performer_is_attention_with_an_estimated_kernel():
    torch.manual_seed(0)
    layer = Performer(12, 8).double().eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    k, q, v = layer.kqv(layer.norm1(x)).split(8, dim=-1)
    w = layer.w.double()
    torch.testing.assert_close(w @ w.t(), 4 * torch.eye(4, dtype=torch.float64), atol=1e-6, rtol=0)
    tokens = torch.empty(2, 5, 8, dtype=torch.float64)
    for b in range(2):
        for i in range(5):
            kernel = torch.tensor(
                [
                    sum(
                        math.exp(f @ q[b, i] - q[b, i] @ q[b, i] / 2) * math.exp(f @ k[b, j] - k[b, j] @ k[b, j] / 2)
                        for f in w
                    )
                    / 4
                    for j in range(5)
                ],
                dtype=torch.float64,
            )
            tokens[b, i] = v[b, i] + layer.proj((kernel / kernel.sum()) @ v[b])
    expected = tokens + layer.mlp(layer.norm2(tokens))
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


def test_narrowing_attention_scales_by_its_input():
    torch.manual_seed(0)
    layer = NarrowingAttention(12, 8).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).split(8, dim=-1)
    expected = v + layer.proj((q @ k.transpose(1, 2) / math.sqrt(12)).softmax(-1) @ v)
    torch.testing.assert_close(layer(x), expected)


def test_positions_are_sines_of_growing_length():
    table = sines(10, 6)[0]
    for position in range(10):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert table[position, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("name", ["t2t_vit_14", "t2t_vit_t_14"])
def test_a_rectangle(name):
    model = lively(name, num_classes=3, depth=1)
    model.set_input_size((64, 96))
    assert tuple(model.grid) == (4, 6)
    assert model(torch.randn(2, 3, 64, 96)).shape == (2, 3)
    assert weft.create_model(name, img_size=(64, 96), depth=1).grid == model.grid


def test_weights_of_another_size():
    large, small = lively("t2t_vit_14", depth=1), weft.create_model("t2t_vit_14", img_size=64, depth=1)
    state, changed = small.resize_state_dict(large.state_dict())
    assert changed == ["pos_embed"]
    small.load_state_dict(state)


def test_qk_scale():
    model = lively("t2t_vit_14", depth=1, img_size=64)
    scaled = lively("t2t_vit_14", depth=1, img_size=64, qk_scale=64**-0.5)  # that of a head, the default
    other = lively("t2t_vit_14", depth=1, img_size=64, qk_scale=384**-0.5)
    x = images(model)
    torch.testing.assert_close(model(x), scaled(x))
    assert (model(x) - other(x)).abs().max() > 1e-5


def test_names_are_those_of_the_released_weights():
    names = set(weft.create_model("t2t_vit_14", device="meta").state_dict())
    assert {
        "cls_token",
        "pos_embed",
        "tokens_to_token.attention1.w",
        "tokens_to_token.attention1.kqv.weight",
        "tokens_to_token.attention2.mlp.2.bias",
        "tokens_to_token.project.weight",
        "blocks.13.attn.qkv.weight",
        "blocks.13.mlp.fc2.bias",
        "norm.weight",
        "head.weight",
    } <= names
    assert "blocks.0.attn.qkv.bias" not in names
    assert "tokens_to_token.attention1.attn.qkv.weight" in weft.create_model("t2t_vit_t_14", device="meta").state_dict()


@pytest.mark.parametrize(
    ("switches", "needle"),
    [
        (dict(token_type="convolution"), "performer"),
        (dict(num_heads=7), "divisible"),
        (dict(img_size=0), "img_size"),
        (dict(global_pool="max"), "global_pool"),
    ],
)
def test_values_that_do_not_fit(switches, needle):
    with pytest.raises(UsageError, match=needle):
        weft.create_model("t2t_vit_14", **switches)
