import json
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from tests.helpers import images, lively
from tests.models.tiny import built
from weft.bench.cost import cost
from weft.errors import UsageError
from weft.models.levit.inference import FoldedBias
from weft.models.levit.network import Attention, AttentionDownsample, BiasedAttention, Downsample

RELEASED = json.loads((Path(__file__).parents[1] / "reference" / "official_state_dicts.json").read_text())
# Table 5 of the paper: the constructor values of each ablation of LeViT-128S, one head counted, 224x224.
ABLATIONS = {
    "base": ({}, 7_391_290, 304_724_946),
    "A1": (dict(embed_dim=(114,), key_dim=19, num_heads=(3,), depth=(11,)), 1_214_614, 308_307_144),
    "A2": (dict(stem="patch"), 7_392_170, 275_221_458),
    "A6": (
        dict(
            embed_dim=(120, 180, 240),
            key_dim=30,
            attn_ratio=1,
            mlp_ratio=4,
            down_num_heads=(16, 24),
            down_attn_ratio=1,
            down_mlp_ratio=4,
        ),
        6_195_819,
        312_203_018,
    ),
    "A7": (dict(attn_act_layer="identity"), 7_391_290, 304_724_946),
}


def softmax_terms(model: nn.Module) -> int:
    """What the released counter adds to the multiply-adds: one per softmax entry."""
    return sum(m.num_heads * m.offsets.numel() for m in model.modules() if isinstance(m, BiasedAttention))


@pytest.mark.parametrize("size", ["128S", "128", "192", "256", "384"])
def test_macs_are_those_the_released_code_counts(size):
    model = weft.create_model(f"levit_{size.lower()}", device="meta")
    assert cost(model, 224).macs + softmax_terms(model) == RELEASED[f"LeViT_{size}"]["reported_macs"]


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_count_as_in_the_paper(name):
    switches, params, macs = ABLATIONS[name]
    model = weft.create_model("levit_128s", distilled=False, device="meta", **switches)
    counted = cost(model, 224)
    assert (counted.params, counted.macs + softmax_terms(model)) == (params, macs)


@pytest.mark.parametrize(
    "switches", [dict(norm="layer"), dict(attn_bias=False, pos_embed=True), *(row[0] for row in ABLATIONS.values())]
)
def test_ablations_run_and_train(switches):
    model = weft.create_model("levit_nano_32", num_classes=5, distilled=False, **_nano(switches)).train()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def _nano(switches):
    """The same switch at the size of the small network."""
    small = dict(embed_dim=(48,), num_heads=(2,), depth=(2,)) if "depth" in switches else {}
    if "down_num_heads" in switches:
        small = dict(embed_dim=(60, 90, 120), num_heads=(2, 3, 4), down_num_heads=(8, 12))
    return {**switches, **small}


def test_layer_norm_form_has_no_batch_norm_behind_the_stem():
    model = weft.create_model("levit_128s", norm="layer", device="meta")
    assert not [m for m in model.stages.modules() if isinstance(m, nn.BatchNorm1d)]
    assert [m for m in model.stages.modules() if isinstance(m, nn.LayerNorm)]
    assert cost(model, 224).macs == cost(weft.create_model("levit_128s", device="meta"), 224).macs


def test_residual_branches_start_as_nothing_and_only_they():
    model = weft.create_model("levit_128s")
    ends = {name: bool((m.weight == 0).all()) for name, m in model.named_modules() if isinstance(m, nn.BatchNorm1d)}
    zero = {name for name, is_zero in ends.items() if is_zero}
    assert zero == {name for name in ends if name.endswith(("attn.proj.ln.bn", "mlp.ln2.bn"))}
    assert ends["stages.1.downsample.attn_downsample.proj.ln.bn"] is False


def test_initial_values_are_the_released():
    model = weft.create_model("levit_128s")
    assert all((m.attention_biases == 0).all() for m in model.modules() if isinstance(m, BiasedAttention))
    for head in model.get_classifier():
        assert abs(head.linear.weight.std().item() - 0.02) < 0.001
        assert (head.linear.bias == 0).all()
    qkv = model.stages[0].blocks[0].attn.qkv.linear.weight
    assert abs(qkv.std().item() - (3 * 128) ** -0.5) < 0.002  # uniform in +-1/sqrt(fan_in), torch's default


def test_drop_path_is_constant():
    rates = [m.drop_prob for m in weft.create_model("levit_384", device="meta").modules() if hasattr(m, "drop_prob")]
    assert len(rates) == 2 * 12 + 2
    assert set(rates) == {0.1}


def test_two_heads_answer_apart_in_training_and_together_in_evaluation():
    model = lively("levit_nano_32", num_classes=5)
    x = images(model)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    torch.testing.assert_close(model(x), (model.head(features) + model.head_dist(features)) / 2)
    both = model.train()(x)
    assert [tuple(logits.shape) for logits in both] == [(2, 5), (2, 5)]
    assert not torch.equal(*both)
    model.set_distilled_training(False)
    assert model(x).shape == (2, 5)
    one_head = built("levit_nano_32", distilled=False).train()
    assert one_head.head_dist is None
    assert one_head(x).shape == (2, 5)


def test_a_stem_ends_without_activation_and_bias_tables_have_no_decay():
    model = weft.create_model("levit_128s", device="meta")
    stem = ["conv1", "act1", "conv2", "act2", "conv3", "act3", "conv4"]
    assert [name for name, _ in model.stem.named_children()] == stem
    assert len(model.no_weight_decay()) == len(RELEASED["LeViT_128S"]["no_weight_decay"]) == 11


def test_any_size():
    model = built("levit_nano_32", img_size=(97, 33)).eval()
    x = torch.randn(1, 3, 97, 33)
    maps = model.forward_intermediates(x, intermediates_only=True)
    grid = [-(-side // 4) for side in (97, 33)]
    for fmap in maps:
        assert list(fmap.shape[-2:]) == grid
        grid = [(side + 1) // 2 for side in grid]
    assert model(x).shape == (1, 5)


def test_set_input_size_resizes_every_table_and_goes_back():
    model = lively("levit_nano_32", num_classes=3)
    x, before = images(model), {}
    for name, parameter in model.named_parameters():
        before[name] = parameter.clone()
    answer = model(x)
    model.set_input_size(32)
    assert torch.equal(model(x), answer)
    model.set_input_size((64, 48))
    assert model(torch.randn(1, 3, 64, 48)).shape == (1, 3)
    for name, parameter in model.named_parameters():
        if name.endswith("attention_biases"):
            assert parameter.shape[1] > before[name].shape[1]
            assert torch.equal(parameter[:, 0], before[name][:, 0])
        else:
            assert torch.equal(parameter, before[name])
    with pytest.raises(UsageError, match=r"LeViT was built for 64x48 images but got 48x40; pass img_size=\(48, 40\)"):
        model(torch.randn(1, 3, 48, 40))


def test_attention_is_equation_1():
    torch.manual_seed(0)
    attn = lively("levit_nano_32").stages[0].blocks[0].attn
    tokens = torch.randn(2, 64, 64)
    qkv = attn.qkv(tokens).view(2, 64, attn.num_heads, -1)
    q, k, v = qkv.split([16, 16, 32], dim=-1)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 16**-0.5 + attn.attention_biases[:, attn.offsets]
    mixed = torch.einsum("bhnm,bmhe->bnhe", scores.softmax(-1), v).flatten(2)
    torch.testing.assert_close(attn(tokens), attn.proj.ln(nn.functional.hardswish(mixed)))


def test_shrinking_attention_asks_at_every_second_place():
    model = lively("levit_nano_32")
    down = model.stages[1].downsample
    assert isinstance(down, Downsample)
    attn: AttentionDownsample = down.attn_downsample
    tokens = torch.randn(2, 64, 64)
    asked = tokens.view(2, 8, 8, 64)[:, ::2, ::2].reshape(2, 16, 64)
    q = attn.q(asked).view(2, 16, attn.num_heads, 16)
    k, v = attn.kv(tokens).view(2, 64, attn.num_heads, -1).split([16, 64], dim=-1)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 16**-0.5 + attn.attention_biases[:, attn.offsets]
    mixed = torch.einsum("bhnm,bmhe->bnhe", scores.softmax(-1), v).flatten(2)
    torch.testing.assert_close(attn(tokens), attn.proj.ln(nn.functional.hardswish(mixed)))
    assert isinstance(model.stages[0].blocks[0].attn, Attention)


def test_the_folded_bias_has_rows_for_gpus():
    """PyTorch's fused attention copies a bias whose rows are no multiple of 16 values long."""
    biases = [module for module in weft.fold(lively("levit_128s")).modules() if isinstance(module, FoldedBias)]
    assert len(biases) == 11
    for module in biases:
        assert module.expanded_rows.stride(-2) % 16 == 0
        assert torch.equal(module.expanded_rows[..., : module.expanded.shape[-1]], module.expanded)
