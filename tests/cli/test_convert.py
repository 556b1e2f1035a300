import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import weft
from tests.helpers import enliven, lively
from weft.checkpoints import load_model_dir
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
        " Choose another with --which NAME.\n"
    )
    assert (json.loads(out)["part"], json.loads(out)["others"]) == ("model", ["model_ema"])
    assert convert(capsys, tmp_path / "x.pth", tmp_path / "n", "--which", "model_ema")[0] == 0
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


def test_any_timm_model_by_name(tmp_path, capsys):
    model = weft.create_model("resnet18", num_classes=1000).eval()
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    arguments = ("--model", "resnet18", "--num-classes", "1000")
    assert convert(capsys, tmp_path / "x.safetensors", tmp_path / "m", *arguments)[0] == 0


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
    code, _, err = convert(capsys, tmp_path / "x.safetensors", tmp_path / "m")
    assert code == UsageError.exit_code
    assert "exists already. Pass --force or another path" in err


def test_a_missing_file(tmp_path, capsys):
    code, _, err = convert(capsys, tmp_path / "none.pth", tmp_path / "m")
    assert code == 4
    assert "none.pth" in err
