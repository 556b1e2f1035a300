"""Loading: what does not fit is said with its way out, and leaves the model as it was."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

import weft
from tests.helpers import lively
from tests.reference.deterministic import fill
from weft.checkpoints import load
from weft.checkpoints.load import layouts, recognise
from weft.errors import CheckpointError, UsageError
from weft.models.building import switches as switches_of
from weft.models.families import family_of
from weft.models.layout import Layout, translate
from weft.models.levit.network import LeViT

SHAPES = json.loads((Path(__file__).parents[1] / "reference" / "official_state_dicts.json").read_text())


def released(name):
    """A released state dict, with numbers that differ from each other."""
    filled = {key: fill(key, tuple(shape)) for key, shape in SHAPES[name]["state_dict"].items()}
    return {key: torch.from_numpy(value) for key, value in filled.items() if value is not None}


@functools.cache
def empty(name):
    """A released state dict of zeros: names and shapes decide what it is."""
    shapes = SHAPES[name]["state_dict"]
    return {key: torch.zeros(shape) for key, shape in shapes.items() if fill(key.rpartition(".")[2], (1,)) is not None}


def assert_refused(model, checkpoint, message, **options):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        weft.load_checkpoint(model, checkpoint, **options)
    text = str(caught.value)
    assert text.endswith("Nothing was loaded.")
    assert "\n" not in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow_except("LeViT_c_128S-levit_128s-model")
@pytest.mark.parametrize(
    ("theirs", "ours", "top"),
    [
        ("LeViT_128S", "levit_128s", "model"),
        ("LeViT_c_128S", "levit_128s", "model"),
        ("cvt-13-224x224", "cvt_13", None),
        ("ceit_tiny_patch16_224", "ceit_tiny_patch16_224", "model"),
    ],
)
def test_files_as_their_authors_save_them(tmp_path, theirs, ours, top):
    state = released(theirs)
    average = {name: tensor + 1 for name, tensor in state.items()}
    content = state if top is None else {top: state, "model_ema": average, "epoch": 300}
    torch.save(content, tmp_path / "x.pth")
    from_file, from_dict = weft.create_model(ours), weft.create_model(ours)
    report = weft.load_checkpoint(from_file, tmp_path / "x.pth")
    weft.load_checkpoint(from_dict, state)
    assert (report.part, report.others) == (("", []) if top is None else ("model", ["model_ema"]))
    assert report.tensors == len(state)
    from_a_file = [name for name in from_file.state_dict() if not name.endswith("num_batches_tracked")]
    assert len(from_a_file) <= report.tensors <= len(from_file.state_dict())
    torch.testing.assert_close(from_file.state_dict(), from_dict.state_dict(), rtol=0, atol=0)
    if top:
        assert weft.load_checkpoint(from_file, tmp_path / "x.pth", state_dict="model_ema").part == "model_ema"


PORT = ("CeiT-pytorch", "port_ceit_pytorch")


@pytest.mark.parametrize(
    ("theirs", "ours", "switches", "message"),
    [
        (*PORT, dict(lca_num_heads=3, lca_head_dim=64), r"lca_num_heads=4 \(this model: 3\)\. Build it with"),
        ("LeViT_128S", "levit_128s", dict(act_layer="gelu"), r"act_layer='hard_swish' \(this model: 'gelu'\)"),
        ("LeViT_128S", "levit_128s", dict(attn_act_layer="identity"), "attn_act_layer='hard_swish'"),
        ("cvt-13-224x224", "cvt_13", dict(scale_by="head_dim"), "scale_by='embed_dim'"),
        ("ceit_tiny_patch16_224", "ceit_tiny_patch16_224", dict(leff_final_act=True), "leff_final_act=False"),
        ("ceit_tiny_patch16_224", "ceit_tiny_patch16_224", dict(leff_pass_cls=False), "leff_pass_cls=True"),
    ],
)
def test_every_switch_that_no_tensor_shows_is_checked(theirs, ours, switches, message):
    """They would load, and answer with other numbers."""
    model = weft.create_model(ours, **switches)
    assert_refused(model, empty(theirs), f"need a model with {message}")
    if ours == PORT[1]:
        assert weft.load_checkpoint(model, empty(theirs), switches="ignore").source == "CeiT-pytorch"


def test_what_transformers_computes_otherwise_is_refused_with_its_switch():
    sizes = dict(embed_dim=[16, 32, 64], depth=[1, 2, 4], num_heads=[1, 2, 4])
    config = transformers.CvtConfig(num_labels=5, **sizes)
    state = transformers.CvtForImageClassification(config).state_dict()
    model = weft.create_model("cvt_13", num_classes=5, **sizes)
    assert_refused(model, state, "need a model with act_layer='gelu'")
    weft.load_checkpoint(model, state, switches="ignore")


@pytest.mark.parametrize(
    ("ours", "switches", "message"),
    [
        ("ceit_tiny_patch16_224", {}, r"CeiT-pytorch.* is ceit_tiny_patch16_224, .* such as port_ceit_pytorch\. "),
        (
            "port_ceit_pytorch",
            dict(leff_kernel=5),
            r"model port_ceit_pytorch: 12 of different shape \(blocks\.0\.mlp\.dwconv\.weight: .*, \.\.\.\)\. "
            r"Weights of CeiT-pytorch need weft\.create_model\('port_ceit_pytorch', .*stem_chans=32, .*leff_kernel=3",
        ),
    ],
)
def test_weights_of_a_port_need_its_network(ours, switches, message):
    assert_refused(weft.create_model(ours, **switches), empty("CeiT-pytorch"), message)


def test_weights_of_another_family_and_damaged_ones_are_refused():
    message = r"LeViT.*cvt_nano_32|cvt_nano_32.*LeViT"
    assert_refused(weft.create_model("cvt_nano_32"), timm.create_model("levit_128s").state_dict(), message)
    damaged = {name: tensor for name, tensor in empty("CeiT-pytorch").items() if name != "conv.0.weight"}
    message = r"The weights look like CeiT-pytorch, but their tensors do not fit together"
    assert_refused(weft.create_model("port_ceit_pytorch"), damaged, message)


def test_every_switch_is_one_of_the_constructor():
    for theirs, ours in (PORT, ("LeViT_128S", "levit_nano_32")):
        assert set(recognise(empty(theirs)).switches(empty(theirs))) <= set(switches_of(ours))


def nano(**switches):
    return weft.create_model("levit_nano_32", **{"num_classes": 5, **switches})


def without(state, prefix):
    return {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}


def test_ways_out_of_a_head_that_does_not_fit():
    state = nano().state_dict()
    message = r"head\.linear\.weight: file 5x128, model 7x128.*Pass num_classes=5, or head='drop'"
    assert_refused(nano(num_classes=7), state, message)
    assert_refused(nano(), nano(distilled=False).state_dict(), r"The file has one head: pass distilled=False")
    assert_refused(nano(distilled=False), state, r"unexpected \(head_dist.*The model has fewer heads: pass head='drop'")
    assert_refused(nano(), without(state, "head"), r"The file has no head: pass head='drop'")
    assert_refused(nano(num_classes=0), state, r"The model has fewer heads: pass head='drop'")
    assert weft.load_checkpoint(nano(), without(state, "head"), head="drop").dropped == []
    report = weft.load_checkpoint(nano(num_classes=0), state, head="drop")
    assert {name.split(".")[0] for name in report.dropped} == {"head", "head_dist"}


def test_a_head_that_is_dropped_keeps_its_values_and_is_not_counted():
    state, model = nano().state_dict(), nano(num_classes=9)
    own, head = model.head.linear.weight.clone(), [name for name in state if name.startswith("head")]
    report = weft.load_checkpoint(model, state, head="drop")
    assert (report.tensors, report.dropped) == (len(state) - len(head), head)
    assert torch.equal(model.head.linear.weight, own)
    assert torch.equal(model.stem.conv1.linear.weight, state["stem.conv1.linear.weight"])
    with pytest.raises(UsageError, match="head must be 'keep' or 'drop'; got 'lose'"):
        weft.load_checkpoint(model, state, head="lose")


def test_the_hint_about_heads_is_for_heads_alone():
    """Not for tensors of another type, under any name of a head."""
    state = weft.create_model("resnet18", num_classes=2).state_dict()
    message = r"unexpected \(fc\.weight, fc\.bias\)\. The model"
    assert_refused(weft.create_model("resnet18", num_classes=0), state, message)
    changed = {**nano().state_dict(), "stem.conv1.linear.weight": torch.zeros(16, 3, 3, 3, dtype=torch.int64)}
    assert_refused(nano(), changed, r"model float32\)\. Nothing was loaded")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_of_another_kind(dtype):
    state = {**nano().state_dict(), "stem.conv1.linear.weight": torch.zeros(16, 3, 3, 3, dtype=dtype)}
    kind = str(dtype).removeprefix("torch.")
    assert_refused(nano(), state, rf"1 of different type \(stem\.conv1\.linear\.weight: file {kind}, model float32\)")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read_into_the_models_own(dtype):
    source, model = lively("levit_nano_32", num_classes=5), nano()
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in source.state_dict().items()}
    weft.load_checkpoint(model, state)
    assert model.stem.conv1.linear.weight.dtype == torch.float32
    assert torch.equal(model.stem.conv1.linear.weight, source.stem.conv1.linear.weight.to(dtype).float())


def test_counts_and_three_examples_of_each_kind():
    state = nano().state_dict()
    names = list(without(state, "head"))
    changed = {name: tensor for name, tensor in state.items() if name not in names[:4]}
    changed |= {f"x.{i}": torch.ones(1) for i in range(5)}
    missing = re.escape(", ".join(names[:3]))
    message = rf"levit_nano_32: 4 missing \({missing}, \.\.\.\), 5 unexpected \(x\.0, x\.1, x\.2, \.\.\.\)\. Nothing"
    assert_refused(nano(), changed, message)
    state = {**empty("LeViT_128S"), "blocks.0.m.qkv.c.extra": torch.ones(1)}  # told by its name in the file
    assert_refused(weft.create_model("levit_128s"), state, r"1 unexpected \(blocks\.0\.m\.qkv\.c\.extra\)")


def test_any_timm_model_takes_its_own_names():
    model, other = (weft.create_model("resnet18", num_classes=3) for _ in range(2))
    report = weft.load_checkpoint(model, other.state_dict())
    assert report.source == "the model's own names"
    state = weft.create_model("resnet18", num_classes=4).state_dict()
    assert_refused(model, state, r"fc\.weight: file 4x512, model 3x512")
    theirs = weft.create_model("levit_128s.fb_dist_in1k", num_classes=3)
    assert weft.load_checkpoint(theirs, theirs.state_dict()).tensors == len(theirs.state_dict())


def test_state_dicts_of_something_else():
    assert_refused(nano(), {"a": 3}, r"A state dict must contain names and tensors; got 'a': int")
    assert_refused(nano(), {}, r"match the model levit_nano_32: \d+ missing")
    with pytest.raises(UsageError, match="switches must be 'check' or 'ignore'; got 'off'"):
        weft.load_checkpoint(nano(), {}, switches="off")


def wrapped(state, prefix, **more):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()} | more


@pytest.mark.parametrize("more", [{}, {"criterion.weight": torch.ones(5)}, {"n_averaged": torch.tensor(3)}], ids=len)
@pytest.mark.parametrize("prefix", ["", "net.", "module.", "module._orig_mod.", "model.model.backbone."])
@pytest.mark.parametrize("name", ["cvt_nano_32", "test_resnet"])
def test_weights_are_found_under_the_prefix_of_any_wrapper(tmp_path, name, prefix, more):
    """Lightning, DataParallel, torch.compile, averages: tensors outside the prefix are named as not loaded."""
    source, model = lively(name, num_classes=3), weft.create_model(name, num_classes=3)
    save_file(wrapped(source.state_dict(), prefix, **(more if prefix else {})), tmp_path / "x.safetensors")
    report = weft.load_checkpoint(model, tmp_path / "x.safetensors")
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert (report.prefix, report.dropped) == (prefix, list(more) if prefix else [])
    assert report.tensors == len(source.state_dict())


def test_released_weights_are_found_under_a_prefix():
    model, expected = weft.create_model("levit_128s"), weft.create_model("levit_128s")
    state = released("LeViT_128S")
    report = weft.load_checkpoint(model, wrapped(state, "net.", loss=torch.ones(1)))
    weft.load_checkpoint(expected, state)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert (report.prefix, report.dropped) == ("net.", ["loss"])


def test_of_two_sets_of_weights_one_is_chosen():
    source, average = lively("cvt_nano_32", num_classes=3), lively("cvt_nano_32", num_classes=3).requires_grad_(False)
    average.head.bias.add_(1)
    state = wrapped(source.state_dict(), "net.") | wrapped(average.state_dict(), "ema.module.")
    model = weft.create_model("cvt_nano_32", num_classes=3)
    assert_refused(model, state, r"under 'net\.' and 'ema\.module\.'\. Choose one with prefix=NAME \(--pref")
    assert_refused(model, state, r"got 'nett'\. It has 'net', 'ema'\.", prefix="nett")
    for prefix in ("ema.module", "ema.module."):
        report = weft.load_checkpoint(model, state, prefix=prefix)
        assert torch.equal(model.head.bias, average.head.bias)
        assert set(report.dropped) == {f"net.{name}" for name in source.state_dict()}


def test_what_does_not_fit_under_a_prefix_is_told_by_the_name_in_the_file():
    state = wrapped({**nano().state_dict(), "extra": torch.ones(1)}, "net.")
    assert_refused(nano(), state, r"levit_nano_32: 1 unexpected \(net\.extra\)\. Nothing")
    headless = wrapped(without(nano().state_dict(), "head"), "net.")
    assert_refused(nano(), headless, r"The file has no head: pass head='drop'")


@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
@pytest.mark.parametrize("size", [(48, 48), (32, 56)])
def test_positions_of_another_size_are_resized_as_set_input_size_does(name, size):
    trained = lively(name, num_classes=5)
    loaded = weft.create_model(name, num_classes=5, img_size=size).eval()
    report = weft.load_checkpoint(loaded, trained.state_dict())
    trained.set_input_size(size)
    x = torch.randn(1, 3, *size)
    torch.testing.assert_close(loaded(x), trained(x))
    assert report.resized
    assert all(name.endswith(("pos_embed", "attention_biases")) for name in report.resized)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stage2.blocks.10.attn.conv_proj_q.bn.weight", "stages.2.blocks.10.attn.conv_q.bn.weight"),
        ("stage0.blocks.0.attn.proj.bias", "stages.0.blocks.0.attn.proj.bias"),
        ("backstage0.x", "backstage0.x"),
        ("stagex.0", "stagex.0"),
    ],
)
def test_tables_change_whole_words_only(name, expected):
    assert translate(name, next(row for row in layouts() if row.name == "the released CvT").rename) == expected


def test_names_that_meet_are_refused_and_one_tensor_of_two_names_keeps_both():
    layout = Layout("a test", "a", rename={"a": "c", "b": "c"})
    with pytest.raises(CheckpointError, match="must have each tensor once; a and b both map to c"):
        layout.convert({"a": torch.zeros(1), "b": torch.zeros(1)})
    tied = torch.zeros(2)
    state, origins = Layout("x", signature="").convert({"first": tied, "second": tied})
    assert origins == {"first": "first", "second": "second"}
    assert state.keys() == origins.keys()


def test_a_subclass_with_arguments_of_its_own_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its network was built with is not known where it passes arguments on."""

    class Own(LeViT):
        def __init__(self, **more: Any) -> None:
            super().__init__(**more)

    model = weft.create_model("levit_nano_32", num_classes=3)
    own = Own(**model.arguments)
    layout = Layout("other", signature=r"head\.bn\.weight", asks=lambda state: {"norm": "batch"}, hidden=("norm",))
    monkeypatch.setattr(load, "recognise", lambda state: layout)
    monkeypatch.setattr(load, "family_of_layout", lambda layout: family_of(model))
    load.load_checkpoint(own, model.state_dict())
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in model.state_dict().items())
