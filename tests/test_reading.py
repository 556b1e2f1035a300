"""Every kind of file that weft reads, changed by hand: it is read, or refused in a sentence, and never a traceback."""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import FULL, lively
from tests.train import tiny
from weft.checkpoints import load_model_dir, save_model_dir
from weft.cli import main
from weft.deploy import export
from weft.errors import CheckpointError, DataError, UsageError, WeftError
from weft.inference import open_model
from weft.reading import read_bytes, read_json, unzipped
from weft.recipes import load_recipe
from weft.train import train

HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, 10**9, 10**30, float("nan"), float("inf"), "", "x" * 10_000, "../../x", "\x1b[2J"),
    *([], {}, [[]], [None], {"a": None}, "http://[::1", "é\u202e", [1, 2], [1] * 5_000, [[[[1]]]], "1"),
]


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON tree; of a list the first and last."""
    yield at
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*at, key))
    elif isinstance(tree, list) and tree:
        for index in {0, len(tree) - 1}:
            yield from places(tree[index], (*at, index))


def changed(tree: Any, every: int = 1) -> Iterator[tuple[str, Any]]:
    """The tree with one value taken out or replaced by something hostile; of all changes each `every`-th."""
    number = 0
    for place in places(tree):
        for value in ["(gone)", *HOSTILE]:
            number += 1
            if number % every:
                continue
            new = copy.deepcopy(tree)
            if not place:
                yield "the whole", value
                continue
            inside = new
            for key in place[:-1]:
                inside = inside[key]
            if value == "(gone)":
                del inside[place[-1]]
            else:
                inside[place[-1]] = value
            yield f"{'.'.join(map(str, place))} = {value!r:.40}", new


# One change in 29, of large records one in 113 (primes, so that every kind of value meets every kind of place); all of
# them in `make fuzz`.
EVERY = 1 if FULL else 29


def assert_read_or_refused(read: Callable[[], object], name: str, seconds: float = 60) -> bool:
    """Whether it was refused. Anything but a sentence of weft's own is a failure."""
    try:
        read()
    except WeftError as error:
        text = str(error)
        assert "\n" not in text, name
        assert len(text) < 2_000, (name, len(text))
        assert text.isprintable(), (name, text)
        return True
    except BaseException as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = lively("levit_nano_32", num_classes=3, depth=[1, 1, 1])
    return save_model_dir(network, tmp_path_factory.mktemp("m") / "model", label_names=["a", "b", "c"])


def test_any_config_of_a_model_directory_is_read_or_refused(model, tmp_path):
    shutil.copytree(model, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    refused = 0
    for name, config in changed(json.loads(file.read_text()), EVERY):
        file.write_text(json.dumps(config))
        refused += assert_read_or_refused(lambda: load_model_dir(tmp_path / "m"), name)
    assert refused > 100 / EVERY


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """Export the model to a format, once."""

    @functools.cache
    def to(format: str) -> Path:
        pytest.importorskip("onnxruntime" if format == "onnx" else "openvino")
        network, names = load_model_dir(model)
        out = tmp_path_factory.mktemp(format) / "x"
        export(network, out, format=format, label_names=names)
        return out

    return to


def test_any_config_of_an_export_is_read_or_refused(exported, tmp_path):
    """Other classes than those of its graph are refused."""
    out = shutil.copytree(exported("onnx"), tmp_path / "x")
    file = out / "config.json"
    config = json.loads(file.read_text())
    for name, changes in changed(config, EVERY):
        file.write_text(json.dumps(changes))
        assert_read_or_refused(lambda: open_model(out), name)
    file.write_text(
        json.dumps({key: value for key, value in config.items() if key != "label_names"} | {"num_classes": 4})
    )
    with pytest.raises(CheckpointError, match=r"must return 4 logits .* it returns \(1, 3\)"):
        open_model(out)


@pytest.mark.slow_except("onnx")
@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_a_graph_that_is_no_graph_is_refused(format, exported, tmp_path):
    """With the right checksum: it was made so, or damaged before it was recorded."""
    out = shutil.copytree(exported(format), tmp_path / "x")
    before = (out / "config.json").read_text()
    for file in json.loads(before)["artefact"]["sha256"]:
        whole = (out / file).read_bytes()
        for data in (b"", b"\0" * 100, b"<net/>", whole[: len(whole) // 2], whole[::-1], b"<?xml version='1.0'?>" * 9):
            (out / file).write_bytes(data)
            config = json.loads(before)
            config["artefact"]["sha256"][file] = hashlib.sha256(data).hexdigest()
            (out / "config.json").write_text(json.dumps(config))
            assert_read_or_refused(lambda: open_model(out), f"{file} {data[:20]!r}")
        (out / file).write_bytes(whole)


def test_any_header_of_a_weight_file_is_read_or_refused(model, tmp_path):
    shutil.copytree(model, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["weights_sha256"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "m" / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    first = dict(list(header.items())[:3])
    rest = {key: value for key, value in header.items() if key not in first}
    for name, some in changed(first, EVERY):
        text = json.dumps({**some, **rest} if isinstance(some, dict) else some).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + body)
        assert_read_or_refused(lambda: load_model_dir(tmp_path / "m"), name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first epoch."""
    folder = tmp_path_factory.mktemp("run")
    data = tiny.paint(folder / "data", per_class=4)
    with pytest.raises(WeftError):
        train(
            data, "levit_nano_32", out=folder / "run", epochs=2, batch_size=4, device="cpu", stop_after=1, quiet=True,
            settings={"model_args.depth": [1, 1, 1]},
        )  # fmt: skip
    return folder / "run"


def newest_state(run: Path) -> Path:
    return sorted((run / "state").glob("*.safetensors"))[-1]


def test_any_sealed_record_of_a_state_is_read_or_refused(run, tmp_path):
    """Edited by hand, with a checksum that fits."""
    from weft.train.resume import open_run

    copied = shutil.copytree(run, tmp_path / "run")
    newest = newest_state(copied)
    for state in copied.glob("state/*.safetensors"):
        if state != newest:
            state.unlink()
    for name, some in changed(tiny.record_of(newest), EVERY if FULL else 113):
        tiny.reseal(newest, some)
        assert_read_or_refused(lambda: open_run(copied, (), override=False), name)


@pytest.mark.parametrize(
    "change", [("unimproved", 99), ("optimizer", {"nowhere.step": 1}), ("history", []), ("step", 1), ("machine", {})]
)
def test_a_record_that_fits_its_types_and_not_the_run_is_refused(change, run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    newest = newest_state(copied)
    tiny.reseal(newest, {**tiny.record_of(newest), change[0]: change[1]})
    assert_read_or_refused(lambda: train(resume=copied, stop_after=1, quiet=True), str(change))


@pytest.mark.slow
def test_the_record_of_the_data_cannot_unpack_without_bound(run, tmp_path):
    from weft.data.fingerprint import Fingerprint

    file = tmp_path / next(run.glob("*.gz")).name
    before = (run / file.name).read_bytes()
    for data in (gzip.compress(b"\n" * (1 << 29)), b"", before[:50], b"\0" * 999, gzip.compress(b"x\ny")):
        file.write_bytes(data)
        assert assert_read_or_refused(lambda: Fingerprint.read(file), repr(data[:10]))


def test_a_recipe_of_any_size_and_kind_is_refused(tmp_path):
    sparse = tmp_path / "sparse.yaml"
    with sparse.open("wb") as file:
        file.truncate(20 << 30)
    for path in (sparse, tmp_path, Path("/dev/zero"), tmp_path / "missing.yaml"):
        with pytest.raises(UsageError):
            load_recipe(path)


@pytest.mark.parametrize("value", ["=", "2024-13-99", "!!python/object:os.system", "0x", "1_000", "1:60", "<<", "~x"])
def test_any_text_of_a_constructor_value_is_text_or_refused(value):
    assert_read_or_refused(lambda: load_recipe(None, [("model_args.depth", value)]), value)


PLACES = [
    *("pretrained_cfg_overlay.url", "pretrained_cfg_overlay.file", "pretrained_cfg.url", "checkpoint_path"),
    *("cache_dir", "pretrained_cfg", "features_only", "pretrained", "model_cfg", "hf_hub_id", "pretrained_strict"),
]
VALUES: list[Any] = [
    *("http://127.0.0.1:1/x", "/etc/hostname", "a/b", "..\\x", "x" * 100, 10**9, float("nan"), [[[[1]]]], {"a": 1}),
]


@pytest.mark.parametrize("name", ["resnet18", "levit_nano_32"])
def test_constructor_values_are_numbers_and_words_and_name_no_place(name, tmp_path):
    """Neither a file nor an address is read."""
    data = tiny.paint(tmp_path / "data", per_class=4)
    refused = [(key, "http://127.0.0.1:1/x", "has no constructor value") for key in PLACES]
    if name == "resnet18":
        refused += [("act_layer", value, "a number, a word, true, false, null or a list|one plain") for value in VALUES]
    for key, value, message in refused:
        with pytest.raises(UsageError, match=message):
            train(data, name, out=tmp_path / "run", quiet=True, settings={f"model_args.{key}": value})
    assert not (tmp_path / "run").exists()


def test_what_a_recipe_reads_is_told_before_it_is_read(tmp_path, capsys):
    data = tmp_path / "empty"
    data.mkdir()
    code = main(["train", str(data), "--set", "distill.teacher=t", "--set", "pretrained=true"])
    output = capsys.readouterr().err
    assert code == 3
    assert output.startswith(f"Reading data.source: {data}, distill.teacher: t, pretrained: the public")


def test_weights_that_are_not_numbers_give_no_prediction(model, tmp_path, capsys):
    network, names = load_model_dir(model)
    for parameter in network.parameters():
        parameter.data.fill_(torch.nan)
    save_model_dir(network, tmp_path / "nan", label_names=names)
    images = tiny.paint(tmp_path / "data", per_class=1)
    for more in ([], ["--json"]):
        assert main(["predict", str(tmp_path / "nan"), str(images), *more]) == 4
        out, err = capsys.readouterr()
        assert "NaN" not in out
        assert "must be finite; they are not" in err


def test_files_are_regular_and_of_bounded_size(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", max_bytes=5) == b"12345"
    with pytest.raises(DataError, match="must have at most"):
        read_bytes(tmp_path / "x", DataError, max_bytes=4)
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(CheckpointError):
            read_bytes(path)
    assert unzipped(gzip.compress(b"abc"), 3) == b"abc"
    with pytest.raises(ValueError, match="decompresses to more"):
        unzipped(gzip.compress(b"abcd"), 3)


def test_a_pipe_without_a_writer_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    done = threading.Event()

    def read() -> None:
        with pytest.raises(CheckpointError, match="must be a regular file"):
            read_bytes(tmp_path / "pipe")
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(20)


def test_a_value_of_another_type_is_told_with_its_place(tmp_path):
    (tmp_path / "x.json").write_text('{"a": {"b": ["c"]}}')
    assert read_json(tmp_path / "x.json", dict[str, Any]) == {"a": {"b": ["c"]}}
    with pytest.raises(
        CheckpointError, match=r"x\.json must have the format that weft writes; a\.b\.0: it must be a valid integer"
    ):
        read_json(tmp_path / "x.json", dict[str, dict[str, list[int]]])
