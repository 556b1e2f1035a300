"""An export answers as its model does, through every door; one that does not is not kept."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import weft
from tests.helpers import NANO, enliven, images, lively, outputs_of
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli.app import arguments, main
from weft.data import open_data
from weft.deploy import export, exporting, fold, graphs, runtimes, verification
from weft.deploy.formats import AUTO, FORMATS
from weft.errors import CheckpointError, UsageError, VerificationError
from weft.inference import open_model
from weft.inference.predictor import Predictor
from weft.machine import processor
from weft.train import evaluate, predict

CLASSES = ("left", "right", "up")
WAYS = [(format, precision) for format, words in FORMATS.items() for precision in words if precision != "int8"]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of noise, 24 pictures of each for training and 9 held out."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 9)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                    root / split / name / f"{i}.png"
                )
    return root


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model_dir(model(name), root / name, label_names=CLASSES) for name in NANO}


def test_log_levels_of_the_program_stay() -> None:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with graphs._quiet():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(before)


def model(name: str) -> Any:
    """Three classes, far enough apart that rounding does not swap them."""
    network = lively(name, num_classes=3)
    with torch.no_grad():
        for head in network.head_modules():
            (head.linear if hasattr(head, "linear") else head).weight.mul_(30)
    return network


@pytest.mark.slow_except("levit_nano_32-onnx-fp32")
@pytest.mark.parametrize(("format", "precision"), WAYS)
@pytest.mark.parametrize("name", NANO)
def test_it_answers_as_the_model_does(name, format, precision, tmp_path):
    network = model(name)
    report = export(network, tmp_path / "out", format=format, precision=precision)
    assert report.images == verification.RANDOM_IMAGES
    assert report.agreement == 100 if precision == "fp32" else report.agreement > 90
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "report.json", *runtimes.FILES[format]}
    if format == "torch":
        return
    exported = open_model(tmp_path / "out")
    for batch in (1, 5):
        x = images(network, batch, seed=7)
        expected, found = network(x).detach(), outputs_of(exported, x)
        tolerance = 1e-5 if precision == "fp32" else 0.1
        assert (found - expected).abs().max() < tolerance * expected.abs().max()
    report_file = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report_file["max_difference"] == report.max_difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format", "part"),
    [
        ("levit_nano_32", "onnx", 16),
        ("levit_nano_32", "openvino", 16),
        ("ceit_nano_32", "onnx", 8),
        ("cvt_nano_32", "onnx", 8),
    ],
)
def test_int8_is_near(name, format, part, photos, tmp_path):
    """To a part of the largest logit. Weights have 7 bits; with 8, which saturate without VNNI, LeViT is at 1/20."""
    network = model(name)
    report = export(network, tmp_path / "out", format=format, precision="int8", data=open_data(photos), max_drop=50)
    assert report.max_difference < report.max_logit / part
    exported = open_model(tmp_path / "out")
    x = images(network, 4)
    assert (outputs_of(exported, x) - network(x)).abs().max() < 0.15 * network(x).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_int8_for_any_batch_is_int8_for_one(name, tmp_path):
    """Biases are large here: OpenVINO 2026.4 drops that of CeiT's stem if the graph asks for the batch behind it."""
    network = model(name)
    for norm in network.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.bias)
    x = images(network, 16)
    batches = [picture[None].numpy() for picture in images(network, 32, seed=1)]
    answer = graphs.write_graph(
        weft.fold(network), tmp_path / "model.xml", "openvino", "int8", tuple(x.shape[1:]), batches
    )
    known = runtimes.run_file(tmp_path / "model.xml", "openvino", "int8")
    expected = network(x).detach().numpy()
    for found in (answer(x.numpy()), known.run(x.numpy()).logits):
        assert abs(found - expected).max() < 0.1 * abs(expected).max()


@pytest.mark.slow
def test_batches_of_several_sizes(tmp_path):
    """The first have a graph of their own in OpenVINO; all answer the same."""
    network = model("ceit_nano_32")
    export(network, tmp_path / "out", format="openvino")
    exported = open_model(tmp_path / "out")
    for batch in (3, 1, 3, 2, 4, 5, 6, 2, 5):
        x = images(network, batch, seed=batch)
        assert (outputs_of(exported, x) - network(x)).abs().max() < 1e-5 * network(x).abs().max()
    assert list(exported.fixed) == [1, 3, 2, 4]
    assert len(exported.fixed) == runtimes.FIXED
    again = images(network, 5)
    assert torch.equal(outputs_of(exported, again), outputs_of(exported, again))


@pytest.mark.slow
def test_no_path_of_this_machine_is_in_an_onnx_file(tmp_path):
    export(model("levit_nano_32"), tmp_path / "out", format="onnx")
    data = (tmp_path / "out" / "model.onnx").read_bytes()
    assert str(Path(weft.__file__).parent).encode() not in data
    assert b"site-packages" not in data


@pytest.mark.slow
def test_int8_where_no_batch_may_be_unknown(photos, tmp_path, monkeypatch):
    network, data = model("levit_nano_32"), open_data(photos)
    export(network, tmp_path / "out", format="openvino", precision="int8", data=data, max_drop=100)
    x = images(network, 67)
    want = outputs_of(open_model(tmp_path / "out"), x)
    flags = (*processor.cpu_flags(), "amx_int8")
    monkeypatch.setattr(processor, "cpu_flags", lambda: flags)
    exported = open_model(tmp_path / "out")
    assert not exported.is_dynamic
    torch.testing.assert_close(outputs_of(exported, x), want, rtol=0.05, atol=0.02 * want.abs().max().item())
    assert list(exported.fixed) == [1, 64, 4]  # 1: the blank image of opening
    export(network, tmp_path / "there", format="openvino", precision="int8", data=data, max_drop=100)


def test_the_graph_for_any_batch_is_compiled_when_it_is_needed(tmp_path):
    """A process that predicts one image compiles one graph; a service compiles all of them before it is ready."""
    network = model("levit_nano_32")
    export(network, tmp_path / "out", format="openvino")
    exported = open_model(tmp_path / "out")
    assert (list(exported.fixed), "dynamic" in vars(exported)) == ([1], False)
    for count in (2, 3, 4, 5):
        x = images(network, count)
        torch.testing.assert_close(outputs_of(exported, x), network(x), rtol=1e-3, atol=1e-3)
    assert (list(exported.fixed), "dynamic" in vars(exported)) == ([1, 2, 3, 4], True)
    service = Predictor.load(tmp_path / "out").warmed_up(32)
    graph = service.model
    assert (sorted(graph.fixed), "dynamic" in vars(graph)) == ([1, 8, 16, 32], True)


@pytest.mark.slow
def test_a_signal_after_models_that_came_and_went(tmp_path):
    export(model("levit_nano_32"), tmp_path / "out", format="openvino")
    program = (
        "import signal, sys\n"
        "from weft.inference import open_model\n"
        "first, second = open_model(sys.argv[1]), open_model(sys.argv[1])\n"
        "del first\n"
        "del second\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "out"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


@pytest.mark.slow
def test_a_rectangle(tmp_path):
    network = lively("levit_nano_32", img_size=(48, 32), num_classes=3)
    assert export(network, tmp_path / "out").agreement == 100
    exported = open_model(tmp_path / "out")
    with pytest.raises(UsageError, match=r"must be 3x48x32, as the export was made for; got 3x32x48\."):
        outputs_of(exported, torch.zeros(1, 3, 32, 48))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.onnx", "model.xml", "model.pt2"])
def test_a_file_for_other_programs(name, tmp_path):
    network = model("levit_nano_32")
    file = tmp_path / "new" / name
    report = export(network, file, label_names=CLASSES)
    assert report.out == str(file)
    assert {path.name for path in file.parent.iterdir()} == {name, "model.json"} | (
        {"model.bin"} if name == "model.xml" else set()
    )
    fields = json.loads(file.with_suffix(".json").read_text())
    assert fields["label_names"] == list(CLASSES)
    assert fields["artefact"]["format"] == exporting.SUFFIXES[file.suffix]
    x = images(network, 3)
    if name == "model.onnx":
        import onnxruntime

        found = onnxruntime.InferenceSession(str(file)).run(None, {"images": x.numpy()})[0]
    elif name == "model.xml":
        import openvino

        found = openvino.compile_model(str(file), "CPU")(x.numpy())[0]
    else:
        found = torch.export.load(file).module()(x).numpy()
    # OpenVINO computes in bf16 where it can, unless it is told otherwise
    assert np.abs(found - network(x).detach().numpy()).max() < 0.1 * network(x).abs().max()
    with pytest.raises(UsageError, match=r"An export must be new; .* exists already"):
        export(network, file)
    with pytest.raises(UsageError, match=r"format must match the suffix of .*; got"):
        export(network, file, format="onnx" if name != "model.onnx" else "torch", force=True)


def test_the_command_line_knows_every_format():
    choices = {argument.name: argument.get_choices(force=True) for argument in arguments("export")}
    assert choices["--format"] == (*FORMATS, AUTO)
    assert set(choices["--precision"]) == {precision for row in FORMATS.values() for precision in row}


def test_a_network_of_timm(tmp_path):
    """With BatchNorm that weft does not know; the runtime does."""
    report = export(enliven(weft.create_model("test_resnet", num_classes=3)).eval(), tmp_path / "out")
    assert report.agreement == 100
    assert report.max_logit > 0.01


@pytest.mark.slow
def test_the_same_answer_through_every_door(models, photos, tmp_path):
    """Python, command line, ONNX, OpenVINO: equal classes, probabilities to 1e-4; whatever stands beside a picture."""
    source = models["levit_nano_32"]
    network, names = load_model_dir(source)
    for format in ("onnx", "openvino"):
        export(network, tmp_path / format, format=format, label_names=names)
    files = sorted(str(path) for path in (photos / "val").rglob("*.png"))
    expected = predict(source, files, batch_size=27)
    doors = [predict(tmp_path / format, files, batch_size=size) for format in ("onnx", "openvino") for size in (1, 4)]
    command = [sys.executable, "-m", "weft", "predict", str(tmp_path / "onnx"), *files, "--json"]
    output = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    doors.append([{"top": [(top["class"], top["probability"]) for top in item["top"]]} for item in output])
    for door in doors:
        for answer, other in zip(expected, door, strict=True):
            top = other["top"] if isinstance(other, dict) else other.top
            assert [name for name, _ in answer.top] == [name for name, _ in top]
            assert [share for _, share in answer.top] == pytest.approx([share for _, share in top], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_threads(verb, models, photos, tmp_path, capsys):
    out, before = tmp_path / "out", torch.get_num_threads()
    export(load_model_dir(models["levit_nano_32"])[0], out, format="openvino", label_names=CLASSES)
    assert open_model(out, threads=2).hints["INFERENCE_NUM_THREADS"] == 2
    words = [verb, str(out), str(photos if verb == "evaluate" else next(photos.rglob("*.png")))]
    try:
        assert main([*words, "--threads", "3"]) == 0
        assert torch.get_num_threads() == 3
        assert open_model(out).hints["INFERENCE_NUM_THREADS"] == 3
        assert main([*words, "--threads", "0"]) == 2
        assert "--threads must be a whole number at least 1 and at most 1024; got 0." in capsys.readouterr().err
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_int8_by_the_command_line(models, photos, tmp_path):
    """Calibrated on the training images, measured on the held-out ones; then it predicts as it evaluates."""
    out = tmp_path / "out"
    words = ["export", str(models["ceit_nano_32"]), str(out), "--format", "openvino", "--precision", "int8"]
    words += ["--data", str(photos), "--max-drop", "30", "--json"]
    done = subprocess.run([sys.executable, "-m", "weft", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["images"], report["compared_on"]) == (27, "held-out images")
    files = sorted(str(path) for path in (photos / "val").rglob("*.png"))
    answers = predict(out, files, batch_size=27)  # as many as evaluation takes at once: another number rounds otherwise
    right = [answer.top[0][0] == Path(file).parent.name for file, answer in zip(files, answers, strict=True)]
    assert evaluate(out, photos, quiet=True).top1 == pytest.approx(100 * sum(right) / 27)
    assert evaluate(models["ceit_nano_32"], photos, quiet=True).top1 == pytest.approx(report["top1_model"])
    fp32 = export(load_model_dir(models["ceit_nano_32"])[0], tmp_path / "fp32", format="openvino")
    assert report["bytes"] < 0.6 * fp32.bytes
    assert 0 < report["max_difference"] < report["max_logit"]


@pytest.mark.slow
def test_making_int8_speaks_to_nobody(models, photos, tmp_path):
    """OpenVINO and NNCF both count their users, unless they are asked in the right way."""
    code = """
import socket, sys
def refuse(*words, **more): raise SystemExit("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from weft.cli import main
code = main(sys.argv[1:])
from nncf.telemetry.wrapper import NNCFTelemetry, telemetry
assert not isinstance(telemetry, NNCFTelemetry)
raise SystemExit(code)
"""
    words = ["export", str(models["levit_nano_32"]), str(tmp_path / "out"), "--format", "openvino"]
    words += ["--precision", "int8", "--data", str(photos), "--max-drop", "100", "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_onnx_runtime_stores_and_sends_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    """Its telemetry begins with the import: a device number in the cache of the user, and a connection."""
    folder, home = tmp_path / "out", tmp_path / "home"
    export(load_model_dir(models["levit_nano_32"])[0], folder, format="onnx", label_names=CLASSES)
    image = tmp_path / "image.png"
    Image.new("RGB", (40, 40)).save(image)
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "WEFT_CACHE": str(tmp_path / "weft")}
    words = [sys.executable, "-m", "weft", "predict", str(folder), str(image), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime" not in done.stderr
    assert not list(home.rglob("*"))


def refused(tmp_path: Path, match: str, **words: Any) -> None:
    with pytest.raises(VerificationError, match=match):
        export(model("levit_nano_32"), tmp_path / "out", **words)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_changed_weight_is_noticed(tmp_path, monkeypatch):
    def spoiled(network):
        folded = weft.fold(network)
        with torch.no_grad():
            folded.head.weight[0, 0] += 0.01
        return folded

    monkeypatch.setattr(exporting, "fold", spoiled)
    refused(tmp_path, r"in fp32 must differ from those of the model by at most 0\.0001 of the largest logit")


@pytest.mark.slow
def test_other_answers_in_bf16_are_noticed_without_pictures(tmp_path, monkeypatch):
    def inverted(*words):
        infer = written(*words)
        return lambda batch: -infer(batch)

    written = exporting.write_graph
    monkeypatch.setattr(exporting, "write_graph", inverted)
    refused(
        tmp_path, r"in bf16 .* at most 0\.1 of the largest logit; they differ by", format="openvino", precision="bf16"
    )


def test_classes_in_another_order_are_refused(tmp_path, photos):
    names = ("right", "left", "up")
    with pytest.raises(UsageError, match="classes of the model in their order; it has 'left' for 'right'"):
        export(model("levit_nano_32"), tmp_path / "out", label_names=names, data=open_data(photos))
    assert not (tmp_path / "out").exists()


class Relabelled:
    """Pictures of which the model is always right."""

    def __init__(self, source: Any, answers: list[int]) -> None:
        self.source, self.labels, self.classes, self.keys = source, answers, source.classes, source.keys

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int) -> Any:
        return self.source.read(i)._replace(label=self.labels[i])


@pytest.mark.slow
def test_lost_accuracy_is_refused_with_its_own_code(models, photos, tmp_path, monkeypatch):
    network, _ = load_model_dir(models["levit_nano_32"])
    data = open_data(photos)
    answers = [int(network(batch).argmax()) for batch, _ in verification.labelled_batches(data, "val", network, 1)]
    data = dataclasses.replace(data, val=Relabelled(data.val, answers))

    def inverted(*words):
        infer = written(*words)
        return lambda batch: -infer(batch)

    written = exporting.write_graph
    monkeypatch.setattr(exporting, "write_graph", inverted)
    with pytest.raises(
        VerificationError, match=r"on 27 held-out images the model has 100\.00 % and the export"
    ) as caught:
        export(network, tmp_path / "out", format="openvino", precision="int8", data=data, max_drop=99)
    assert caught.value.exit_code == 7
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("wrong", "is_refused"), [(0, False), (1, False), (2, True), (27, True)])
def test_max_drop_or_one_image(wrong, is_refused, photos, tmp_path, monkeypatch):
    """Of 27 images one is 3.7 points, above --max-drop, but they cannot show a smaller loss."""
    network = model("levit_nano_32")
    data = open_data(photos)
    labels = [int(network(batch).argmax()) for batch, _ in verification.labelled_batches(data, "val", network, 1)]
    data = dataclasses.replace(data, val=Relabelled(data.val, labels))
    remaining = [wrong]

    def write(network, file, *words):
        def infer(batch):
            logits = network(torch.from_numpy(batch)).detach().numpy()
            count = min(remaining[0], len(logits))
            remaining[0] -= count
            logits[:count] = -logits[:count]
            return logits

        for name in runtimes.FILES["openvino"]:
            (file.parent / name).write_bytes(b"graph")
        return infer

    monkeypatch.setattr(exporting, "write_graph", write)
    arguments = dict(format="openvino", precision="int8", data=data)
    if is_refused:
        with pytest.raises(VerificationError, match=rf"a drop of {100 * wrong / 27:.2f} points \(95 % CI"):
            export(network, tmp_path / "out", **arguments)
        return
    report = export(network, tmp_path / "out", **arguments)
    assert report.drop.value == pytest.approx(100 * wrong / 27) == report.top1_model - report.top1
    assert "too few images to show that it is at most 0.5 points" in report.drop_text(0.5)
    assert "within 60 points" in report.drop_text(60)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["drop"] == report.drop._asdict()


def test_what_does_not_fit_says_so(models, photos, tmp_path, monkeypatch):
    network = model("levit_nano_32")
    cases = [
        (dict(format="tflite"), r"format must be one of onnx, openvino, torch, auto; got 'tflite'\."),
        (
            dict(precision="bf16"),
            r"\(onnx: fp32, fp16, int8; openvino: fp32, fp16, bf16, int8;.*\); got bf16 for onnx\.",
        ),
        (dict(format="openvino", precision="int8"), r"int8 must be calibrated on images"),
        (dict(max_drop=-1), r"max_drop must be from 0 to 100 points; got -1"),
        (dict(label_names=["a", "b"]), r"one name per class, 3; got 2"),
    ]
    for words, message in cases:
        with pytest.raises(UsageError, match=message):
            export(network, tmp_path / "out", **words)
    with pytest.raises(UsageError, match=r"must end in \.onnx, \.xml, \.pt2; got .*model\.tflite\."):
        export(network, tmp_path / "model.tflite")
    with pytest.raises(UsageError, match=r"it is in training mode\. Call model\.eval\(\)\."):
        export(network.train(), tmp_path / "out")
    with pytest.raises(UsageError, match=r"data must have the model's 5 classes; it has 3\."):
        export(lively("levit_nano_32", num_classes=5), tmp_path / "out", data=open_data(photos))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find_spec(name))
    with pytest.raises(UsageError, match=r"onnx is needed for this.* pip install 'weft-vision\[deploy\]'"):
        export(network.eval(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_artefacts_that_cannot_be_used(tmp_path):
    out, image = tmp_path / "out", tmp_path / "red.png"
    Image.new("RGB", (32, 32), "red").save(image)
    export(model("levit_nano_32"), out)
    with pytest.raises(UsageError, match=r"must be new or empty"):
        export(model("levit_nano_32"), out)
    export(model("levit_nano_32"), out, format="openvino", force=True)
    assert not (out / "model.onnx").exists()
    with pytest.raises(CheckpointError, match=r"it is an export, for inference only"):
        load_model_dir(out)
    with pytest.raises(UsageError, match=r"img_size must be that of the export, 32x32; got 64x64\."):
        predict(out, image, img_size=64)
    (out / "model.bin").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"model\.bin must exist and have the sha256 that config\.json states"):
        open_model(out)
    config = json.loads((out / "config.json").read_text())
    config["artefact"]["version"] = 2
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"must describe an export of version 1"):
        open_model(out)
    export(model("levit_nano_32"), out, format="torch", force=True)
    with pytest.raises(CheckpointError, match=r"a \.pt2 file, which can contain any code, so weft does not load it\."):
        open_model(out)


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("has_vnni", [False, True])
def test_attention_is_quantised_where_int8_has_instructions(
    has_vnni: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other multiplications but the classifier are in int8 in both cases."""
    monkeypatch.setattr(graphs, "has_int8", lambda flags: has_vnni)
    images = [np.random.default_rng(seed).standard_normal((1, 3, 32, 32)).astype(np.float32) for seed in range(4)]
    graphs.write_graph(fold(model("ceit_nano_32")), tmp_path / "model.xml", "openvino", "int8", (3, 32, 32), images)
    graph = runtimes.openvino_core().read_model(str(tmp_path / "model.xml"))
    attention = graphs._products_of_activations(graph)
    classifier = runtimes.openvino_classifier(graph)
    names = {node.get_friendly_name() for node in (*attention, classifier)}
    others = [node for node in graph.get_ordered_ops() if node.get_type_name() in ("MatMul", "Convolution")]
    others = [node for node in others if node.get_friendly_name() not in names]
    assert len(attention) > 4
    assert len(others) > 4

    def is_quantised(node: Any) -> bool:
        source = node.input_value(0).get_node()
        while source.get_type_name() in (*graphs.MOVES, "MaxPool"):
            source = source.input_value(0).get_node()
        return source.get_type_name() == "FakeQuantize"

    count = sum(is_quantised(node) for node in attention)
    assert count >= len(attention) / 2 if has_vnni else count == 0  # the outputs of softmax may stay in float32
    assert all(is_quantised(node) for node in others)
    assert not is_quantised(classifier)


@pytest.mark.parametrize(("format", "size"), [("onnx", 200), ("openvino", 100)])
def test_int8_keeps_classes_whose_features_hardly_differ(format: str, size: float, tmp_path: Path) -> None:
    """Large weights cancel over features that all images share, as a linear probe of two classes has them."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(body, nn.Linear(32, 2)).eval()
    images = np.random.default_rng(0).standard_normal((16, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        features = body(torch.from_numpy(images))
        mean, head = features.mean(dim=0), network[1]
        directions = torch.linalg.svd(features - mean, full_matrices=False).Vh  # the classes differ along the first
        common = mean - directions.T @ (directions @ mean)
        head.weight.zero_()
        head.weight[0] = directions[0] / (features @ directions[0]).std() + size * common / common.norm()
        head.bias.copy_(-head.weight @ mean)
        expected = network(torch.from_numpy(images)).diff(dim=1).numpy()
    file = tmp_path / ("model.onnx" if format == "onnx" else "model.xml")
    infer = graphs.write_graph(network, file, format, "int8", (3, 32, 32), [image[None] for image in images])
    assert abs(np.diff(infer(images)) - expected).max() < 0.5 * expected.std()


@pytest.mark.slow_except("levit_nano_32")
@pytest.mark.parametrize("name", ["ceit_nano_32", "cvt_nano_32", "levit_nano_32"])
def test_linear_layers_as_convolutions_are_the_same_network(name: str, tmp_path: Path) -> None:
    network = fold(lively(name).eval())
    graphs._to_onnx(network, tmp_path / "model.onnx", (3, 32, 32))
    graph = runtimes.openvino_core().read_model(str(tmp_path / "model.onnx"))
    before = linear_layers(graph)
    graphs.linear_to_convolution(graph)
    assert before
    assert not linear_layers(graph)
    compiled = runtimes.openvino_core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for count in (1, 3):
        x = images(network, count)
        with torch.no_grad():
            expected = network(x)
        torch.testing.assert_close(torch.from_numpy(compiled(x.numpy())[0]), expected, rtol=1e-4, atol=1e-4)


def linear_layers(graph: Any) -> list[str]:
    """The multiplications of tokens with constant weights."""
    return [
        node.get_friendly_name()
        for node in graph.get_ordered_ops()
        if node.get_type_name() == "MatMul"
        and node.input_value(1).get_node().get_type_name() == "Constant"
        and node.input_value(0).get_partial_shape().rank.get_length() == 3
    ]
