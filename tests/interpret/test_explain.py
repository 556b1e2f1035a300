"""What a network looked at: maps by their definitions, folded or not, any size; files; and a check that it matters."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import weft
from tests.data.pictures import jpeg
from tests.helpers import NANO, images, lively, noise_images
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main
from weft.data import open_data
from weft.deploy import export
from weft.errors import CheckpointError, UsageError
from weft.grid import Grid
from weft.inference import Predictor, explain_files, explain_run, open_model
from weft.inference.torch_model import TorchModel
from weft.interpret import explain, gradcam
from weft.interpret.maps import attention_maps, rollout
from weft.layers.attention import AttentionLayer, record_attention
from weft.train import train

LEVELS = {
    "ceit_nano_32": {"blocks.0": 8, "blocks.2": 8, "blocks.3": 8, "blocks.5": 8},
    "cvt_nano_32": {"stages.0": 8, "stages.1": 4, "stages.2": 2},  # keys are on every second place
    "levit_nano_32": {"stages.0": 8, "stages.1": 4, "stages.2": 2},
}


def one(model: Any, seed: int = 0) -> torch.Tensor:
    return images(model, 1, seed)[0]


@pytest.mark.parametrize("name", NANO)
def test_maps_of_every_family(name):
    model = lively(name, num_classes=5)
    found = explain(model, one(model))
    assert {level: fmap.shape for level, fmap in found.attention.items()} == {
        level: (side, side) for level, side in LEVELS[name].items()
    }
    assert found.rollout is not None
    for fmap in (*found.attention.values(), found.rollout):
        assert fmap.min() >= 0
        assert fmap.sum() == pytest.approx(1, abs=1e-5)
    assert (found.depth is None) == (name != "ceit_nano_32")
    assert found.probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert found.label == found.probabilities.argmax()
    assert found.image.shape == (32, 32, 3)
    assert found.grad_cam is not None
    assert found.grad_cam.min() >= 0
    last = list(found.attention.values())[-1]
    assert found.saliency is not None
    np.testing.assert_array_equal(found.saliency, found.rollout if name == "levit_nano_32" else last)
    model.set_input_size((48, 64))
    found = explain(model, one(model))
    assert next(iter(found.attention.values())).shape == (12, 16)
    assert found.rollout.shape[0] * 4 == found.rollout.shape[1] * 3
    assert found.rollout.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", NANO)
def test_a_folded_network_looks_where_the_other_does(name):
    model = lively(name, num_classes=5)
    x = one(model)
    first, second = explain(model, x), explain(weft.fold(model), x)
    for level, fmap in first.attention.items():
        np.testing.assert_allclose(second.attention[level], fmap, atol=1e-5)
    for kind in ("rollout", "depth", "grad_cam"):
        if getattr(first, kind) is not None:
            np.testing.assert_allclose(getattr(second, kind), getattr(first, kind), atol=1e-5)


@pytest.mark.parametrize("name", NANO)
def test_watching_changes_no_answer_and_ends(name):
    model = lively(name, num_classes=5)
    x = images(model, 2)
    with torch.no_grad():
        plain = model(x)
        with record_attention() as weights:
            torch.testing.assert_close(model(x), plain)
        count = len(weights)
        model(x)
    assert len(weights) == count > 3
    for weight in weights:
        torch.testing.assert_close(weight.sum(dim=-1), torch.ones(weight.shape[:-1]))


def test_weights_are_those_of_the_definition():
    model = lively("ceit_nano_32", num_classes=5)
    x = images(model, 2)
    with torch.no_grad(), record_attention() as weights:
        model(x)
        block = model.blocks[0]
        q, k, _ = block.attn.qkv(block.norm1(model.embed(x))).chunk(3, dim=-1)
    heads = block.attn.num_heads
    q, k = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (q, k))
    expected = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
    torch.testing.assert_close(weights[0], expected)
    assert len(weights) == len(model.blocks) + 1  # and LCA's


@pytest.mark.parametrize("lca", [False, True])
def test_rollout_is_the_product_of_all_layers(lca):
    model = lively("ceit_nano_32", num_classes=5, lca=lca)
    x = images(model, 2)
    with torch.no_grad(), record_attention() as weights:
        model(x)
    maps = attention_maps(model, weights, Grid(32, 32))
    blocks = [weight.mean(dim=1) for weight in weights[: len(model.blocks)]]
    so_far, class_rows = torch.eye(65).expand(2, -1, -1), []
    for weight in blocks:
        so_far = (weight + torch.eye(65)) / 2 @ so_far
        class_rows.append(so_far[:, 0])
    row = class_rows[-1]
    if lca:
        depth = weights[-1].mean(dim=1)[:, 0]
        row = (row + sum(depth[:, i, None] * class_rows[i] for i in range(len(blocks)))) / 2
    expected = row[:, 1:] / row[:, 1:].sum(dim=1, keepdim=True)
    torch.testing.assert_close(maps.rollout.flatten(1), expected)


def test_rollout_through_shrinking_attention():
    model = lively("levit_nano_32", num_classes=5)
    with torch.no_grad(), record_attention() as weights:
        model(images(model, 2))
    maps = attention_maps(model, weights, Grid(32, 32))
    row = torch.full((2, 1, maps.levels["stages.2"].shape[1] ** 2), 1 / maps.levels["stages.2"].shape[1] ** 2)
    for weight in reversed([weight.mean(dim=1) for weight in weights]):
        is_square = weight.shape[1] == weight.shape[2]
        row = (row @ weight + row) / 2 if is_square else row @ weight
    torch.testing.assert_close(maps.rollout.flatten(1), row[:, 0])


def test_a_strided_key_stands_for_the_tokens_around_it():
    keys = torch.tensor([[[0.0, 0.4, 0.3, 0.2, 0.1]] * 17])
    found = rollout([AttentionLayer(keys, Grid(4, 4), Grid(2, 2), 1, True, "stages.2", joins=False)])
    expected = torch.tensor([[0.1, 0.1, 0.075, 0.075]] * 2 + [[0.05, 0.05, 0.025, 0.025]] * 2)
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize(
    ("name", "options", "module", "prefix"),
    [
        ("levit_nano_32", {}, "stages.2", 0),
        ("deit_tiny_patch16_224", {"global_pool": "avg"}, "blocks.2", 1),
        ("deit_tiny_patch16_224", {"global_pool": "token"}, "blocks.1", 1),
    ],
)
def test_grad_cam_is_the_gradient_times_the_last_map_that_reaches_the_prediction(name, options, module, prefix):
    """Of a class token, the other tokens of the last block never reach it."""
    if prefix:
        model: Any = weft.create_model(name, num_classes=4, img_size=(32, 48), depth=3, **options).eval()
    else:
        model = lively(name, num_classes=5)
    x, tokens = torch.randn(1, 3, 32, 48 if prefix else 32), list[torch.Tensor]()
    handle = model.get_submodule(module).register_forward_hook(lambda module, args, output: tokens.append(output))
    logits = model(x)
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[0, 3], tokens[0])
    gradient, fmap = (values[:, prefix:] for values in (gradient, tokens[0]))
    expected = (gradient.mean(dim=1, keepdim=True) * fmap).sum(dim=2).relu().unflatten(1, (2, 3 if prefix else 2))
    torch.testing.assert_close(gradcam.grad_cam(model, x, 3), expected.detach())
    assert not model.get_submodule(module)._forward_hooks


class Laid(nn.Module):
    """One network in several layouts: its only feature level is a map of 16 pixels a place, or tokens.

    Args:
        layout: of the output of `body`, and of what follows.
        pool: the mean over all places predicts, or with 'token' the first token, which sees the others in `mix`.
        own: the network lays its levels out as maps itself, as timm's do; or it has no such function; or that
            function returns other values than those of the levels.
    """

    def __init__(self, layout: str, *, pool: str = "avg", prefix: int = 0, own: str = "yes") -> None:
        super().__init__()
        self.layout, self.pool, self.num_prefix_tokens, self.own = layout, pool, prefix, own
        self.embed, self.head = nn.Conv2d(3, 8, 16, 16), nn.Linear(8, 4)
        self.body, self.mix = nn.Identity(), nn.Identity()
        self.feature_info = [{"module": "body"}, {"module": "mix"}]
        if own != "no":
            self.forward_intermediates = self._maps

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        values = self._levels(image)[1]
        if self.layout in ("channels first", "channels last"):
            return self.head(values.mean(dim=(2, 3) if self.layout == "channels first" else (1, 2)))
        return self.head(values[:, 0] if self.pool == "token" else values[:, self.num_prefix_tokens :].mean(dim=1))

    def _levels(self, image: torch.Tensor) -> list[torch.Tensor]:
        fmap = self.embed(image)
        if self.layout == "channels first":
            body = self.body(fmap)
        elif self.layout == "channels last":
            body = self.body(fmap.permute(0, 2, 3, 1))
        else:
            rows = fmap.transpose(2, 3) if self.layout == "columns" else fmap
            tokens = rows.flatten(2).transpose(1, 2)
            body = self.body(torch.cat([tokens.new_ones(len(image), self.num_prefix_tokens, 8), tokens], dim=1))
        mixed = body
        if self.pool == "token":
            mixed = torch.cat([body[:, self.num_prefix_tokens :].mean(dim=1, keepdim=True), body[:, 1:]], dim=1)
        return [body, self.mix(mixed)]

    def _maps(self, image: torch.Tensor, indices: list[int], intermediates_only: bool) -> list[torch.Tensor]:
        values = self._levels(image)[indices[0]]
        if self.own == "other values":
            values = values.softmax(dim=-1)
        if self.layout in ("channels first", "channels last"):
            return [values if self.layout == "channels first" else values.permute(0, 3, 1, 2)]
        rows, columns = (side // 16 for side in image.shape[2:])
        tokens = values[:, self.num_prefix_tokens :].transpose(1, 2)
        if self.layout == "columns":
            return [tokens.unflatten(2, (columns, rows)).transpose(2, 3)]
        return [tokens.unflatten(2, (rows, columns))]


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (48, 16)])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("channels first", {}),
        ("channels last", {}),
        ("rows", {}),
        ("rows", {"prefix": 1}),
        ("rows", {"prefix": 5}),
        ("rows", {"prefix": 1, "pool": "token"}),
        ("rows", {"prefix": 5, "pool": "token"}),
        ("columns", {"prefix": 1}),
    ],
)
def test_the_map_of_a_network_is_the_same_in_every_layout(layout, options, size):
    """And has the aspect of the image; the last level is skipped if only its class token predicts."""
    expected, model = Laid("channels first"), Laid(layout, **options)
    model.load_state_dict(expected.state_dict())
    x = torch.randn(2, 3, *size)
    cam = gradcam.grad_cam(model, x, 2)
    assert cam.shape == (2, size[0] // 16, size[1] // 16)
    assert cam.any()
    torch.testing.assert_close(cam, gradcam.grad_cam(expected, x, 2))
    gradient = expected.head.weight[2, :, None, None] / (cam.shape[1] * cam.shape[2])
    torch.testing.assert_close(cam, (gradient * expected.embed(x)).sum(dim=1).relu().detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_map_of_a_network_in_another_number_format(dtype):
    model, x = Laid("columns"), torch.randn(1, 3, 512, 384)
    cam = gradcam.grad_cam(model, x, 2)
    found = gradcam.grad_cam(model.to(dtype), x.to(dtype), 2)
    torch.testing.assert_close(found.float(), cam, atol=0.02 * float(cam.max()), rtol=0.02)


def test_a_map_without_a_function_of_the_network_is_that_of_its_output_or_refused():
    expected, model = Laid("channels first"), Laid("channels first", own="no")
    model.load_state_dict(expected.state_dict())
    x = torch.randn(1, 3, 64, 96)
    torch.testing.assert_close(gradcam.grad_cam(model, x, 0), gradcam.grad_cam(expected, x, 0))
    for own in ("no", "other values"):  # the order of tokens is not known
        with pytest.raises(UsageError, match=r"64x96 images the last of its feature levels has the shape \(1, 24, 8\)"):
            gradcam.grad_cam(Laid("rows", own=own), x, 0)


def test_frozen_layers_and_a_classifier_of_zeros_have_a_map():
    model, x = Laid("channels last").requires_grad_(False), torch.randn(1, 3, 64, 96)
    with torch.inference_mode():
        assert gradcam.grad_cam(model, x, 0).any()
    nn.init.zeros_(model.head.weight)
    assert not gradcam.grad_cam(model, x, 0).any()


class Remembering(Laid):
    """Keeps a tensor of its first pass, as ConViT does."""

    kept: torch.Tensor | None = None

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.kept = torch.full((1, 3, 1, 1), 2.0) if self.kept is None else self.kept
        return super().forward(image * self.kept)


def test_tensors_of_an_earlier_pass_do_not_stop_the_gradient():
    model, x = Remembering("channels first"), torch.randn(3, 64, 96)
    found = explain(model, x, label=1)  # its first pass is in inference mode
    expected = gradcam.grad_cam(Remembering("channels first").requires_grad_(False), x[None], 1)
    assert found.grad_cam is not None
    assert found.grad_cam.shape == expected.shape[1:]


WIDE = (64, 96)
GRAFTED = ("grafted_r50s2_deit_small_6", "grafted_r50s0_deit_small_12")


@pytest.mark.parametrize(
    ("name", "options", "size", "shape"),
    [
        ("test_resnet", {}, WIDE, (2, 3)),
        ("test_convnext", {}, WIDE, (2, 3)),
        ("test_mambaout", {}, WIDE, (2, 3)),  # channels last
        ("test_coatnet", dict(img_size=WIDE), WIDE, (2, 3)),  # convolutions, then attention
        ("test_vit", dict(img_size=WIDE), WIDE, (4, 6)),
        ("grafted_r50s4_deit_small_0", dict(img_size=64), (64, 64), (2, 2)),
        ("grafted_r50s2_deit_small_6", dict(img_size=64, depth=2), (64, 64), (4, 4)),
        # one layer: the map before it
        *((name, dict(img_size=64, depth=1), (64, 64), (4, 4)) for name in GRAFTED),
        *(
            pytest.param(name, dict(img_size=WIDE), WIDE, (2, 3), marks=pytest.mark.slow)
            for name in ("swin_tiny_patch4_window7_224", "vit_tiny_r_s16_p8_224", "hiera_tiny_224")
        ),
    ],
)
def test_networks_without_attention_maps_have_grad_cam(name, options, size, shape):
    found = explain(weft.create_model(name, num_classes=4, **options).eval(), torch.randn(3, *size))
    assert (found.attention, found.rollout) == ({}, None)
    assert found.grad_cam is not None
    assert found.grad_cam.shape == shape
    assert found.grad_cam.max() > 0 or name not in GRAFTED


MAX_PARAMS = 100e6
SMALL = ("test_", "atto", "femto", "pico", "nano", "xxs", "tiny", "mini", "small", "18", "b0", "050", "_s")


def timm_modules() -> dict[str, list[str]]:
    """Module of timm -> its models, those with the name of a small one first."""
    modules: dict[str, list[str]] = {}
    for name in timm.list_models():
        if not name.startswith("weft_"):
            modules.setdefault(timm.models.model_entrypoint(name).__module__.rpartition(".")[2], []).append(name)
    for names in modules.values():
        names.sort(key=lambda name: (next((i for i, word in enumerate(SMALL) if word in name), len(SMALL)), name))
    return modules


def built(name: str) -> tuple[Any, torch.Tensor] | None:
    """A network of timm and images of the first size that it takes; None if it is too large for a test."""
    with torch.device("meta"):
        if sum(weight.numel() for weight in timm.create_model(name).parameters()) > MAX_PARAMS:
            return None
    for options, size in (({"img_size": (64, 96)}, (64, 96)), ({"img_size": 64}, (64, 64)), ({}, (64, 96)), ({}, None)):
        try:
            model: Any = timm.create_model(name, num_classes=4, **options).eval()
            x = torch.randn(1, model.pretrained_cfg["input_size"][0], *(size or model.pretrained_cfg["input_size"][1:]))
            with torch.inference_mode():
                model(x)
        except Exception:
            if size is None:
                raise
        else:
            return model, x
    raise AssertionError(name)


@pytest.mark.slow
@pytest.mark.parametrize("module", timm_modules())
def test_every_network_of_timm_has_a_map_of_the_aspect_of_the_image_or_is_refused(module):
    candidates = (built(name) for name in timm_modules()[module][:4])
    model, x = next((candidate for candidate in candidates if candidate is not None), (None, None))
    if model is None or x is None:
        pytest.skip("all small ones are too large for a test")
    height, width = x.shape[2:]
    try:
        cam = explain(model, x[0], label=1).grad_cam
    except UsageError:
        assert module in ("crossvit", "mvitv2", "twins")
        return
    assert cam is not None
    assert np.isfinite(cam).all()
    assert max(cam.shape[0] - 1, 0) / height < (cam.shape[1] + 1) / width
    assert max(cam.shape[1] - 1, 0) / width < (cam.shape[0] + 1) / height


@pytest.mark.parametrize(("name", "kind"), [("ceit", "rollout"), ("ceit", "grad_cam"), ("tokens", "grad_cam")])
def test_two_threads_explain_one_model(name, kind):
    """Each gets the maps of its own image, as it would alone."""
    model = lively("ceit_nano_32", num_classes=5) if name == "ceit" else Laid("rows", prefix=1, pool="token").eval()
    photos = [torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def maps(image: torch.Tensor) -> Any:
        if kind == "grad_cam":
            return gradcam.grad_cam(model, image[None], 1).numpy()
        return explain(model, image, grad_cam=False).rollout

    alone = [maps(image) for image in photos]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(maps, photos * 3))
    for i, found in enumerate(together):
        np.testing.assert_array_equal(found, alone[i % 8])


def test_one_forward_pass_without_grad_cam():
    model = lively("ceit_nano_32", num_classes=5)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert explain(model, one(model), grad_cam=False).grad_cam is None
    assert len(calls) == 1


def test_a_model_in_training_stays_there_and_answers_as_in_evaluation():
    model = lively("levit_nano_32", num_classes=5)
    want = explain(model, one(model), grad_cam=False).probabilities
    model.train()
    frozen = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for module in frozen:
        module.eval()
    np.testing.assert_allclose(explain(model, one(model), grad_cam=False).probabilities, want, atol=1e-6)
    assert model.training
    assert frozen
    assert not any(module.training for module in frozen)


SMALLEST = {"ceit_nano_32": dict(depth=2), "cvt_nano_32": dict(depth=(1, 1, 1)), "levit_nano_32": dict(depth=(1, 1, 1))}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Networks of a few layers and their exports, each made once. Read only."""

    @functools.cache
    def made(name: str, format: str) -> tuple[Any, Path]:
        out = tmp_path_factory.mktemp("exports") / "out"
        model = lively(name, num_classes=5, **SMALLEST[name])
        export(model, out, format=format)
        return model, out

    return made


@pytest.mark.slow_except("levit_nano_32-openvino", "ceit_nano_32-onnx")
@pytest.mark.parametrize("format", ["onnx", "openvino"])
@pytest.mark.parametrize("name", NANO)
def test_an_export_looks_where_its_model_looked(name, format, exported):
    model, out = exported(name, format)
    picture, ways = one(model), [Predictor(open_model(out)), Predictor(TorchModel(model))]
    want, found = explain(model, picture, grad_cam=False), ways[0].explain(picture)
    assert found.attention.keys() == want.attention.keys()
    pairs = [(found.attention[level], fmap) for level, fmap in want.attention.items()]
    for kind in ("probabilities", "rollout", "saliency", *(() if want.depth is None else ("depth",))):
        pairs.append((getattr(found, kind), getattr(want, kind)))
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=1e-4)
    grids = [way.predict([way.prepare(jpeg())], overlay=True)[0].overlay.grid for way in ways]
    np.testing.assert_allclose(grids[0], grids[1], atol=1e-3)


@pytest.mark.parametrize("shapes", [[], [(1, 2, 3, 3)], [(1, 2, 9, 9)] * 40, [(3,)]], ids=len)
@pytest.mark.parametrize("name", NANO)
def test_attention_of_another_network_is_refused(name: str, shapes: list[tuple[int, ...]]) -> None:
    """As of an export whose config.json names a family that its graph is not of."""
    with pytest.raises((CheckpointError, UsageError), match=rf"must be those of .* the {len(shapes)} of|computed 40"):
        attention_maps(lively(name), [torch.ones(shape) for shape in shapes], Grid(32, 32))


def test_what_cannot_be_explained_is_refused(exported, photos, tmp_path, capsys):
    model, out = exported("ceit_nano_32", "onnx")
    with pytest.raises(UsageError, match="from 0 to 4; got 5"):
        explain(model, one(model), label=5)
    with pytest.raises(UsageError, match="Grad-CAM needs gradients, which an export does not have"):
        Predictor(open_model(out)).explain(one(model), grad_cam=True)
    assert main(["explain", str(out), str(photos), "--out", str(tmp_path / "out")]) == 2
    assert "Grad-CAM needs gradients" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with record_attention() as weights, torch.no_grad():
        model(images(model, 1))
    with pytest.raises(UsageError, match="got ResNet"):
        attention_maps(weft.create_model("test_resnet"), weights, Grid(32, 32))
    with pytest.raises(UsageError, match="feature_info"):
        gradcam.grad_cam(torch.nn.Flatten(), torch.zeros(1, 3, 4, 4), 0)
    with pytest.raises(UsageError, match="a network that returns one value for each class; Conv2d returns"):
        explain(torch.nn.Conv2d(3, 3, 1), torch.zeros(3, 4, 4))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_model_dir(lively("ceit_nano_32", num_classes=3), tmp_path / "model", label_names=("a", "$b", "c"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return noise_images(tmp_path / "pictures", "one/same.png", "two/same.png", size=(40, 50))


@pytest.mark.figures
def test_the_command(model_dir, photos, tmp_path, capsys):
    out = tmp_path / "out"
    (photos / "broken.png").write_bytes(b"no picture")
    arguments = ["explain", str(model_dir), str(photos), "--out", str(out), "--quiet"]
    assert main([*arguments, "--json"]) == 3
    said = capsys.readouterr()
    rows = json.loads(said.out)
    assert "broken.png" in said.err
    good = [row for row in rows if row["error"] is None]
    assert [row["panel"] for row in good] == ["same.png", "same-2.png"]
    assert sorted(path.name for path in out.iterdir()) == [
        "explanations.json", "same-2.npz", "same-2.png", "same.npz", "same.png",
    ]  # fmt: skip
    with np.load(out / "same.npz") as arrays:
        levels = {f"attention/{level}" for level in LEVELS["ceit_nano_32"]}
        assert set(arrays) == {"picture", "probabilities", "rollout", "depth", "grad_cam"} | levels
        assert arrays["probabilities"].max() == pytest.approx(good[0]["probability"])
    with Image.open(out / "same.png") as panel:
        assert panel.width > 600

    assert main([*arguments, "--no-grad-cam"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force", "--label", "d"]) == 2
    assert "Unknown class 'd'" in capsys.readouterr().err
    (photos / "broken.png").unlink()
    assert main([*arguments, "--force", "--label", "$b", "--no-grad-cam", "--img-size", "48"]) == 0
    assert "$b" in capsys.readouterr().out
    with np.load(out / "same.npz") as arrays:
        assert "grad_cam" not in arrays
        assert arrays["rollout"].shape == (12, 12)
    (out / "mine.txt").write_text("keep me")
    assert main([*arguments, "--force"]) == 2
    assert "mine.txt" in capsys.readouterr().err


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A square of the class's colour somewhere on grey noise: only the square tells the class."""
    root, rng = tmp_path_factory.mktemp("objects"), np.random.default_rng(0)
    for split, count in (("train", 150), ("val", 67)):
        for name, colour in {"blue": (60, 60, 200), "green": (60, 180, 60), "red": (200, 60, 60)}.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.normal(128, 40, (32, 32, 1)).repeat(3, axis=2)
                row, column = rng.integers(0, 24, 2)
                pixels[row : row + 8, column : column + 8] = rng.normal(colour, 20, (8, 8, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / split / name / f"{i}.png")
    return root


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ceit_nano_32", "levit_nano_32"])
def test_hiding_attended_patches_lowers_the_probability(name, objects, tmp_path):
    """Hiding the most attended tenth of the patches lowers the probability more than hiding a random tenth."""
    train(objects, model=name, recipe="small_images", epochs=5, batch_size=32, out=tmp_path / "run", quiet=True)
    model, _ = load_model_dir(tmp_path / "run" / "best")
    model.eval()
    transform: Any = weft.data.eval_transform(model.pretrained_cfg)
    val, rng, drops = open_data(objects).val, np.random.default_rng(0), []
    assert len(val) > 200
    for i in range(len(val)):
        x = transform(weft.data.open_image(val.read(i).data))
        found = explain(model, x, grad_cam=False)
        assert found.rollout is not None
        places = found.rollout.size
        most = np.argsort(-found.rollout.ravel(), kind="stable")[: places // 10]
        hidden = torch.stack([_without(x, some, 8) for some in (most, rng.choice(places, places // 10, replace=False))])
        with torch.inference_mode():
            shares = model(hidden).softmax(dim=1)[:, found.label].numpy()
        drops.append(found.probabilities[found.label] - shares)
    attended, random = np.array(drops).T
    gain = attended - random
    assert attended.mean() > 0.1
    assert gain.mean() > 4 * gain.std() / len(gain) ** 0.5  # standard errors


def _without(x: torch.Tensor, places: np.ndarray, side: int) -> torch.Tensor:
    x, step = x.clone(), x.shape[-1] // side
    for place in places:
        row, column = divmod(int(place), side)
        x[:, row * step : (row + 1) * step, column * step : (column + 1) * step] = 0
    return x


def test_an_interrupted_explanation_is_repeated_with_force(model_dir, photos, tmp_path, monkeypatch):
    write, written = explain_files._write, []

    def interrupted(*args):
        if written:
            raise KeyboardInterrupt
        written.append(write(*args))

    with monkeypatch.context() as patch:
        patch.setattr(explain_files, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            explain_run(model_dir, photos, tmp_path / "out", grad_cam=False, quiet=True)
    assert len(explain_run(model_dir, photos, tmp_path / "out", grad_cam=False, force=True, quiet=True)) == 2
