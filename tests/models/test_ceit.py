import copy

import pytest
import timm
import torch
from torch import nn

import weft
from tests.helpers import images, lively
from weft.bench.cost import cost
from weft.errors import UsageError
from weft.models.ceit.inference import fold_stem, move_bias

PLAIN = dict(stem_convs=(), leff_kernel=0, lca=False)
# The ablations of the paper: one component at a time on DeiT-T.
I2T = {
    "none": dict(stem_convs=()),
    "k7s4": dict(stem_convs=((7, 4),), stem_pool=False, stem_norm=False),
    "k5s4": dict(stem_convs=((5, 4),), stem_pool=False, stem_norm=False),
    "k3s2 twice": dict(stem_convs=((3, 2), (3, 2)), stem_pool=False, stem_norm=False),
    "k7s2 and pool": dict(stem_convs=((7, 2),), stem_norm=False, stem_chans=32),
    "k7s2, pool and BatchNorm": dict(stem_convs=((7, 2),), stem_chans=32),
}


def test_everything_off_is_deit():
    ours = weft.create_model("ceit_tiny_patch16_224", **PLAIN, depth=2).eval()
    theirs = timm.create_model("deit_tiny_patch16_224", depth=2).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    assert cost(ours, 224) == cost(theirs, 224)


@pytest.mark.parametrize("switches", I2T.values(), ids=I2T)
def test_image_to_tokens_ablations_cut_the_same_grid(switches):
    base = dict(leff_kernel=0, lca=False, num_classes=3, device="meta")
    model = weft.create_model("ceit_tiny_patch16_224", **base, **switches, depth=1).eval()
    assert model.grid == (14, 14)
    assert model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 3)
    convs = [tuple(m.kernel_size) for m in model.patch_embed.convs]
    assert convs == [(k, k) for k, _ in switches["stem_convs"]]
    assert isinstance(model.patch_embed.norm, nn.BatchNorm2d) == switches.get("stem_norm", bool(convs))


def counted(**switches):
    return cost(weft.create_model("ceit_tiny_patch16_224", **switches, device="meta"), 224)


@pytest.mark.slow_except("True-5")
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("norm", [False, True])
def test_leff_ablations_count(kernel_size, norm):
    plain = counted(**PLAIN)
    local = counted(stem_convs=(), lca=False, leff_kernel=kernel_size, leff_norm=norm)
    per_block = 768 * kernel_size**2 + 768 + (2 * (768 + 768 + 192) if norm else 0)
    assert local.params - plain.params == 12 * per_block
    assert local.macs - plain.macs == 12 * (196 * 768 * kernel_size**2 - 2 * 192 * 768)


def test_lca_counts():
    plain, dim = counted(lca=False).params, 192
    lca = 12 * dim + 4 * dim + (dim * 3 * dim + 3 * dim) + (dim * dim + dim) + (8 * dim * dim + 5 * dim)
    assert counted().params == plain + lca
    assert counted(lca_embed=False).params == plain + lca - 12 * dim


def test_leff_lets_the_class_token_pass_and_mixes_neighbours():
    leff = lively("ceit_nano_32").blocks[0].mlp
    tokens = torch.randn(2, 1 + 64, 96)
    out = leff(tokens, (8, 8))
    assert torch.equal(out[:, 0], tokens[:, 0])
    changed = tokens.clone()
    changed[:, 1 + 8 * 3 + 3] += 1  # the place (3, 3)
    moved = (leff(changed, (8, 8)) - out).abs().sum(dim=(0, 2))[1:].view(8, 8) > 1e-6
    assert moved.nonzero().tolist() == [[y, x] for y in (2, 3, 4) for x in (2, 3, 4)]


def test_switches_of_leff_leave_the_class_token_alone_and_end_in_gelu():
    tokens = torch.randn(2, 1 + 64, 96)
    assert (lively("ceit_nano_32", leff_pass_cls=False).blocks[0].mlp(tokens, (8, 8))[:, 0] == 0).all()
    released, paper = (
        lively("ceit_nano_32", leff_final_act=is_last).blocks[0].mlp(tokens, (8, 8))[:, 1:] for is_last in (False, True)
    )
    torch.testing.assert_close(paper, nn.functional.gelu(released))


def test_lca_hears_every_layer_through_the_last_token():
    model = lively("ceit_nano_32")
    cls_tokens = torch.randn(1, 6, 96, requires_grad=True)
    model.lca(cls_tokens).sum().backward()
    assert (cls_tokens.grad.abs().sum(dim=2) > 0).all()
    full = model.lca.attn.qkv(model.lca.norm1(cls_tokens + model.lca.layer_embed)).view(1, 6, 3, 3, 32)
    q, k, v = full.permute(2, 0, 3, 1, 4)
    scores = (q[:, :, -1:] @ k.transpose(-1, -2)) * 32**-0.5
    gathered = model.lca.attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    last = (cls_tokens + model.lca.layer_embed)[:, -1:] + gathered
    torch.testing.assert_close(model.lca(cls_tokens), last + model.lca.mlp(model.lca.norm2(last)))


def test_initial_values_and_decay_are_the_released():
    model = weft.create_model("ceit_tiny_patch16_224")
    block = model.blocks[0]
    for tensor in (block.attn.qkv.weight, model.head.weight, model.lca.mlp.fc1.weight, model.pos_embed):
        assert abs(tensor.std().item() - 0.02) < 0.001
    for bias in (block.attn.qkv.bias, model.head.bias, model.lca.attn.proj.bias):
        assert (bias == 0).all()
    assert (model.lca.layer_embed == 0).all()
    bound = 192**-0.5  # LeFF is made of convolutions there: torch's default, uniform
    assert abs(block.mlp.fc1.weight.std().item() - bound / 3**0.5) < 0.001
    assert 0.9 * bound < block.mlp.fc1.bias.abs().max().item() <= bound
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}


def test_drop_path_grows_linearly():
    model = weft.create_model("ceit_tiny_patch16_224", drop_path_rate=0.1, device="meta")
    rates = [block.drop_path.drop_prob for block in model.blocks]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


def test_last_blocks_unused_weights_get_zero_and_not_none():
    model = weft.create_model("ceit_nano_32", num_classes=5).train()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    zero = {name for name, p in model.named_parameters() if not p.grad.abs().any()}
    assert {name for name in zero if ".mlp." in name} == {
        f"blocks.5.mlp.{name}" for name, _ in model.blocks[5].mlp.named_parameters()
    }
    assert len(zero) >= 12


def test_positions_follow_the_size_of_the_images():
    assert weft.create_model("ceit_tiny_patch16_224", img_size=(97, 250), device="meta").grid == (25 // 4, 63 // 4)
    model = lively("ceit_nano_32", num_classes=3)
    x = images(model)
    answer = model(x)
    model.set_input_size(32)
    assert torch.equal(model(x), answer)
    model.set_input_size((48, 64))
    assert model.pos_embed.shape == (1, 1 + 12 * 16, 96)
    assert model(torch.randn(1, 3, 48, 64)).shape == (1, 3)
    assert model.pretrained_cfg["input_size"] == (3, 48, 64)
    assert model.model_args["img_size"] == (48, 64)
    with pytest.raises(UsageError, match=r"CeiT was built for 48x64 images but got 40x32; pass img_size=\(40, 32\)"):
        model(torch.randn(1, 3, 40, 32))


@pytest.mark.parametrize("name", ["ceit_tiny_patch16_224", "port_ceit_pytorch"])
def test_the_bias_may_be_added_behind_the_pool(name):
    """As on a GPU; the padding of the pool is smaller than every value."""
    stem = lively(name, depth=1).patch_embed.double().eval()
    image = torch.randn(2, 3, 64, 48, dtype=torch.float64)
    expected = stem(image)
    folded = fold_stem(copy.deepcopy(stem))
    move_bias(folded)
    assert folded.convs[0].bias is None
    torch.testing.assert_close(folded(image), expected, rtol=0, atol=1e-12 * expected.abs().max().item())
