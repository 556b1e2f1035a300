import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import weft
from tests.helpers import enliven, lively
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main
from weft.errors import UsageError

transformers = pytest.importorskip("transformers")
vit_pytorch = pytest.importorskip("vit_pytorch.cvt")


def convert(capsys, *arguments):
    code = main(["convert", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", ["levit_128s", "levit_192"])
def test_timms_levit_is_recognised_by_its_shapes(tmp_path, capsys, name):
    theirs = enliven(timm.create_model(name, num_classes=5)).eval()
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "x.pth")
    code, out, err = convert(capsys, tmp_path / "x.pth", tmp_path / "m")
    assert (code, err) == (0, "")
    assert out.startswith(f"{name}, ")
    ours, _ = load_model_dir(tmp_path / "m")
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_the_switches_of_a_layout_are_applied_and_kept(tmp_path, capsys):
    theirs = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=4))).eval()
    save_file(theirs.state_dict(), tmp_path / "x.safetensors")
    code, out, _ = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["model"] == "cvt_13"
    assert made["switches"]["act_layer"] == "gelu"
    ours, _ = load_model_dir(tmp_path / "m")
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


def test_a_switch_that_is_given_wins(tmp_path, capsys):
    """The weights of microsoft/cvt-* were trained with another activation than transformers computes with."""
    theirs = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=4)))
    save_file(theirs.state_dict(), tmp_path / "x.safetensors")
    arguments = ("--set", "act_layer=quick_gelu", "--json")
    code, out, _ = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)
    assert (code, json.loads(out)["switches"]["act_layer"]) == (0, "quick_gelu")
    ours = weft.create_model("cvt_13", num_classes=4).eval()
    weft.load_checkpoint(ours, theirs.state_dict(), switches="ignore")
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(load_model_dir(tmp_path / "m")[0](x), ours(x))


def test_several_state_dicts_in_one_file(tmp_path, capsys):
    model, average = lively("cvt_nano_32", num_classes=3), enliven(weft.create_model("cvt_nano_32", num_classes=3), 1)
    torch.save({"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 3}, tmp_path / "x.pth")
    code, out, err = convert(capsys, tmp_path / "x.pth", tmp_path / "m", "--json")
    assert code == 0
    assert err == (
        f"{tmp_path / 'x.pth'} has several state dicts; used 'model', not model_ema."
        " Choose another with --state-dict KEY.\n"
    )
    assert (json.loads(out)["part"], json.loads(out)["others"]) == ("model", ["model_ema"])
    assert convert(capsys, tmp_path / "x.pth", tmp_path / "n", "--state-dict", "model_ema")[0] == 0
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_model_dir(tmp_path / "m")[0](x), model(x))
    assert torch.equal(load_model_dir(tmp_path / "n")[0](x), average.eval()(x))


def test_another_size_and_another_head(tmp_path, capsys):
    model = lively("levit_nano_32", num_classes=5)
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    arguments = ("--img-size", "48x64", "--head", "drop", "--num-classes", "7")
    code, out, _ = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)
    assert code == 0
    assert "resized: " in out
    assert "not loaded: head.bn" in out
    again, _ = load_model_dir(tmp_path / "m")
    assert again(torch.randn(1, 3, 48, 64)).shape == (1, 7)


def test_our_own_files_and_constructor_values(tmp_path, capsys):
    model = lively("cvt_nano_32", num_classes=5, kv_stride=1)
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    arguments = ("--model", "cvt_nano_32", "--set", "kv_stride=1")
    assert convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)[0] == 0
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_model_dir(tmp_path / "m")[0](x), model(x))


def test_the_head_is_that_of_the_settings(tmp_path, capsys):
    """With `norm=layer`, LeViT's head has other keys."""
    model = lively("levit_nano_32", num_classes=7, norm="layer")
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    x = torch.randn(1, 3, 32, 32)
    for out, more in (("m", ()), ("n", ("--model", "levit_nano_32"))):
        assert convert(capsys, tmp_path / "x.safetensors", tmp_path / out, "--set", "norm=layer", *more)[0] == 0
        assert torch.equal(load_model_dir(tmp_path / out)[0](x), model(x))


def test_a_head_of_no_numbers_has_no_classes(tmp_path, capsys):
    """A file of 2 KB may name millions of classes; no head is built for them."""
    torch.save({"head.bias": torch.empty(2**21, 0), "cls_token": torch.zeros(1, 1, 8)}, tmp_path / "x.pth")
    code, _, err = convert(capsys, tmp_path / "x.pth", tmp_path / "m")
    assert (code, "must match exactly one model" in err) == (2, True)


def test_any_timm_model_by_name(tmp_path, capsys):
    model = weft.create_model("resnet18", num_classes=1000).eval()
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    arguments = ("--model", "resnet18")
    assert convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)[0] == 0


@pytest.mark.parametrize("name", ["resnet18", "test_convnext", "test_vit", "levit_128s.fb_dist_in1k"])
def test_the_classes_are_those_of_the_weights(tmp_path, capsys, name):
    save_file(weft.create_model(name, num_classes=7).state_dict(), tmp_path / "x.safetensors")
    code, _, err = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", "--model", name)
    assert (code, err) == (0, "")
    assert load_model_dir(tmp_path / "m")[0].num_classes == 7


@pytest.mark.parametrize("model", [(), ("--model", "cvt_nano_32")])
def test_a_checkpoint_of_lightning(tmp_path, capsys, model):
    """With and without --model; what is not loaded is named, and --prefix decides."""
    source = lively("cvt_nano_32", num_classes=5)
    state = {f"net.{name}": tensor for name, tensor in source.state_dict().items()} | {"loss.weight": torch.ones(5)}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "x.ckpt")
    code, out, _ = convert(capsys, tmp_path / "x.ckpt", tmp_path / "m", *model)
    assert code == 0
    assert "not loaded: loss.weight" in out
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_model_dir(tmp_path / "m")[0](x), source(x))
    assert convert(capsys, tmp_path / "x.ckpt", tmp_path / "n", *model, "--prefix", "net")[0] == 0
    code, _, err = convert(capsys, tmp_path / "x.ckpt", tmp_path / "o", *model, "--prefix", "mod")
    assert code == 4
    assert "prefix must be the beginning of keys of the checkpoint; got 'mod'. It has 'net', 'loss'." in err


LEVIT = {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 224}, "do_center_crop": True}
PROCESSORS = {
    "levit": (LEVIT | {"crop_size": {"height": 224, "width": 224}}, (224, 224), 0.875, "center"),
    "convnext": ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.9},
                 (224, 224), 0.9, "center"),
    "convnext large": ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
                       (384, 384), 1.0, "squash"),
    "vit": ({"image_processor_type": "ViTImageProcessor", "size": {"height": 224, "width": 192}},
            (224, 192), 1.0, "squash"),
    "deit": ({"size": {"height": 256, "width": 256}, "do_center_crop": True, "crop_size": 224},
             (224, 224), 0.875, "squash"),
}  # fmt: skip


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_folder_of_a_trainer_keeps_class_names_and_preprocessing(tmp_path, capsys, processor):
    """As transformers' Trainer writes it."""
    values, size, crop_pct, crop_mode = PROCESSORS[processor]
    source = tmp_path / "checkpoint-500"
    source.mkdir()
    save_file(lively("resnet18", num_classes=2).state_dict(), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"id2label": {"0": "cat", "1": "dog"}, "model_type": "x"}))
    more = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2, "do_normalize": True}
    (source / "preprocessor_config.json").write_text(json.dumps(values | more))
    code, out, err = convert(capsys, source, tmp_path / "m", "--model", "resnet18")
    assert (code, err) == (0, "")
    assert out.endswith("class names and preprocessing: config.json, preprocessor_config.json\n")
    model, names = load_model_dir(tmp_path / "m")
    cfg = model.pretrained_cfg
    assert names == ["cat", "dog"]
    assert (tuple(cfg["input_size"]), cfg["crop_pct"], cfg["crop_mode"]) == ((3, *size), crop_pct, crop_mode)
    assert (tuple(cfg["mean"]), tuple(cfg["std"]), cfg["interpolation"]) == ((0.5,) * 3, (0.25,) * 3, "bilinear")


def test_the_metadata_of_timm_and_weft_is_kept_and_of_other_classes_not(tmp_path, capsys):
    saved = save_model_dir(lively("cvt_nano_32", num_classes=3), tmp_path / "a", label_names=["x", "y", "z"])
    (saved / "config.json").write_text((saved / "config.json").read_text().replace('"bicubic"', '"bilinear"'))
    assert convert(capsys, saved, tmp_path / "m")[0] == 0
    model, names = load_model_dir(tmp_path / "m")
    assert (names, model.pretrained_cfg["interpolation"]) == (["x", "y", "z"], "bilinear")
    assert convert(capsys, saved / "model.safetensors", tmp_path / "n", "--head", "drop", "--num-classes", "2")[0] == 0
    assert load_model_dir(tmp_path / "n")[1] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "must match exactly one model of weft; it matches none. Pass --model NAME"),
        (("--model", "levit_128z"), 2, "Unknown model 'levit_128z'. Nearest: levit_128, levit_128s, levit_192"),
        (("--model", "levit_128s"), 4, "Nothing was loaded"),
        (("--img-size", "x"), 2, "img_size"),
        (("--set", "kv_stride"), 2, "--set takes KEY=VALUE; got 'kv_stride'"),
    ],
)
def test_what_does_not_fit(tmp_path, capsys, arguments, code, message):
    save_file({"a.weight": torch.zeros(3, 3)}, tmp_path / "x.safetensors")
    found, out, err = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert not (tmp_path / "m").exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    save_file(lively("cvt_nano_32", num_classes=3).state_dict(), tmp_path / "x.safetensors")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("mine")
    code, _, err = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m")
    assert code == UsageError.exit_code
    assert "must be new or empty" in err
    assert "Pass --force or another path" in err
    assert [path.read_text() for path in (tmp_path / "m").iterdir()] == ["mine"]


def test_a_missing_file(tmp_path, capsys):
    code, _, err = convert(capsys, tmp_path / "none.pth", tmp_path / "m")
    assert code == 4
    assert "none.pth" in err


def test_a_setting_that_the_network_does_not_have_is_refused(tmp_path, capsys):
    save_file(lively("cvt_nano_32", num_classes=3).state_dict(), tmp_path / "x.safetensors")
    arguments = ("--model", "cvt_nano_32", "--set", "kv_strides=1")
    code, _, err = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)
    assert (code, "Unknown argument of cvt_nano_32 'kv_strides'. Nearest: kv_stride" in err) == (2, True)
