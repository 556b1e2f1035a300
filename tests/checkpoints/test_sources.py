"""Every public layout against the network that wrote it: random weights, through our map, equal outputs."""

import pytest
import timm
import torch

import weft
from tests.helpers import enliven
from weft.checkpoints import load_model_dir
from weft.checkpoints.conversion import convert_checkpoint
from weft.checkpoints.load import layouts, recognise
from weft.errors import CheckpointError

transformers = pytest.importorskip("transformers")
vit_cvt = pytest.importorskip("vit_pytorch.cvt")
vit_levit = pytest.importorskip("vit_pytorch.levit")


def assert_equal_outputs(theirs, name, answer=lambda outputs: outputs, size=224, **switches):
    """Loads their state dict into ours, built with the switches that its layout asks for; compares in float64."""
    theirs = enliven(theirs).double().eval()
    state = theirs.state_dict()
    asked = recognise(state).switches(state)
    ours = weft.create_model(name, **{**asked, **switches}).double()
    report = weft.load_checkpoint(ours, state)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), answer(theirs(x)), rtol=1e-9, atol=1e-9)
        theirs.train().eval()  # some keep what they computed in the other precision until they are trained again
        torch.testing.assert_close(ours.float()(x.float()), answer(theirs.float()(x.float())), rtol=1e-5, atol=2e-5)
    return report


@pytest.mark.slow_except("levit_conv_-128s")
@pytest.mark.parametrize(
    ("form", "size"), [("levit_", size) for size in ("128s", "128", "192", "256", "384")] + [("levit_conv_", "128s")]
)
def test_timm_levit(form, size):
    theirs = timm.create_model(f"{form}{size}", num_classes=11)
    assert "timm" in assert_equal_outputs(theirs, f"levit_{size}", num_classes=11).source


def levit_config(**changes):
    return transformers.LevitConfig(
        hidden_sizes=[128, 256, 384], num_attention_heads=[4, 6, 8], depths=[2, 3, 4], key_dim=[16, 16, 16],
        down_ops=[["Subsample", 16, 8, 4, 2, 2], ["Subsample", 16, 16, 4, 2, 2]], num_labels=11, **changes,
    )  # fmt: skip


def test_transformers_levit_with_both_heads():
    theirs = transformers.LevitForImageClassificationWithTeacher(levit_config())
    report = assert_equal_outputs(theirs, "levit_128s", lambda out: out.logits, num_classes=11)
    assert "transformers" in report.source


def test_transformers_levit_with_one_head():
    theirs = transformers.LevitForImageClassification(levit_config())
    assert_equal_outputs(theirs, "levit_128s", lambda out: out.logits, num_classes=11, distilled=False)


@pytest.mark.parametrize(
    ("name", "depth"), [("cvt_13", [1, 2, 10]), pytest.param("cvt_21", [1, 4, 16], marks=pytest.mark.slow)]
)
def test_transformers_cvt(name, depth):
    theirs = transformers.CvtForImageClassification(transformers.CvtConfig(depth=depth, num_labels=11))
    report = assert_equal_outputs(theirs, name, lambda out: out.logits, size=64, num_classes=11)
    assert "transformers" in report.source


@pytest.mark.nightly
@pytest.mark.slow
def test_transformers_cvt_w24_block_by_block():
    """277M parameters in float64, on small images, which CvT takes as they are: every block's output, then the
    logits."""
    config = transformers.CvtConfig(
        embed_dim=[192, 768, 1024],
        num_heads=[3, 12, 16],
        depth=[2, 2, 20],
        drop_path_rate=[0.0, 0.0, 0.0],
        num_labels=11,
    )
    theirs = enliven(transformers.CvtForImageClassification(config)).double().eval()
    state = theirs.state_dict()
    ours = weft.create_model("cvt_w24", num_classes=11, **recognise(state).switches(state)).double().eval()
    weft.load_checkpoint(ours, state)
    taps: dict[tuple[str, int, int], torch.Tensor] = {}

    def watch(block, key):
        block.register_forward_hook(lambda module, args, out: taps.__setitem__(key, out))

    for level, (stage, their_stage) in enumerate(zip(ours.stages, theirs.cvt.encoder.stages, strict=True)):
        for number, (block, layer) in enumerate(zip(stage.blocks, their_stage.layers, strict=True)):
            watch(block, ("ours", level, number))
            watch(layer, ("theirs", level, number))
    x = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-9, atol=1e-9)
    compared = [key[1:] for key in taps if key[0] == "ours"]
    assert len(compared) == 24
    for key in compared:
        torch.testing.assert_close(taps["ours", *key], taps["theirs", *key], rtol=1e-9, atol=1e-9, msg=str(key))


def assert_converted(theirs, name, tmp_path):
    """Converted without further words, and folded: as theirs computes."""
    theirs = theirs.float().eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    assert convert_checkpoint(tmp_path / "theirs.pt", tmp_path / "ours").model == name
    ours, _ = load_model_dir(tmp_path / "ours")
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(weft.fold(ours)(x), ours(x), rtol=1e-5, atol=2e-5)


@pytest.mark.slow_except("6")
@pytest.mark.parametrize("heads", [6, 4])  # 4 heads of 64 for 384 channels: the default of older versions
def test_vit_pytorch_cvt(tmp_path, heads):
    theirs = vit_cvt.CvT(num_classes=11, s2_depth=1, s3_depth=2, s3_heads=heads)
    assert "vit-pytorch" in assert_equal_outputs(theirs, "port_vit_pytorch_cvt", size=64, num_classes=11).source
    assert_converted(theirs, "port_vit_pytorch_cvt", tmp_path)
    state = theirs.state_dict()
    others = weft.create_model("port_vit_pytorch_cvt", num_classes=11, depth=(1, 1, 2), num_heads=(1, 3, 5))
    with pytest.raises(CheckpointError, match=rf"need weft\.create_model\(.*num_heads=\(1, 3, {heads}\)"):
        weft.load_checkpoint(others, state)


def test_ceit_pytorch_with_heads_of_another_width():
    """Its `dim=384, heads=8, with_lca=True`: LCA keeps its 4 heads of 48. Names and shapes, since it is no package."""
    layout = next(row for row in layouts() if row.name == "CeiT-pytorch")
    sizes = dict(embed_dim=384, depth=2, num_heads=8, head_dim=64, mlp_ratio=2.0, leff_kernel=5, patch_size=8)
    lca = dict(lca_num_heads=4, lca_head_dim=48, lca_mlp_ratio=1.0)
    ours = weft.create_model("port_ceit_pytorch", device="meta", num_classes=3, **sizes, **lca).state_dict()
    theirs = {
        "transformer.layers.0.0.fn.fn.to_qkv.weight": ours["blocks.0.attn.qkv.weight"],
        "transformer.layers.0.1.fn.fn.up_proj.0.weight": ours["blocks.0.mlp.fc1.weight"],
        "transformer.layers.0.1.fn.fn.depth_conv.0.weight": ours["blocks.0.mlp.dwconv.weight"],
        "transformer.layers.1.0.fn.norm.weight": ours["blocks.1.norm1.weight"],
        "conv.0.weight": ours["patch_embed.convs.0.weight"],
        "to_patch_embedding.1.weight": ours["patch_embed.proj.weight"].flatten(1),
        "LCA.layers.0.0.fn.to_qkv.weight": ours["lca.attn.qkv.weight"],
        "LCA.layers.0.1.fn.net.0.weight": ours["lca.mlp.fc1.weight"],
    }
    assert layout.recognises(theirs)
    assert layout.switches(theirs) == dict(stem_chans=32, lca=True, **sizes, **lca)
    del theirs["LCA.layers.0.1.fn.net.0.weight"]
    assert layout.switches(theirs)["lca"] is False


@pytest.mark.parametrize("teacher", [None, 11])
def test_vit_pytorch_levit(tmp_path, teacher):
    theirs = vit_levit.LeViT(
        image_size=224,
        num_classes=11,
        dim=(128, 256, 384),
        depth=2,
        heads=(4, 6, 8),
        mlp_mult=3,
        dim_key=16,
        dim_value=32,
        num_distill_classes=teacher,
    )

    def answer(outputs):
        return sum(outputs) / 2 if isinstance(outputs, tuple) else outputs

    report = assert_equal_outputs(theirs, "port_vit_pytorch_levit", answer, num_classes=11)
    assert "vit-pytorch" in report.source
    if teacher is None:
        assert_converted(theirs, "port_vit_pytorch_levit", tmp_path)


def test_layouts_are_told_apart():
    assert len({layout.name for layout in layouts()}) == len(layouts()) >= 9
