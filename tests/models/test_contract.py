"""timm's contract, held by every model: what timm's own tests ask of theirs, asked of ours."""

import fnmatch
import subprocess
import sys

import pytest
import timm
import torch
from timm.models import FeatureInfo, get_notrace_functions, get_notrace_modules
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2
from torch import nn
from torchvision.models.feature_extraction import NodePathTracer, create_feature_extractor, get_graph_node_names

import weft
import weft.models.registry  # registers with timm
from tests.helpers import NANO, enliven, images, lively
from weft.errors import UsageError
from weft.models.families import VARIANTS

# One of each family at its paper's size, and the small ones: the others differ in widths alone.
EACH = (
    *NANO,
    "ceit_tiny_patch16_224",
    "cvt_13",
    "levit_128s",
    "grafted_r50s2_deit_small_6",
    "grafted_r50s4_deit_small_0",
)
FAMILIES = (*NANO, "grafted_r50s2_deit_small_6")
FAMILIES_LARGE_SLOW = (*NANO, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[len(NANO) :]))
ignore_jit = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")


def joined(outputs):
    return torch.cat(outputs) if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize("name", VARIANTS)
def test_names_in_the_config_are_in_the_state_dict(name):
    model = timm.create_model(f"weft_{name}", device="meta")
    cfg, keys = model.default_cfg, model.state_dict().keys()
    classifier = cfg["classifier"]
    for head in classifier if isinstance(classifier, (tuple, list)) else (classifier,):
        assert f"{head}.weight" in keys
    assert f"{cfg['first_conv']}.weight" in keys
    assert cfg["interpolation"] == "bicubic"
    assert tuple(cfg["mean"]) == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("name", "crop_pct", "crop_mode"),
    [
        ("ceit_tiny_patch16_224", 224 / 256, "center"),
        ("ceit_small_patch16_384", 384 / 438, "center"),
        ("cvt_13", 224 / 256, "center"),
        ("cvt_w24", 1.0, "squash"),
        ("levit_256", 224 / 256, "center"),
    ],
)
def test_evaluation_prepares_images_as_released(name, crop_pct, crop_mode):
    cfg = timm.create_model(f"weft_{name}", device="meta").default_cfg
    assert (cfg["crop_pct"], cfg.get("crop_mode", "center")) == (crop_pct, crop_mode)


@pytest.mark.parametrize("name", VARIANTS)
def test_groups_and_decay_match_every_parameter(name):
    model = timm.create_model(f"weft_{name}", device="meta")
    names = {key for key, _ in model.named_parameters()}
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
        assert set(groups) == names
        assert len(set(groups.values())) > 1
        order = [groups[key] for key in names if key.startswith(("patch_embed", "stem.", "stages.0.patch_embed"))]
        assert all(value == 0 for value in order)
        assert groups[next(key for key in names if key.startswith("head."))] == max(groups.values())
    for pattern in model.no_weight_decay():
        assert any(fnmatch.fnmatch(key, pattern) for key in names)


@pytest.mark.parametrize("name", EACH)
def test_every_parameter_gets_a_gradient(name):
    model = weft.create_model(name, num_classes=42).train()
    outputs = joined(model(images(model)))
    outputs.mean().backward()
    assert outputs.shape[-1] == 42
    assert not torch.isnan(outputs).any()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


@pytest.mark.slow_except("levit_nano_32", "ceit_nano_32", "cvt_nano_32")
@pytest.mark.parametrize("name", EACH)
def test_head_can_go_and_come(name):
    model = lively(name)
    x = images(model)
    features = model.forward_features(x)
    pre_logits = model.forward_head(features, pre_logits=True)
    assert features.shape[-1] == model.num_features
    assert pre_logits.shape == (2, model.head_hidden_size)
    torch.testing.assert_close(model.forward_head(features), model(x))
    model.reset_classifier(0)
    assert model.num_classes == 0
    torch.testing.assert_close(model(x), pre_logits)
    model.reset_classifier(0, "")
    assert model(x).shape == features.shape
    model.reset_classifier(7, model.pools[0])
    assert model(x).shape == (2, 7)
    bare = weft.create_model(name, num_classes=0).eval()
    assert bare(x).shape == pre_logits.shape


@pytest.mark.parametrize("name", EACH)
def test_new_head_lives_where_the_model_lives(name):
    model = weft.create_model(name).to(device="meta", dtype=torch.float64).eval()
    model.reset_classifier(2)
    for head in model.head_modules():
        for parameter in head.parameters():
            assert (parameter.device.type, parameter.dtype) == ("meta", torch.float64)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_frozen_stays_frozen(name):
    model = weft.create_model(name, device="meta").requires_grad_(False)
    model.reset_classifier(0)
    height, width = model.default_cfg["input_size"][1:]
    model.set_input_size((2 * height, 2 * width))
    assert [key for key, parameter in model.named_parameters() if parameter.requires_grad] == []


@pytest.mark.parametrize("name", EACH)
def test_intermediates(name):
    model = lively(name)
    x = images(model, 1)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    features, maps = model.forward_intermediates(x)
    assert len(maps) == len(info.channels()) >= 3
    for channels, reduction, fmap in zip(info.channels(), info.reduction(), maps, strict=True):
        assert fmap.shape[:2] == (1, channels)
        assert [-(-side // reduction) for side in x.shape[-2:]] == list(fmap.shape[-2:])
    torch.testing.assert_close(features, model.forward_features(x))
    early, first = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert torch.equal(first[0], maps[0])
    assert torch.equal(early, maps[0])
    normed = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    assert normed[0].shape == maps[-1].shape
    with pytest.raises(UsageError, match="output_fmt must be 'NCHW'; got 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("name", EACH)
def test_features_only(name):
    model = weft.create_model(name, features_only=True).eval()
    maps = model(torch.randn(1, *model.default_cfg["input_size"]))
    assert [fmap.shape[1] for fmap in maps] == model.feature_info.channels()
    assert len(maps) >= 3


@pytest.mark.slow_except("grafted_r50s2_deit_small_6")
@pytest.mark.parametrize("name", FAMILIES)
def test_pruned_levels_leave_no_unused_parameter(name):
    levels = len(weft.create_model(name, device="meta").feature_info)
    for indices, prune_norm in (([0], False), ([levels - 1], False), (list(range(levels)), True)):
        pruned = weft.create_model(name, drop_rate=0.5).eval()
        x, options = images(pruned), dict(norm=not prune_norm, intermediates_only=True)
        expected = pruned.forward_intermediates(x, indices=indices, **options)
        take = pruned.prune_intermediate_layers(indices, prune_norm=prune_norm)
        for fmap, own in zip(expected, pruned.forward_intermediates(x, indices=take, **options), strict=True):
            torch.testing.assert_close(own, fmap, rtol=0, atol=0)
        maps = pruned.train().forward_intermediates(x, indices=take, **options)
        sum(fmap.sum() for fmap in maps).backward()
        assert [key for key, parameter in pruned.named_parameters() if parameter.grad is None] == []


@pytest.mark.slow_except("ceit_tiny_patch16_224")
@pytest.mark.parametrize("name", EACH)
def test_gradient_checkpointing_changes_nothing(name):
    grads = []
    for enable in (False, True):
        model = lively(name, num_classes=3)
        model.set_grad_checkpointing(enable)
        model(images(model)).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("in_chans", [1, 4])
def test_other_channels(name, in_chans):
    model = weft.create_model(name, in_chans=in_chans, num_classes=3).eval()
    assert model.default_cfg["input_size"][0] == in_chans == model.in_chans
    assert model(images(model, 1)).shape == (1, 3)


@pytest.mark.slow_except("cvt_nano_32")
@pytest.mark.parametrize("name", EACH)
def test_symbolic_trace_is_exact(name):
    model = lively(name)
    x = images(model)
    with torch.inference_mode():
        expected = model(x)
        assert torch.equal(traced(model)(x).popitem()[1], expected)


def traced(model):
    tracer = dict(leaf_modules=list(get_notrace_modules()), autowrap_functions=list(get_notrace_functions()))
    train_nodes, eval_nodes = get_graph_node_names(model, tracer_kwargs=tracer, suppress_diff_warning=True)
    return create_feature_extractor(
        model,
        train_return_nodes=[train_nodes[-1]],
        eval_return_nodes=[eval_nodes[-1]],
        tracer_kwargs=tracer,
        suppress_diff_warning=True,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_symbolic_trace_trains(name):
    model = weft.create_model(name, num_classes=5).train()
    x = images(model)
    graph = torch.fx.GraphModule(model, NodePathTracer().trace(model))
    joined(graph(x)).mean().backward()
    assert [key for key, parameter in graph.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_symbolic_trace_of_the_folded_network(name):
    folded = weft.fold(lively(name, num_classes=5))
    x = images(folded)
    graph = torch.fx.GraphModule(folded, NodePathTracer().trace(folded))
    assert torch.equal(graph(x), folded(x))


@ignore_jit
@pytest.mark.parametrize("name", FAMILIES_LARGE_SLOW)
def test_jit_trace(name):
    model = lively(name)
    x = images(model, 3)
    trace = torch.jit.trace(model, x[:2])
    for batch in (x, x[:1]):
        torch.testing.assert_close(trace(batch), model(batch))


@pytest.mark.slow_except("cvt_nano_32")
@pytest.mark.parametrize("name", FAMILIES_LARGE_SLOW)
def test_torch_export_with_any_batch(name):
    model = lively(name)
    x = images(model, 5)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (x, x[:1], x[:3]):
        torch.testing.assert_close(program.module()(batch), model(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_torch_compile_in_one_graph(name):
    model = lively(name)
    x = images(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16(name):
    model = lively(name)
    x = images(model)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x)
    model.to(torch.bfloat16)
    for logits in (mixed, model(x.bfloat16())):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max() + 0.02  # 8 bits, some 60 layers


@pytest.mark.parametrize("name", NANO)
def test_rows_of_a_batch_ignore_each_other(name):
    model = lively(name).double()
    x = images(model, 4).double()
    answer = model(x)
    torch.testing.assert_close(model(x[2:3]), answer[2:3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x.flip(0)), answer.flip(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NANO)
def test_layer_decay_builds_an_optimiser(name):
    model = weft.create_model(name)
    optimiser = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(list(model.parameters()))
    scales = [group["lr_scale"] for group in optimiser.param_groups]
    assert max(scales) == 1
    assert min(scales) < 0.5


def test_unknown_names():
    with pytest.raises(UsageError, match=r"Unknown model 'levit_128z'. Nearest: levit_128, levit_128s, levit_192"):
        weft.create_model("levit_128z")
    with pytest.raises(UsageError, match=r"Unknown argument of cvt_13 'num_class'. Nearest: num_classes"):
        weft.create_model("cvt_13", num_class=3)
    with pytest.raises(UsageError, match="not_a_model_arg"):
        timm.create_model("weft_cvt_nano_32", not_a_model_arg=1)
    with pytest.raises(UsageError, match="feature_cls of weft's models must be 'getter'; got 'fx'"):
        timm.create_model("weft_cvt_nano_32", features_only=True, feature_cls="fx")


def test_timm_names_are_created_and_not_shadowed():
    assert isinstance(weft.create_model("resnet18", num_classes=3), timm.models.ResNet)
    assert type(timm.create_model("levit_128s")).__module__ == "timm.models.levit"


def test_list_models():
    assert weft.list_models("ceit_tiny*") == ["ceit_tiny_patch16_224", "ceit_tiny_patch16_384"]
    registered = {name.removeprefix("weft_") for name in timm.list_models("weft_*")}
    assert set(weft.list_models()) == set(VARIANTS) == registered - set(weft.list_models("port_*"))


@pytest.mark.slow
def test_annotated_shapes_hold():
    """Every jaxtyping annotation of the networks is checked while each of them runs, in a process of its own."""
    program = f"""
import jaxtyping
with jaxtyping.install_import_hook(["weft.models", "weft.layers"], "beartype.beartype"):
    import torch, weft.models.registry
for name in {FAMILIES!r}:
    model = weft.create_model(name, num_classes=3)
    x = torch.randn(2, *model.default_cfg["input_size"])
    model.train()(x)
    model.eval().forward_intermediates(x, norm=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_enliven_touches_every_batch_norm():
    model = enliven(weft.create_model("levit_nano_32"))
    assert all((m.weight != 0).all() for m in model.modules() if isinstance(m, nn.BatchNorm1d))
