"""Equal to the released code: its recorded outputs, from weights that key and shape alone determine.

tests/reference/README.md says how they were recorded. Nothing there is left unused: not a record, not a key list.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from tests.reference.deterministic import fill, image_batch
from weft.checkpoints.load import recognise
from weft.layers.tokens import to_map
from weft.models.ceit.network import CeiT

FOLDER = Path(__file__).parents[1] / "reference"
NETWORKS = json.loads((FOLDER / "official_state_dicts.json").read_text())
GOLDEN = dict(np.load(FOLDER / "golden.npz"))
GOLDEN_MORE = dict(np.load(FOLDER / "golden_more.npz"))
RECORDED = sorted({key.split("/")[0] for key in GOLDEN})
ONE_PER_FAMILY = ("CeiT-pytorch", "LeViT_128S", "LeViT_c_128S", "cvt-13-224x224", "ceit_tiny_patch16_224")


def our_name(theirs: str) -> str:
    if theirs == "CeiT-pytorch":
        return "port_ceit_pytorch"
    if theirs.startswith("cvt"):
        return "_".join(theirs.split("-")[:2])
    return theirs.lower().replace("_c_", "_")


def released_state(theirs: str) -> dict[str, Tensor]:
    shapes = NETWORKS[theirs]["state_dict"]
    filled = {key: fill(key, tuple(shape)) for key, shape in dict(shapes).items()}
    return {key: torch.from_numpy(value) for key, value in filled.items() if value is not None}


def build(theirs: str, state: dict[str, Tensor]) -> nn.Module:
    switches = recognise(state).switches(state) if theirs == "CeiT-pytorch" else {}
    return weft.create_model(our_name(theirs), img_size=NETWORKS[theirs]["image_size"], **switches)


@functools.cache
def loaded(theirs: str) -> nn.Module:
    state = released_state(theirs)
    model = build(theirs, state)
    weft.load_checkpoint(model, state)
    return model.eval()


@functools.cache
def run(theirs: str) -> dict[str, Tensor]:
    """Everything recorded about a network, computed here in float64."""
    model = loaded(theirs).double()
    taps: dict[str, Tensor] = {}
    hooks = watch(model, taps, as_maps="_c_" in theirs)
    x = torch.from_numpy(image_batch(NETWORKS[theirs]["image_size"]))
    with torch.inference_mode():
        taps["logits"] = model(x)
        if model.distilled:
            features = model.forward_head(model.forward_features(x), pre_logits=True)
            taps["logits_head"], taps["logits_head_dist"] = model.head(features), model.head_dist(features)
    for hook in hooks:
        hook.remove()
    model.float()
    return taps


def watch(model: nn.Module, taps: dict[str, Tensor], as_maps: bool) -> list:
    """Hooks that put inner tensors under the names of the records."""
    hooks = []

    def output_of(module, name, change=lambda tensor: tensor):
        hooks.append(module.register_forward_hook(lambda m, args, out: taps.__setitem__(name, change(out))))

    def input_of(module, name, change):
        hooks.append(module.register_forward_pre_hook(lambda m, args: taps.__setitem__(name, change(args[0]))))

    if isinstance(model, CeiT):
        output_of(model.patch_embed.pool, "feature_map_after_i2t_maxpool")
        output_of(model.patch_embed, "tokens_after_i2t")
        output_of(model.lca, "class_token_after_lca")
        for i, block in enumerate(model.blocks):
            output_of(block, f"tokens_after_block_{i}")
    elif type(model).__name__ == "CvT":
        for i, stage in enumerate(model.stages):
            output_of(stage.patch_embed, f"feature_map_after_token_embedding_{i}")
            sides = tuple(model.grids[i])
            prefix = model.num_prefix if i == 2 else 0
            output_of(
                stage.blocks[-1],
                f"feature_map_after_stage_{i}",
                lambda tokens, prefix=prefix, sides=sides: to_map(tokens[:, prefix:], sides),
            )
    else:
        count = 0
        output_of(model.stem, "feature_map_after_stem")
        for i, stage in enumerate(model.stages):
            shape = functools.partial(to_map, grid=model.grids[i]) if as_maps else (lambda tokens: tokens)
            if i:
                output_of(stage.downsample.attn_downsample, f"after_block_{count}", shape)
                output_of(stage.downsample, f"after_block_{count + 1}", shape)
                count += 2
            for block in stage.blocks:  # each of the released list's blocks is one residual: attention, then MLP
                input_of(block.norm2, f"after_block_{count}", shape)
                output_of(block, f"after_block_{count + 1}", shape)
                count += 2
    return hooks


@pytest.mark.slow_except("CeiT-pytorch", "LeViT_128S", "LeViT_c_128S")
@pytest.mark.parametrize("theirs", RECORDED)
def test_every_record_is_reproduced(theirs):
    taps = run(theirs)
    names = {key.split("/")[1] for key in GOLDEN if key.split("/")[0] == theirs}
    assert names <= taps.keys()
    for name in sorted(names):
        record, ours = torch.from_numpy(GOLDEN[f"{theirs}/{name}"]), taps[name]
        if not name.startswith("logits"):
            flat = ours.contiguous().flatten()
            ours = torch.cat([flat.mean()[None], flat.std()[None], flat[:6]])
        torch.testing.assert_close(ours, record, rtol=1e-9, atol=1e-9 * record.abs().max().item(), msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("record", sorted(GOLDEN_MORE))
def test_logits_of_large_networks(record):
    """CeiT-B and CeiT-S at 384 pixels, in float64, on other images."""
    theirs = record.partition("/")[0]
    expected, state = torch.from_numpy(GOLDEN_MORE[record]), released_state(theirs)
    model = build(theirs, state)  # not `loaded`, which keeps it
    weft.load_checkpoint(model, state)
    images = torch.from_numpy(image_batch(NETWORKS[theirs]["image_size"], 2, 5))
    with torch.inference_mode():
        logits = model.double().eval()(images)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())


@pytest.mark.slow_except(*ONE_PER_FAMILY)
@pytest.mark.parametrize("theirs", RECORDED)
def test_logits_in_float32(theirs):
    record = torch.from_numpy(GOLDEN[f"{theirs}/logits"])
    with torch.inference_mode():
        ours = loaded(theirs).float()(torch.from_numpy(image_batch(NETWORKS[theirs]["image_size"])).float())
    assert (ours.double() - record).abs().max() <= 1e-5 * record.abs().max()
    assert torch.equal(ours.argmax(dim=1), record.argmax(dim=1))


@pytest.mark.slow_except(*ONE_PER_FAMILY)
@pytest.mark.parametrize("theirs", NETWORKS)
def test_every_released_state_dict_is_read_whole(theirs):
    state = released_state(theirs)
    with torch.device("cpu"):
        model = build(theirs, state)
    report = weft.load_checkpoint(model, state)
    assert sum(parameter.numel() for parameter in model.parameters()) == NETWORKS[theirs]["parameters"]
    assert report.tensors == len(state)
    assert report.resized == report.dropped == []
    sums = sum(value.double().sum() for key, value in state.items() if not key.endswith("num_batches_tracked"))
    ours = sum(value.double().sum() for value in model.state_dict().values() if value.is_floating_point())
    torch.testing.assert_close(ours, sums, rtol=1e-9, atol=1e-6)  # every number arrived


@pytest.mark.slow_except(*ONE_PER_FAMILY)
@pytest.mark.parametrize("theirs", [name for name in NETWORKS if name != "CeiT-pytorch"])
def test_the_same_parameters_go_without_decay(theirs):
    model = weft.create_model(our_name(theirs), device="meta")
    assert len(model.no_weight_decay()) == len(NETWORKS[theirs]["no_weight_decay"])
