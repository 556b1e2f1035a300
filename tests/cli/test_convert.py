"""`weft convert`. What it refuses: tests/contract/test_refusals.py."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import weft
from tests.helpers import enliven, images, lively
from weft import progress
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main


@pytest.fixture
def convert(tmp_path, capsys, monkeypatch):
    """Convert a file or folder to a new directory; return what is printed, and the directory."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 1e9)  # no line of a slow machine

    def run(source, *arguments, code=0):
        out = tmp_path / f"m{len(list(tmp_path.glob('m*')))}"
        assert main(["convert", str(source), str(out), *arguments]) == code
        return *capsys.readouterr(), out

    return run


def saved(model, folder):
    save_file(model if isinstance(model, dict) else model.state_dict(), folder / "x.safetensors")
    return folder / "x.safetensors"


def assert_same(out, model):
    x = images(model)
    assert torch.equal(load_model_dir(out)[0](x), model(x))


@pytest.mark.slow_except("levit_128s")
@pytest.mark.parametrize("name", ["levit_128s", "levit_192"])
def test_timms_levit_is_recognised_by_its_shapes(name, tmp_path, convert):
    theirs = enliven(timm.create_model(name, num_classes=5)).eval()
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "x.pth")
    out, err, made = convert(tmp_path / "x.pth")
    assert (err, out.startswith(f"{name}, ")) == ("", True)
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(load_model_dir(made)[0](x), theirs(x), rtol=1e-5, atol=1e-5)


def test_the_switches_of_a_layout_are_applied_and_a_given_one_wins(tmp_path, convert):
    """The weights of microsoft/cvt-* were trained with another activation than transformers computes with."""
    transformers = pytest.importorskip("transformers")
    theirs = enliven(transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=4))).eval()
    file, x = saved(theirs, tmp_path), torch.randn(1, 3, 224, 224)
    out, _, made = convert(file, "--json")
    assert (json.loads(out)["model"], json.loads(out)["switches"]["act_layer"]) == ("cvt_13", "gelu")
    torch.testing.assert_close(load_model_dir(made)[0](x), theirs(x).logits, rtol=1e-4, atol=1e-5)

    out, _, made = convert(file, "--set", "act_layer=quick_gelu", "--json")
    assert json.loads(out)["switches"]["act_layer"] == "quick_gelu"
    ours = weft.create_model("cvt_13", num_classes=4).eval()
    weft.load_checkpoint(ours, theirs.state_dict(), switches="ignore")
    assert torch.equal(load_model_dir(made)[0](x), ours(x))


def test_several_state_dicts_in_one_file(tmp_path, convert):
    model = lively("cvt_nano_32", num_classes=3)
    average = enliven(weft.create_model("cvt_nano_32", num_classes=3), 1).eval()
    torch.save({"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 3}, tmp_path / "x.pth")
    out, err, made = convert(tmp_path / "x.pth", "--json")
    assert err == (
        f"{tmp_path / 'x.pth'} has several state dicts; used 'model', not model_ema."
        " Choose another with --state-dict KEY.\n"
    )
    assert (json.loads(out)["part"], json.loads(out)["others"]) == ("model", ["model_ema"])
    assert_same(made, model)
    assert_same(convert(tmp_path / "x.pth", "--state-dict", "model_ema")[2], average)


def test_another_size_and_another_head(tmp_path, convert):
    file = saved(lively("levit_nano_32", num_classes=5), tmp_path)
    out, _, made = convert(file, "--img-size", "48x64", "--head", "drop", "--num-classes", "7")
    assert "resized: " in out
    assert "not loaded: head.bn" in out
    assert load_model_dir(made)[0](torch.randn(1, 3, 48, 64)).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "setting", "more"),
    [
        ("cvt_nano_32", {"kv_stride": 1}, ("--model", "cvt_nano_32")),
        ("levit_nano_32", {"norm": "layer"}, ("--model", "levit_nano_32")),
        ("levit_nano_32", {"norm": "layer"}, ()),  # the head has other keys
    ],
)
def test_constructor_values_are_those_of_the_settings(name, setting, more, tmp_path, convert):
    model = lively(name, num_classes=5, **setting)
    ((key, value),) = setting.items()
    assert_same(convert(saved(model, tmp_path), *more, "--set", f"{key}={value}")[2], model)


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit"])
def test_any_model_of_timm_by_name_with_the_classes_of_the_weights(name, tmp_path, convert):
    model = enliven(weft.create_model(name, num_classes=7)).eval()
    _, err, made = convert(saved(model, tmp_path), "--model", name)
    assert (err, load_model_dir(made)[0].num_classes) == ("", 7)
    assert_same(made, model)


@pytest.mark.parametrize("model", [(), ("--model", "cvt_nano_32")])
def test_a_checkpoint_of_lightning(model, tmp_path, convert):
    """With and without --model; what is not loaded is named, and --prefix decides."""
    source = lively("cvt_nano_32", num_classes=5)
    state = {f"net.{name}": tensor for name, tensor in source.state_dict().items()} | {"loss.weight": torch.ones(5)}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "x.ckpt")
    out, _, made = convert(tmp_path / "x.ckpt", *model)
    assert "not loaded: loss.weight" in out
    assert_same(made, source)
    convert(tmp_path / "x.ckpt", *model, "--prefix", "net")
    _, err, _ = convert(tmp_path / "x.ckpt", *model, "--prefix", "mod", code=4)
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
def test_a_folder_of_a_trainer_keeps_class_names_and_preprocessing(processor, tmp_path, convert):
    """As transformers' Trainer writes it."""
    values, size, crop_pct, crop_mode = PROCESSORS[processor]
    source = tmp_path / "checkpoint-500"
    source.mkdir()
    save_file(lively("test_resnet", num_classes=2).state_dict(), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"id2label": {"0": "cat", "1": "dog"}, "model_type": "x"}))
    more = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2, "do_normalize": True}
    (source / "preprocessor_config.json").write_text(json.dumps(values | more))
    out, err, made = convert(source, "--model", "test_resnet")
    assert err == ""
    assert out.endswith("class names and preprocessing: config.json, preprocessor_config.json\n")
    model, names = load_model_dir(made)
    cfg = model.pretrained_cfg
    assert names == ["cat", "dog"]
    assert (tuple(cfg["input_size"]), cfg["crop_pct"], cfg["crop_mode"]) == ((3, *size), crop_pct, crop_mode)
    assert (tuple(cfg["mean"]), tuple(cfg["std"]), cfg["interpolation"]) == ((0.5,) * 3, (0.25,) * 3, "bilinear")


def test_the_metadata_of_timm_and_weft_is_kept_and_of_other_classes_not(tmp_path, convert):
    source = save_model_dir(lively("cvt_nano_32", num_classes=3), tmp_path / "a", label_names=["x", "y", "z"])
    (source / "config.json").write_text((source / "config.json").read_text().replace('"bicubic"', '"bilinear"'))
    model, names = load_model_dir(convert(source)[2])
    assert (names, model.pretrained_cfg["interpolation"]) == (["x", "y", "z"], "bilinear")
    _, _, made = convert(source / "model.safetensors", "--head", "drop", "--num-classes", "2")
    assert load_model_dir(made)[1] is None


def test_nothing_is_overwritten(tmp_path, convert):
    (tmp_path / "m0").mkdir()
    (tmp_path / "m0" / "config.json").write_text("mine")
    file = saved(lively("cvt_nano_32", num_classes=3), tmp_path)
    assert main(["convert", str(file), str(tmp_path / "m0")]) == 2
    assert [path.read_text() for path in (tmp_path / "m0").iterdir()] == ["mine"]
