import pytest
import torch
from torch import nn

import weft
from tests.helpers import images, lively
from tests.models.tiny import built
from weft.errors import UsageError


@pytest.mark.parametrize(
    "switches",
    [
        dict(pos_embed=True),
        dict(pos_embed=(True, False, False)),
        dict(pos_embed=(False, False, True)),
        dict(embed_kernel=(2, 2, 2), embed_padding=(0, 0, 0)),
        dict(kv_stride=1),
        dict(kv_stride=(1, 2, 1)),
        dict(conv_proj=False),
        dict(conv_proj=(True, False, False)),
        dict(conv_proj=(True, True, False)),
        dict(global_pool="avg"),
        dict(scale_by="head_dim", act_layer="gelu", qkv_bias=False),
    ],
    ids=str,
)
def test_every_switch_leaves_a_network_that_trains(switches):
    model = built("cvt_nano_32", **switches).train()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_linear_projection_has_no_depthwise_convolution():
    model = weft.create_model("cvt_13", conv_proj=(True, False, True), device="meta")
    depthwise = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert {name.split(".")[1] for name in depthwise} == {"0", "2"}


def test_a_class_token_is_in_the_last_stage_if_it_is_asked_for():
    with_token = weft.create_model("cvt_13", device="meta")
    assert [stage.cls_token is not None for stage in with_token.stages] == [False, False, True]
    assert with_token.no_weight_decay() == {"stages.2.cls_token"}
    pooled = weft.create_model("cvt_13", global_pool="avg", device="meta")
    assert not [name for name, _ in pooled.named_parameters() if "cls_token" in name]


def test_attention_scales_by_the_whole_width():
    attn = lively("cvt_nano_32").stages[2].blocks[0].attn
    tokens = torch.randn(2, 17, 128)
    fmap = tokens[:, 1:].transpose(1, 2).reshape(2, 128, 4, 4)
    parts = []
    for conv, linear in ((attn.conv_q, attn.q), (attn.conv_k, attn.k), (attn.conv_v, attn.v)):
        local = conv.bn(conv.conv(fmap)).flatten(2).transpose(1, 2)
        parts.append(linear(torch.cat([tokens[:, :1], local], dim=1)).view(2, -1, 4, 32))
    q, k, v = parts
    assert k.shape[1] == 1 + 4  # keys on a map of half the size
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 128**-0.5
    mixed = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)
    torch.testing.assert_close(attn(tokens, (4, 4)), attn.proj(mixed))


def test_scale_and_activation():
    block = built("cvt_nano_32").stages[1].blocks[0]
    other = built("cvt_nano_32", scale_by="head_dim").stages[1].blocks[0]
    assert (block.attn.scale, other.attn.scale) == (16**-0.5, 8**-0.5)
    x = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(block.mlp.act(x), x * torch.sigmoid(1.702 * x))  # quick GELU


def test_drop_path_in_the_last_stage_alone():
    model = weft.create_model("cvt_13", drop_path_rate=0.1, device="meta")
    rates = [[block.drop_path.drop_prob for block in stage.blocks] for stage in model.stages]
    assert rates[:2] == [[0.0], [0.0, 0.0]]
    assert rates[2] == pytest.approx([0.1 * i / 9 for i in range(10)])
    every = weft.create_model("cvt_13", drop_path_rate=(0.1, 0.2, 0.3), device="meta")
    assert every.stages[1].blocks[-1].drop_path.drop_prob == pytest.approx(0.2)


def test_initial_values_are_the_released():
    model = weft.create_model("cvt_13")
    attn = model.stages[2].blocks[0].attn
    for tensor in (attn.q.weight, attn.proj.weight, model.head.weight, model.stages[2].cls_token):
        assert abs(tensor.std().item() - 0.02) < 0.002
    assert (attn.q.bias == 0).all()
    assert model.head.bias.abs().max() > 0  # torch's default, as released
    assert abs(attn.conv_q.conv.weight.std().item() - 9**-0.5 / 3**0.5) < 0.01


def test_a_built_network_takes_any_size():
    model = built("cvt_nano_32").eval()
    for size in ((32, 32), (23, 32), (29, 14), (3, 6)):
        maps = model.forward_intermediates(torch.randn(1, 3, *size), intermediates_only=True)
        assert [fmap.shape[1] for fmap in maps] == [8, 16, 24]
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)


def test_with_positions_the_size_is_fixed_and_resized_on_request():
    switches = dict(pos_embed=(True, False, True))
    model = built("cvt_nano_32", **switches).eval()
    with pytest.raises(UsageError, match=r"CvT was built for 32x32 images but got 48x32"):
        model(torch.randn(1, 3, 48, 32))
    model.set_input_size((48, 32))
    assert model.stages[0].pos_embed.shape == (1, 24 * 16, 8)
    assert model(torch.randn(1, 3, 48, 32)).shape == (1, 5)
    fresh = built("cvt_nano_32", **switches)
    state, resized = fresh.resize_state_dict(built("cvt_nano_32", **switches, img_size=64).state_dict())
    assert resized == ["stages.0.pos_embed", "stages.2.pos_embed"]
    assert state["stages.2.pos_embed"].shape == fresh.stages[2].pos_embed.shape


def test_a_batch_of_one_keeps_its_axis():
    model = lively("cvt_nano_32")
    x = images(model)
    torch.testing.assert_close(model(x[:1]), model(x)[:1])
