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
from tests.helpers import NANO, enliven, images
from tests.models.tiny import FAMILIES, PORTS, SWITCHES, built, lively
from weft.errors import UsageError
from weft.models.families import VARIANTS

RELEASED = ("ceit_tiny_patch16_224", "cvt_13", "levit_128s")
EACH = [*SWITCHES, *(pytest.param(name, marks=pytest.mark.slow) for name in RELEASED)]


def joined(outputs):
    return torch.cat(outputs) if isinstance(outputs, tuple) else outputs


def unused(model):
    return [key for key, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.slow_except(*FAMILIES)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_configuration_the_groups_and_the_decay_match_the_parameters(name):
    model = timm.create_model(f"weft_{name}", device="meta")
    cfg, names = model.default_cfg, {key for key, _ in model.named_parameters()}
    classifier = cfg["classifier"]
    for layer in (*((classifier,) if isinstance(classifier, str) else classifier), cfg["first_conv"]):
        assert f"{layer}.weight" in names
    assert (cfg["interpolation"], tuple(cfg["mean"])) == ("bicubic", (0.485, 0.456, 0.406))
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
        assert set(groups) == names
        assert len(set(groups.values())) > 1
        first = [groups[key] for key in names if key.startswith(("patch_embed", "stem.", "stages.0.patch_embed"))]
        assert set(first) <= {0}
        assert groups[next(key for key in names if key.startswith("head."))] == max(groups.values())
    for pattern in model.no_weight_decay():
        assert fnmatch.filter(names, pattern)
    optimiser = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(names)
    scales = [group["lr_scale"] for group in optimiser.param_groups]
    assert max(scales) == 1
    assert min(scales) < 0.5


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


@pytest.mark.parametrize("name", EACH)
def test_every_parameter_gets_a_gradient(name):
    model = built(name, num_classes=42).train()
    outputs = joined(model(images(model)))
    outputs.square().mean().backward()
    assert outputs.shape[-1] == 42
    assert not torch.isnan(outputs).any()
    assert unused(model) == []


@pytest.mark.parametrize("name", EACH)
def test_the_head_can_go_and_come(name):
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
    assert built(name, num_classes=0).eval()(x).shape == pre_logits.shape


@pytest.mark.parametrize("name", EACH)
def test_a_new_head_has_the_device_the_type_and_the_mode_of_the_model(name):
    model = built(name).to(device="meta", dtype=torch.float64).eval()
    model.reset_classifier(2)
    for head in model.head_modules():
        for parameter in head.parameters():
            assert (parameter.device.type, parameter.dtype) == ("meta", torch.float64)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_frozen_stays_frozen(name):
    model = built(name, device="meta").requires_grad_(False)
    model.reset_classifier(0)
    height, width = model.default_cfg["input_size"][1:]
    model.set_input_size((2 * height, 2 * width))
    assert [key for key, parameter in model.named_parameters() if parameter.requires_grad] == []


@pytest.mark.parametrize("name", EACH)
def test_intermediate_maps_are_those_that_the_feature_info_states(name):
    model = lively(name)
    x = images(model, 1)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    features, maps = model.forward_intermediates(x)
    assert len(maps) == len(info.channels()) >= 2
    for channels, reduction, fmap in zip(info.channels(), info.reduction(), maps, strict=True):
        assert fmap.shape[:2] == (1, channels)
        assert [-(-side // reduction) for side in x.shape[-2:]] == list(fmap.shape[-2:])
    torch.testing.assert_close(features, model.forward_features(x))
    early, first = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert torch.equal(first[0], maps[0])
    assert torch.equal(early, maps[0])
    normed = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    assert normed[0].shape == maps[-1].shape
    backbone = built(name, features_only=True, out_indices=range(len(maps))).eval()
    assert [fmap.shape for fmap in backbone(x)] == [fmap.shape for fmap in maps]
    assert backbone.feature_info.channels() == info.channels()
    with pytest.raises(UsageError, match="output_fmt must be 'NCHW'; got 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("name", FAMILIES)
def test_pruned_levels_leave_no_unused_parameter(name):
    levels = len(built(name, device="meta").feature_info)
    for indices, prune_norm in (([0], False), ([levels - 1], False), (list(range(levels)), True)):
        pruned = built(name, drop_rate=0.5).eval()
        x, options = images(pruned), dict(norm=not prune_norm, intermediates_only=True)
        expected = pruned.forward_intermediates(x, indices=indices, **options)
        take = pruned.prune_intermediate_layers(indices, prune_norm=prune_norm)
        for fmap, own in zip(expected, pruned.forward_intermediates(x, indices=take, **options), strict=True):
            torch.testing.assert_close(own, fmap, rtol=0, atol=0)
        maps = pruned.train().forward_intermediates(x, indices=take, **options)
        sum(fmap.sum() for fmap in maps).backward()
        assert unused(pruned) == []


@pytest.mark.parametrize("name", EACH)
def test_gradient_checkpointing_changes_nothing(name):
    grads = []
    for enable in (False, True):
        model = lively(name)
        model.set_grad_checkpointing(enable)
        model(images(model)).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("in_chans", [1, 4])
def test_images_of_other_channels(name, in_chans):
    model = built(name, in_chans=in_chans).eval()
    assert model.default_cfg["input_size"][0] == in_chans == model.in_chans
    assert model(images(model, 1)).shape == (1, 5)


@pytest.mark.parametrize("name", EACH)
def test_a_symbolic_trace_is_exact_and_trains(name):
    model = lively(name)
    x = images(model)
    tracer = dict(leaf_modules=list(get_notrace_modules()), autowrap_functions=list(get_notrace_functions()))
    train_nodes, eval_nodes = get_graph_node_names(model, tracer_kwargs=tracer, suppress_diff_warning=True)
    traced = create_feature_extractor(
        model,
        train_return_nodes=[train_nodes[-1]],
        eval_return_nodes=[eval_nodes[-1]],
        tracer_kwargs=tracer,
        suppress_diff_warning=True,
    )
    with torch.inference_mode():
        assert torch.equal(traced(x).popitem()[1], model(x))
    graph = torch.fx.GraphModule(model, NodePathTracer().trace(model.train()))
    joined(graph(x)).mean().backward()
    assert unused(graph) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_symbolic_trace_of_the_folded_network_is_exact(name):
    folded = weft.fold(lively(name))
    x = images(folded)
    assert torch.equal(torch.fx.GraphModule(folded, NodePathTracer().trace(folded))(x), folded(x))


def exported(model, x):
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()


def compiled(model, x):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


FORMS = {"export": exported, "jit": torch.jit.trace, "compile": compiled}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
@pytest.mark.slow_except("cvt_nano_32-export")  # and of folded ports: test_ports.py
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*FAMILIES, *PORTS])
def test_every_form_of_torch_answers_alike_for_any_batch(name, form):
    model = lively(name)
    x = images(model, 5)
    other = FORMS[form](model, x[:2])
    for batch in (x, x[:1], x[:3]):
        torch.testing.assert_close(other(batch), model(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NANO)
def test_bf16(name):
    model = lively(name)
    x = images(model)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(x)
    model.to(torch.bfloat16)
    for logits in (mixed, model(x.bfloat16())):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max() + 0.02  # 8 bits


@pytest.mark.parametrize("name", NANO)
def test_rows_of_a_batch_ignore_each_other(name):
    model = lively(name).double()
    x = images(model, 4).double()
    answer = model(x)
    torch.testing.assert_close(model(x[2:3]), answer[2:3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x.flip(0)), answer.flip(0), rtol=1e-12, atol=1e-12)


def test_names_and_arguments_that_do_not_exist_are_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"Unknown model 'levit_128z'. Nearest: levit_128, levit_128s, levit_192"):
        weft.create_model("levit_128z")
    with pytest.raises(UsageError, match=r"Unknown argument of cvt_13 'num_class'. Nearest: num_classes"):
        weft.create_model("cvt_13", num_class=3)
    with pytest.raises(UsageError, match="not_a_model_arg"):
        timm.create_model("weft_cvt_nano_32", not_a_model_arg=1)
    with pytest.raises(UsageError, match="feature_cls of weft's models must be 'getter'; got 'fx'"):
        timm.create_model("weft_cvt_nano_32", features_only=True, feature_cls="fx")


def test_names_of_timm_are_created_and_not_shadowed():
    assert isinstance(weft.create_model("resnet18", num_classes=3, device="meta"), timm.models.ResNet)
    assert type(timm.create_model("levit_128s")).__module__ == "timm.models.levit"


def test_all_models_are_listed_and_ports_only_if_asked_for():
    assert weft.list_models("ceit_tiny*") == ["ceit_tiny_patch16_224", "ceit_tiny_patch16_384"]
    registered = {name.removeprefix("weft_") for name in timm.list_models("weft_*")}
    assert weft.list_models("port_*") == list(PORTS)
    assert set(weft.list_models()) == set(VARIANTS) == registered - set(PORTS)
    assert not set(PORTS) & set(weft.list_models("*cvt*"))
    assert all(name in VARIANTS for name in PORTS)


@pytest.mark.slow
def test_annotated_shapes_hold():
    """Every jaxtyping annotation of the networks is checked while each of them runs, in a process of its own."""
    program = f"""
import jaxtyping
with jaxtyping.install_import_hook(["weft.models", "weft.layers"], "beartype.beartype"):
    import torch, weft.models.registry
for name, switches in {FAMILIES!r}.items():
    model = weft.create_model(name, **switches)
    x = torch.randn(2, *model.default_cfg["input_size"])
    model.train()(x)
    model.eval().forward_intermediates(x, norm=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_lively_networks_have_no_scale_of_zero():
    model = enliven(built("levit_nano_32"))
    assert all((m.weight != 0).all() for m in model.modules() if isinstance(m, nn.BatchNorm1d))
