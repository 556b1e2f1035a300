import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import weft
import weft.models.registry  # registers weft's models with timm
from tests.helpers import NANO, images, lively
from tests.killpoints import killed_at
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.confidence import Confidence
from weft.checkpoints.config import read_config
from weft.checkpoints.model_dir import write_confidence
from weft.checkpoints.unknown import Threshold, UnknownDetector, read_detector
from weft.errors import CheckpointError, StorageError, UsageError

CONFIDENCE = dict(temperature=1e-320, count=1, ece_before=1.0, ece_after=1.0, curve=[])
SWITCHED = {
    "ceit_nano_32": dict(stem_chans=16, leff_kernel=5, img_size=(40, 48)),
    "cvt_nano_32": dict(act_layer="gelu", kv_stride=(1, 2, 2), pos_embed=True),
    "levit_nano_32": dict(attn_bias=False, pos_embed=True, distilled=False),
}


def saved(tmp_path, name="levit_nano_32", **switches):
    model = lively(name, num_classes=3, **switches)
    save_model_dir(model, tmp_path / "m", label_names=["a", "b", "c"])
    return model, tmp_path / "m"


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("name", NANO)
def test_what_was_saved_is_loaded_by_weft_and_by_timm(tmp_path, name, switched):
    model, path = saved(tmp_path, name, **(SWITCHED[name] if switched else {}))
    again, names = load_model_dir(path)
    x = images(model)
    assert names == ["a", "b", "c"]
    assert not again.training
    assert torch.equal(again(x), model(x))
    for key in ("input_size", "mean", "std", "crop_pct", "interpolation"):
        assert tuple_of(again.pretrained_cfg[key]) == tuple_of(model.pretrained_cfg[key])
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    assert torch.equal(theirs(x), model(x))
    assert theirs.pretrained_cfg["label_names"] == ["a", "b", "c"]


def tuple_of(value):
    return tuple(value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    ("name", "switches", "size"),
    [
        ("cvt_nano_32", dict(in_chans=1), (1, 32, 32)),
        ("test_resnet", {}, (3, 160, 160)),
        ("test_resnet", dict(in_chans=1), (1, 160, 160)),
        ("vit_tiny_patch16_224", dict(img_size=64, depth=2, drop_path_rate=0.1), (3, 64, 64)),
    ],
)
def test_channels_and_sizes_of_networks_of_weft_and_of_timm_come_back(tmp_path, name, switches, size):
    model = lively(name, num_classes=3, **switches)
    save_model_dir(model, tmp_path / "m")
    again, names = load_model_dir(tmp_path / "m")
    assert names is None
    assert tuple(again.pretrained_cfg["input_size"]) == size
    x = torch.randn(1, *size)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("levit_nano_32", lambda model: model.set_input_size((64, 40))),
        ("levit_nano_32", lambda model: model.reset_classifier(5, "avg")),
        ("ceit_nano_32", lambda model: model.reset_classifier(5, "avg")),
    ],
)
def test_a_size_and_classes_that_were_changed_after_building_come_back(tmp_path, name, change):
    model = lively(name, num_classes=3)
    change(model)
    save_model_dir(model.eval(), tmp_path / "m")
    again, _ = load_model_dir(tmp_path / "m")
    x = torch.randn(1, *model.pretrained_cfg["input_size"])
    assert tuple(again.pretrained_cfg["input_size"]) == tuple(x.shape[1:])
    assert torch.equal(again(x), model(x))


def test_nothing_is_overwritten_without_force(tmp_path):
    model, path = saved(tmp_path)
    with pytest.raises(UsageError, match=r"The output directory must be new or empty; .*/m is neither"):
        save_model_dir(model, path)
    save_model_dir(model, path, force=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "x.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"force replaces only files that weft writes; .*/photos also holds 'x.jpg'"):
        save_model_dir(model, tmp_path / "photos", force=True)
    assert (tmp_path / "photos" / "x.jpg").exists()
    with pytest.raises(UsageError, match=r"force replaces only directories; .*/x.jpg is a file"):
        save_model_dir(model, tmp_path / "photos" / "x.jpg", force=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"/m also holds 'notes.txt'"):
        save_model_dir(model, path, force=True)


def refuse_the_new_one(source, target, replace=os.replace):
    if str(source).endswith(".part"):
        raise OSError(errno.EIO, "Input/output error")
    replace(source, target)


def refuse_to_write(path, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("place", "name", "fails", "message"),
    [
        (os, "replace", refuse_the_new_one, "Input/output error"),
        (Path, "write_bytes", refuse_to_write, r"/m must be writable; No space left on device"),
    ],
)
def test_a_failure_leaves_the_old_one(tmp_path, monkeypatch, place, name, fails, message):
    model, path = saved(tmp_path)
    before = (path / "model.safetensors").read_bytes()
    monkeypatch.setattr(place, name, fails)
    with pytest.raises(StorageError, match=message):
        save_model_dir(model, path, force=True)
    assert (path / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("name", "change", "first"),
    [
        ("ceit_nano_32", lambda m: m.prune_intermediate_layers([1]), "blocks.2"),
        ("cvt_nano_32", lambda m: m.reset_classifier(3, "avg"), "stages.2.cls_token"),
    ],
)
def test_a_network_that_was_changed_is_not_saved_under_its_name(tmp_path, name, change, first):
    model = lively(name, num_classes=3)
    change(model)
    with pytest.raises(UsageError, match=rf"must describe how to rebuild its model; this {name} .*\({first}"):
        save_model_dir(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [8, -1, -5000])
def test_a_changed_byte_is_noticed(tmp_path, offset):
    _, path = saved(tmp_path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[offset] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"must have the sha256 that config.json states"):
        load_model_dir(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "one name per class, 3; got 2"),
        (["a", "b", "a"], "'a' occurs twice"),
        (["a", "b", "c\n"], r"label_names must have no control characters; got 'c\\n'"),
        (["a", "b", "c\x9b"], "no control characters"),
        (["a", "b", "c\u2028"], "no control characters"),
        (["a", "b", "\u202ec"], "no control characters"),
        ("abc", "label_names must be a list of strings; got 'abc'"),
    ],
)
def test_names_that_do_not_fit(tmp_path, names, message):
    with pytest.raises(UsageError, match=message):
        save_model_dir(lively("cvt_nano_32", num_classes=3), tmp_path / "m", label_names=names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(architecture="weft_levit_nan_32"), r"got 'levit_nan_32'. Nearest: levit_nano_32"),
        (
            lambda c: c.pop("architecture"),
            "the format that weft writes; architecture: it is missing",
        ),
        (lambda c: c.update(num_classes="3"), "num_classes: it must be a valid integer; got '3'"),
        (lambda c: c["model_args"].update(_target_="os.system"), "levit_nano_32 has no constructor value '_target_'"),
        (lambda c: c["model_args"].update(pretrained=True), "'pretrained' that a file may set. Nearest: "),
        (lambda c: c["model_args"].update(features_only=True), "no constructor value 'features_only'"),
        (lambda c: c["model_args"].update(embed_dim=[8, 8]), "must have one value per stage"),
        (lambda c: c["model_args"].update(depth=[1, 1, 1]), "unexpected"),
        (lambda c: c.update(label_names=["a", "b", "\x1b[2J"]), "no control characters"),
        (lambda c: c["pretrained_cfg"].update(crop_pct=1e-320), "crop_pct: it must be greater than or equal to 0.1"),
        (lambda c: c["pretrained_cfg"].update(std=[1e-320] * 3), r"std\.0: it must be greater than or equal to"),
        (lambda c: c.update(confidence=CONFIDENCE), "temperature: it must be greater than or equal to 0.001"),
    ],
)
def test_a_lying_config_is_refused(tmp_path, change, message):
    _, path = saved(tmp_path)
    assert_refused_with(path, change, message)


def assert_refused_with(path, change, message):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_model_dir(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pretrained", True), ("checkpoint_path", "/etc/hostname"), ("pretrained_cfg_overlay", {"url": "https://x"})],
)
def test_a_config_cannot_make_timm_fetch_or_read(tmp_path, key, value):
    save_model_dir(weft.create_model("test_resnet", num_classes=3), tmp_path / "m")
    message = f"test_resnet has no constructor value '{key}'"
    assert_refused_with(tmp_path / "m", lambda config: config["model_args"].update({key: value}), message)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"A model directory must hold config.json and model.safetensors"):
        load_model_dir(tmp_path / "nothing")


def detector(seed):
    mean, features = np.split(np.random.default_rng(seed).normal(size=(5, 8)).astype(np.float32), [1])
    return UnknownDetector(mean[0], features, threshold=Threshold(0.5, 10, 1))


@pytest.mark.parametrize("after", ["another detector", "none"])
def test_a_kill_at_every_point_of_a_new_calibration_leaves_a_model_that_loads(tmp_path, after):
    """Its calibration and its detector belong to each other, or it has no detector yet."""
    old, new = (Confidence(temperature, 10, 5.0, 4.0) for temperature in (1.0, 2.0))
    was, wanted = detector(1), detector(2) if after == "another detector" else None
    allowed = [(old, was.serialized()), (new, None), (new, wanted and wanted.serialized())]
    _, path = saved(tmp_path)
    number, is_killed = 0, True
    while is_killed:
        write_confidence(path, old, was)
        is_killed = killed_at(number, lambda: write_confidence(path, new, wanted))
        config = read_config(path)
        found = read_detector(path, config.get("unknown"))
        assert (config["confidence"], found and found.serialized()) in allowed, number
        number += 1
    assert number > 10
    assert (found and found.serialized()) == (wanted and wanted.serialized())
    load_model_dir(path)
