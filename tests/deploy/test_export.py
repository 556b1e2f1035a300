"""An export answers as its model does; one that does not is not kept."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import weft
from tests.deploy.dots import CLASSES, dots, fake_graphs, noise
from tests.helpers import NANO, images, lively, outputs_of
from weft import files
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli.app import main
from weft.data import open_data
from weft.deploy import export, exporting, fold, graphs, opening, runtimes, verification
from weft.deploy.formats import FORMATS
from weft.deploy.model import ModelInfo
from weft.deploy.verification import ExportReport, verify
from weft.errors import CheckpointError, UsageError, VerificationError
from weft.inference import open_model
from weft.inference.inputs import SourcePart
from weft.inference.predictor import Predictor
from weft.machine import processor
from weft.report.intervals import Estimate
from weft.train import evaluate, predict

WAYS = [(format, precision) for format, words in FORMATS.items() for precision in words if precision != "int8"]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise(tmp_path_factory.mktemp("noise"))


@pytest.fixture(scope="session")
def exported(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports of `dots()` by format and precision, each made once. Read only."""

    @functools.cache
    def made(format: str, precision: str = "fp32") -> Path:
        data = open_data(photos) if precision == "int8" else None
        out = tmp_path_factory.mktemp("exports") / f"{format}-{precision}"
        export(dots(), out, format=format, precision=precision, data=data, label_names=CLASSES, max_drop=100)
        return out

    return made


def model(name: str) -> Any:
    """Three classes, far enough apart that rounding does not swap them."""
    if name == "dots":
        return dots()
    network = lively(name, num_classes=3)
    with torch.no_grad():
        for head in network.head_modules():
            (head.linear if hasattr(head, "linear") else head).weight.mul_(30)
    return network


def test_log_levels_of_the_program_stay() -> None:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with graphs._quiet():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(before)


@pytest.mark.parametrize(("format", "precision"), WAYS)
@pytest.mark.parametrize("name", ["dots", *(pytest.param(name, marks=pytest.mark.slow) for name in NANO)])
def test_an_export_answers_as_its_network(name: str, format: str, precision: str, tmp_path: Path) -> None:
    network = model(name)
    report = export(network, tmp_path / "out", format=format, precision=precision)
    assert report.images == verification.RANDOM_IMAGES
    assert report.agreement == 100 if precision == "fp32" else report.agreement > 90
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "report.json", *runtimes.FILES[format]}
    assert json.loads((tmp_path / "out" / "report.json").read_text())["max_difference"] == report.max_difference
    if format == "torch":
        return
    exported = open_model(tmp_path / "out")
    for batch in (1, 5):
        x = images(network, batch, seed=7)
        expected = network(x).detach()
        tolerance = 1e-5 if precision == "fp32" else 0.1
        assert (outputs_of(exported, x) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_int8_is_calibrated_on_training_images_and_measured_on_the_others(format, photos, tmp_path, capsys):
    """Then it predicts as it evaluates; a factor of each product has 7 bits, which do not saturate without VNNI."""
    source, out = save_model_dir(dots(), tmp_path / "model", label_names=CLASSES), tmp_path / "out"
    words = ["export", str(source), str(out), "--format", format, "--precision", "int8", "--data", str(photos)]
    assert main([*words, "--max-drop", "100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["compared_on"]) == (21, "held-out images")
    assert 0 < report["max_difference"] < report["max_logit"] / 2
    pictures = sorted((photos / "val").rglob("*.png"))
    answers = predict(
        out, pictures, batch_size=21
    )  # as many as evaluation takes at once: another number rounds otherwise
    right = [answer.top[0][0] == file.parent.name for file, answer in zip(pictures, answers, strict=True)]
    assert evaluate(out, photos, quiet=True).top1 == pytest.approx(100 * sum(right) / 21)
    assert evaluate(source, photos, quiet=True).top1 == pytest.approx(report["top1_model"])
    if format == "onnx":
        onnx = pytest.importorskip("onnx")
        weights = [one for one in onnx.load(out / "model.onnx").graph.initializer if len(one.dims) > 1]
        integers = [onnx.numpy_helper.to_array(one) for one in weights if one.data_type == onnx.TensorProto.INT8]
        assert integers
        assert max(int(np.abs(values.astype(int)).max()) for values in integers) <= 64


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
def test_int8_is_near(name: str, format: str, part: int, photos: Path, tmp_path: Path) -> None:
    """To a part of the largest logit. Weights have 7 bits; with 8, which saturate without VNNI, LeViT is at 1/20."""
    network = model(name)
    report = export(network, tmp_path / "out", format=format, precision="int8", data=open_data(photos), max_drop=50)
    assert report.max_difference < report.max_logit / part
    assert report.bytes < 0.6 * sum(4 * parameter.numel() for parameter in network.parameters())
    exported = open_model(tmp_path / "out")
    x = images(network, 4)
    assert (outputs_of(exported, x) - network(x)).abs().max() < 0.15 * network(x).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_int8_for_any_batch_is_int8_for_one(name: str, tmp_path: Path) -> None:
    """Biases are large here: OpenVINO 2026.4 drops that of CeiT's stem if the graph asks for the batch behind it."""
    network = model(name)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.bias)
    x = images(network, 16)
    batches = [picture[None].numpy() for picture in images(network, 32, seed=1)]
    answer = graphs.write_graph(
        weft.fold(network), tmp_path / "model.xml", "openvino", "int8", tuple(x.shape[1:]), batches
    )
    known = runtimes.run_file(tmp_path / "model.xml", "openvino", "int8")
    expected = network(x).detach().numpy()
    for found in (answer(x.numpy()), known.run(x.numpy()).logits):
        assert abs(found - expected).max() < 0.1 * abs(expected).max()


def test_batches_of_several_sizes_have_graphs_that_answer_the_same(exported: Callable[..., Path]) -> None:
    """A process that predicts one image compiles one graph; a service compiles all of them before it is ready."""
    network, graph = dots(), open_model(exported("openvino"))
    assert (list(graph.fixed), "dynamic" in vars(graph)) == ([1], False)
    for batch in (3, 1, 3, 2, 4, 5, 6, 2, 5):
        x = images(network, batch, seed=batch)
        torch.testing.assert_close(outputs_of(graph, x), network(x), rtol=1e-4, atol=1e-4)
    assert (list(graph.fixed), "dynamic" in vars(graph)) == ([1, 3, 2, 4], True)
    assert len(graph.fixed) == runtimes.FIXED
    again = images(network, 5)
    assert torch.equal(outputs_of(graph, again), outputs_of(graph, again))
    service = Predictor.load(exported("openvino")).warmed_up(32).model
    assert (sorted(service.fixed), "dynamic" in vars(service)) == ([1, 8, 16, 32], True)


def test_int8_where_no_batch_may_be_unknown(exported, photos, tmp_path, monkeypatch):
    x = images(dots(), 67)
    want = outputs_of(open_model(exported("openvino", "int8")), x)
    flags = (*processor.cpu_flags(), "amx_int8")
    monkeypatch.setattr(processor, "cpu_flags", lambda: flags)
    graph = open_model(exported("openvino", "int8"))
    assert not graph.is_dynamic
    torch.testing.assert_close(outputs_of(graph, x), want, rtol=0.05, atol=0.02 * want.abs().max().item())
    assert list(graph.fixed) == [1, 64, 4]  # 1: the blank image of opening
    data = open_data(photos)
    export(dots(), tmp_path / "out", format="openvino", precision="int8", data=data, max_drop=100)


def test_no_path_of_this_machine_is_in_an_onnx_file(exported: Callable[..., Path]) -> None:
    data = (exported("onnx") / "model.onnx").read_bytes()
    for place in (Path(weft.__file__).parent, Path(__file__).parent, "site-packages"):
        assert str(place).encode() not in data


@pytest.mark.slow
def test_a_signal_after_models_that_came_and_went(exported: Callable[..., Path]) -> None:
    program = (
        "import signal, sys\n"
        "from weft.inference import open_model\n"
        "first, second = open_model(sys.argv[1]), open_model(sys.argv[1])\n"
        "del first\n"
        "del second\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('heard'))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, exported("openvino")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


def test_an_export_has_one_size(tmp_path: Path) -> None:
    assert export(dots(size=(48, 32)), tmp_path / "out").agreement == 100
    exported = open_model(tmp_path / "out")
    with pytest.raises(UsageError, match=r"must be 3x48x32, as the export was made for; got 3x32x48\."):
        outputs_of(exported, torch.zeros(1, 3, 32, 48))
    image = tmp_path / "red.png"
    Image.new("RGB", (32, 32), "red").save(image)
    with pytest.raises(UsageError, match=r"img_size must be that of the export, 48x32; got 64x64\."):
        predict(tmp_path / "out", image, img_size=64)


@pytest.mark.parametrize("name", ["model.onnx", "model.xml", "model.pt2"])
def test_a_file_for_other_programs(name: str, tmp_path: Path) -> None:
    network, file = dots(), tmp_path / "new" / name
    assert export(network, file, label_names=CLASSES).out == str(file)
    beside = {"model.bin"} if name == "model.xml" else set()
    assert {path.name for path in file.parent.iterdir()} == {name, "model.json"} | beside
    fields = json.loads(file.with_suffix(".json").read_text())
    assert fields["label_names"] == list(CLASSES)
    assert fields["artefact"]["format"] == exporting.SUFFIXES[file.suffix]
    x = images(network, 3)
    if name == "model.onnx":
        session = runtimes.import_onnx_runtime().InferenceSession(str(file))
        found = session.run(None, {"images": x.numpy()})[0]
    elif name == "model.xml":
        found = runtimes.openvino_core().compile_model(str(file), "CPU")(x.numpy())[0]
    else:
        found = torch.export.load(file).module()(x).detach().numpy()
    # OpenVINO computes in bf16 where it can, unless it is told otherwise
    assert np.abs(found - network(x).detach().numpy()).max() < 0.1 * network(x).abs().max()
    with pytest.raises(UsageError, match=r"An export must be new; .* exists already"):
        export(network, file)
    with pytest.raises(UsageError, match=r"format must match the suffix of .*; got"):
        export(network, file, format="onnx" if name != "model.onnx" else "torch", force=True)


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_an_export_has_the_threads_of_the_command(verb, exported, photos, capsys):
    out, before = exported("openvino"), torch.get_num_threads()
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


@pytest.mark.parametrize(("cores", "pinning"), [(2, None), (4, False)])
def test_threads_that_leave_cores_free_are_not_pinned(cores, pinning, monkeypatch):
    """Every process would begin with the first core, so that several services would share the same ones."""
    monkeypatch.setattr(processor, "available_cores", lambda: cores)
    hints = runtimes.OpenVinoModel(Path("model.xml"), ModelInfo(runtime="openvino", precision="fp32"), 2, 1).hints
    assert (hints.get("ENABLE_CPU_PINNING"), hints["INFERENCE_NUM_THREADS"]) == (pinning, 2)


@pytest.mark.slow
def test_making_int8_speaks_to_nobody(photos: Path, tmp_path: Path) -> None:
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
    source = save_model_dir(model("levit_nano_32"), tmp_path / "model", label_names=CLASSES)
    words = ["export", str(source), str(tmp_path / "out"), "--format", "openvino"]
    words += ["--precision", "int8", "--data", str(photos), "--max-drop", "100", "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_onnx_runtime_stores_and_sends_nothing(exported: Callable[..., Path], tmp_path: Path) -> None:
    """Its telemetry begins with the import: a device number in the cache of the user, and a connection."""
    image, home = tmp_path / "image.png", tmp_path / "home"
    Image.new("RGB", (40, 40)).save(image)
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "WEFT_CACHE": str(tmp_path / "weft")}
    words = [sys.executable, "-m", "weft", "predict", str(exported("onnx")), str(image), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime" not in done.stderr
    assert not list(home.rglob("*"))


@pytest.mark.parametrize(
    ("precision", "changed", "words"),
    [
        ("fp32", lambda logits: logits * (1 + 2e-4), r"in fp32 must differ .* by at most 0\.0001 of the largest logit"),
        ("bf16", lambda logits: -logits, r"in bf16 .* at most 0\.1 of the largest logit; they differ by 2\."),
        ("fp16", lambda logits: logits * np.nan, r"must be finite; they are not"),
        ("fp32", lambda logits: logits[:, :2], r"must have the shape of those of the model, \(60, 3\); got \(60, 2\)"),
        ("fp32", lambda logits: 1 / 0, r"openvino must be able to run the network in fp32; it fails: division by zero"),
    ],
)
def test_an_export_with_other_logits_is_refused(precision, changed, words, tmp_path, monkeypatch):
    fake_graphs(monkeypatch, lambda logits, format: changed(logits))
    with pytest.raises(VerificationError, match=words):
        export(dots(), tmp_path / "out", format="openvino", precision=precision)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("images", "lost", "is_refused"),
    [(41, 1, False), (41, 3, True), (2, 2, True), (1000, 5, False), (1000, 6, True)],
)
def test_an_export_loses_at_most_max_drop_or_one_image(images: int, lost: int, is_refused: bool) -> None:
    drop = Estimate(100 * lost / images, -5, 20)
    top1 = dict(agreement=90, top1=100 - drop.value, top1_model=100, bytes=1, drop=drop)
    differences = dict(max_difference=0.1, mean_difference=0.01, max_logit=1)
    report = ExportReport("out", "onnx", "int8", "held-out images", images, **differences, **top1)
    if not is_refused:
        return verify(report, 0.5)
    with pytest.raises(VerificationError, match=r"at most 0\.5 points of top-1, or one image; .* raise --max-drop"):
        verify(report, 0.5)


class Relabelled:
    """Images whose labels are the predictions of the network."""

    def __init__(self, source: Any, network: nn.Module, data: Any) -> None:
        batches = verification.labelled_batches(data, "val", network, 1)
        self.source, self.labels = source, [int(network(batch).argmax()) for batch, _ in batches]
        self.classes, self.keys = source.classes, source.keys

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int) -> Any:
        return self.source.read(i)._replace(label=self.labels[i])


@pytest.mark.parametrize(("wrong", "is_refused"), [(0, False), (1, False), (2, True), (21, True)])
def test_lost_accuracy_is_measured_and_refused(wrong, is_refused, photos, tmp_path, monkeypatch):
    """Of 21 images one is 4.8 points, above --max-drop, but they cannot show a smaller loss."""
    network, data, remaining = dots(), open_data(photos), wrong
    data = dataclasses.replace(data, val=Relabelled(data.val, network, data))

    def changed(logits: np.ndarray, format: str) -> np.ndarray:
        nonlocal remaining
        count = min(remaining, len(logits))
        remaining -= count
        return np.concatenate([-logits[:count], logits[count:]])

    fake_graphs(monkeypatch, changed)
    settings = dict(format="openvino", precision="int8", data=data)
    if is_refused:
        words = rf"model has 100\.00 % and the export .* a drop of {100 * wrong / 21:.2f} points \(95 % CI"
        with pytest.raises(VerificationError, match=words) as caught:
            export(network, tmp_path / "out", **settings)
        assert caught.value.exit_code == 7
        assert not (tmp_path / "out").exists()
        return
    report = export(network, tmp_path / "out", **settings)
    assert report.drop.value == pytest.approx(100 * wrong / 21) == report.top1_model - report.top1
    assert "too few images to show that it is at most 0.5 points" in report.drop_text(0.5)
    assert "within 60 points" in report.drop_text(60)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["drop"] == report.drop._asdict()


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("out", dict(format="tflite"), r"format must be one of onnx, openvino, torch, auto; got 'tflite'\."),
        ("out", dict(precision="bf16"), r"\(onnx: fp32, fp16, int8; openvino: .*\); got bf16 for onnx\."),
        ("out", dict(format="openvino", precision="int8"), "int8 must be calibrated on images"),
        ("out", dict(max_drop=-1), "max_drop must be from 0 to 100 points; got -1"),
        ("out", dict(label_names=["a", "b"]), "one name per class, 3; got 2"),
        ("out", dict(data=True, model=lambda: dots(5)), r"data must have the model's 5 classes; it has 3\."),
        ("out", dict(model=lambda: dots().train()), r"it is in training mode\. Call model\.eval\(\)\."),
        ("out", dict(data=True, label_names=("right", "left", "up")), "in their order; it has 'left' for 'right'"),
        ("out", dict(data="none held out"), "data must have held-out images"),
        ("model.tflite", {}, r"must end in \.onnx, \.xml, \.pt2; got .*model\.tflite\."),
        ("model.onnx", dict(format="auto"), r"must match the suffix of .*, onnx; got auto\. Leave format out"),
        ("out", dict(format="auto", precision="fp16"), r"auto: fp32, bf16, int8\); got fp16 for auto\."),
        *(
            ("out", dict(format="auto", batch_sizes=sizes), "batch_sizes must be whole numbers from 1 to 4096; got ")
            for sizes in ((), (0,), (1, 5000), (1.5,), (True,), ("8",))
        ),
        ("out", dict(format="auto", batch_sizes=range(1, 66)), "batch_sizes must be at most 64 numbers; got 65"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(name, more, words, photos, tmp_path):
    more = dict(more)
    if "data" in more:
        data = open_data(photos)
        none = dataclasses.replace(data, val=SourcePart(data.val, places=[]))
        more["data"] = data if more["data"] is True else none
    network = more.pop("model", dots)()
    with pytest.raises(UsageError, match=words):
        export(network, tmp_path / name, **more)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("missing", "words"),
    [("onnx", "onnx is needed for this"), ("openvino onnxruntime", "auto needs an export that is possible on this")],
)
def test_a_missing_package_is_refused_with_its_extra(missing, words, tmp_path, monkeypatch):
    network, find_spec = dots(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing.split() else find_spec(name))
    with pytest.raises(UsageError, match=rf"{words}.* pip install\s'weft-vision\[deploy\]'"):
        export(network, tmp_path / "out", format="onnx" if missing == "onnx" else "auto")
    assert not list(tmp_path.iterdir())


def with_config(out: Path, **changes: Any) -> None:
    """Change what config.json of an export says of its graph."""
    config = json.loads((out / "config.json").read_text())
    config["artefact"] |= changes
    (out / "config.json").write_text(json.dumps(config))


def truncate(out: Path) -> None:
    (out / "model.onnx").write_bytes((out / "model.onnx").read_bytes()[:500])


def truncate_with_checksum(out: Path) -> None:
    truncate(out)
    with_config(out, sha256={"model.onnx": files.sha256_of(out / "model.onnx")})


def deny(path: Path) -> str:
    raise PermissionError(13, "Permission denied")


def lack_onnx(*_: object, **__: object) -> None:
    raise UsageError("This needs onnx")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (truncate, CheckpointError, r"model\.onnx must exist and have the sha256 that config\.json states"),
        (truncate_with_checksum, CheckpointError, "must contain a graph that onnx can run; it cannot"),
        (lambda out: (out / "model.onnx").unlink(), CheckpointError, "it is missing or damaged"),
        (lambda out: with_config(out, version=2), CheckpointError, r"artefact\.version: it must be 1; got 2\."),
        (lambda out: with_config(out, precision="zz"), CheckpointError, "'bf16' or 'int8'; got 'zz'"),
        (lambda out: with_config(out, format="torch"), CheckpointError, r"a \.pt2 file, which can contain any code"),
        (lambda out: (out / "config.json").write_text("{"), CheckpointError, "must be JSON"),
        (("sha256_of", deny), CheckpointError, "must be readable; they are not .*Permission denied"),
        (("run_file", lack_onnx), UsageError, "This needs onnx"),  # which is not called a damaged file
    ],
)
def test_an_export_that_cannot_be_opened_says_why(change, kind, words, exported, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(exported("onnx"), out)
    with pytest.raises(CheckpointError, match="it is an export, for inference only"):
        load_model_dir(out)
    if isinstance(change, tuple):
        monkeypatch.setattr(opening, *change)
    else:
        change(out)
    with pytest.raises(kind, match=words):
        open_model(out)


@pytest.mark.parametrize("format", ["openvino", "onnx"])
def test_no_file_is_open_when_it_is_moved(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows moves no open file."""
    open_files: list[str] = []
    flush = files.flush_file

    def look(path: Path) -> None:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        descriptors = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd)]
        names = [*(line.split(maxsplit=5)[-1] for line in mapped), *(os.readlink(fd) for fd in descriptors)]
        open_files.extend(name for name in names if str(tmp_path) in name and not Path(name).is_dir())
        flush(path)

    monkeypatch.setattr(files, "flush_file", look)
    export(dots(), tmp_path / "out", format=format)
    assert open_files == []


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("has_vnni", [False, True])
def test_attention_is_quantised_where_int8_has_instructions(has_vnni, tmp_path, monkeypatch):
    """All other multiplications but the classifier are in int8 in both cases."""
    monkeypatch.setattr(graphs, "has_int8", lambda flags: has_vnni)
    images = [np.random.default_rng(seed).standard_normal((1, 3, 32, 32)).astype(np.float32) for seed in range(4)]
    network = fold(lively("ceit_nano_32", num_classes=3, depth=2))
    graphs.write_graph(network, tmp_path / "model.xml", "openvino", "int8", (3, 32, 32), images)
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
@pytest.mark.parametrize("name", NANO)
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
