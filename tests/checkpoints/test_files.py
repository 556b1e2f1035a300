"""Files of weights: honest old ones are read, lying and harmful ones refused; nothing in a file is ever run."""

import argparse
import builtins
import contextlib
import io
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import weft
from weft.checkpoints import read_state_dict
from weft.errors import CheckpointError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4)}


def assert_state(read):
    assert read.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert torch.equal(read[name], tensor)


HONEST = {
    "plain": STATE,
    "model": {"model": STATE, "epoch": 3, "lr": 0.1},
    "state_dict": {"state_dict": STATE, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}},
    "namespace": {"model": STATE, "args": argparse.Namespace(lr=0.1, name="x")},
    "numpy scalar": {"model": STATE, "best": np.float64(81.5)},
    "path": {"model": STATE, "args": argparse.Namespace(out=pathlib.PurePosixPath("a/b"))},
    "data parallel": {f"module.{name}": tensor for name, tensor in STATE.items()},
    "compiled": {"model": {f"_orig_mod.{name}": tensor for name, tensor in STATE.items()}},
    "average beside it": {"model": STATE, "model_ema": {name: tensor + 1 for name, tensor in STATE.items()}},
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", HONEST)
def test_honest_files(tmp_path, kind, legacy):
    torch.save(HONEST[kind], tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    assert_state(read_state_dict(tmp_path / "x.pth", import_foreign=kind == "path"))


def test_the_average_when_asked(tmp_path):
    torch.save(HONEST["average beside it"], tmp_path / "x.pth")
    assert torch.equal(read_state_dict(tmp_path / "x.pth", which="model_ema")["b.bias"], 2 * torch.ones(4))
    with pytest.raises(CheckpointError, match="'swa'"):
        read_state_dict(tmp_path / "x.pth", which="swa")


def test_safetensors(tmp_path):
    save_file(STATE, tmp_path / "x.safetensors")
    assert_state(read_state_dict(tmp_path / "x.safetensors"))


class Call:
    """Pickles as a call of `function`: what a harmful file is made of."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def harmful(marker: str) -> dict[str, object]:
    """Calls that would leave `marker` behind, were they made."""
    touch = f"open({marker!r}, 'w').close()"
    return {
        "os.system": Call(os.system, f"touch {marker}"),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", marker]),
        "subprocess.check_output": Call(subprocess.check_output, ["touch", marker]),
        "eval": Call(builtins.eval, touch),
        "exec": Call(builtins.exec, touch),
        "open": Call(builtins.open, marker, "w"),
        "os.open": Call(os.open, marker, os.O_CREAT),
        "os.mkdir": Call(os.mkdir, marker),
        "pathlib touch": Call(pathlib.Path.touch, pathlib.Path(marker)),
        "getattr": Call(builtins.getattr, Call(builtins.__import__, "os"), "system"),
        "import": Call(builtins.__import__, "os"),
        "compile": Call(builtins.compile, touch, "x", "exec"),
        "pickle.loads": Call(pickle.loads, pickle.dumps(Call(os.system, f"touch {marker}"))),
        "torch.load": Call(torch.load, marker),
        "numpy.load": Call(np.load, marker),
    }


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", ["top", "beside the weights", "inside the weights"])
@pytest.mark.parametrize("kind", harmful("x"))
def test_harmful_pickles_are_refused_and_nothing_runs(tmp_path, kind, place, legacy):
    marker = tmp_path / "marker"
    call = harmful(str(marker))[kind]
    content = {"top": call, "beside the weights": {"model": STATE, "args": call}}.get(place, {**STATE, "c": call})
    path = tmp_path / "x.pth"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError) as caught:
        read_state_dict(path)
    text = str(caught.value)
    assert "x.pth" in text
    assert "weights_only" not in text
    assert "\n" not in text
    assert not marker.exists()


@pytest.mark.parametrize("kind", harmful("x"))
def test_opened_with_stand_ins_on_request_still_nothing_runs(tmp_path, kind):
    marker = tmp_path / "marker"
    torch.save({"model": STATE, "args": harmful(str(marker))[kind]}, tmp_path / "x.pth")
    with contextlib.suppress(CheckpointError):  # read or refused: both are right
        assert_state(read_state_dict(tmp_path / "x.pth", import_foreign=True))
    assert not marker.exists()


def test_the_refusal_names_what_the_file_wants(tmp_path):
    torch.save({"model": STATE, "args": Call(os.system, "true")}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"(posix|os)\.system"):
        read_state_dict(tmp_path / "x.pth")


def test_no_unsafe_reading_anywhere():
    source = pathlib.Path(weft.__file__).parent
    assert [path for path in source.rglob("*.py") if "weights_only=False" in path.read_text()] == []


def header(content: dict, body: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


LYING = {
    "header of 2^40 bytes": struct.pack("<Q", 1 << 40) + b"{}",
    "shape bomb": header({"a": tensor([1 << 40], 0, 1 << 42)}),
    "overlap": header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)),
    "gap": header({"a": tensor([1], 4, 8)}, bytes(8)),
    "short body": header({"a": tensor([4], 0, 16)}, bytes(8)),
    "wrong type": header({"a": tensor([2], 0, 8, "F7")}, bytes(8)),
    "no json": struct.pack("<Q", 4) + b"abcd",
    "empty": b"",
    "nothing but NUL": bytes(4096),
    "a page": b"<!DOCTYPE html><html>404</html>",
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", LYING)
def test_lying_files(tmp_path, kind, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(LYING[kind])
    with pytest.raises(CheckpointError, match="x") as caught:
        read_state_dict(path)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return buffer.getvalue()


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated(tmp_path, keep):
    torch.save({"a": torch.randn(100, 100)}, tmp_path / "x.pth")
    data = (tmp_path / "x.pth").read_bytes()
    (tmp_path / "x.pth").write_bytes(data[: int(keep * len(data))])
    with pytest.raises(CheckpointError, match=r"x\.pth"):
        read_state_dict(tmp_path / "x.pth")


def test_a_changed_byte_inside_an_archive(tmp_path):
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pth")
    data = bytearray((tmp_path / "x.pth").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.pth").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.pth"):
        read_state_dict(tmp_path / "x.pth")


@pytest.mark.parametrize(
    "content", [zipped(a=b"x"), zipped(archive__constants__pkl=b"x"), zipped(x__data__pkl=b"\x80")]
)
def test_archives_that_are_no_weights(tmp_path, content):
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pth"):
        read_state_dict(tmp_path / "x.pth")


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], 7, {"model": "x"}, torch.zeros(3)])
def test_files_without_a_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"x\.pth"):
        read_state_dict(tmp_path / "x.pth")


def test_missing_and_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.pth"):
        read_state_dict(tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match=tmp_path.name):
        read_state_dict(tmp_path)


def test_memory_stays_bounded_by_what_a_header_claims(tmp_path):
    """A file of a few bytes that claims terabytes costs no more than its bytes."""
    for kind in ("header of 2^40 bytes", "shape bomb"):
        (tmp_path / "x.safetensors").write_bytes(LYING[kind])
        program = f"""
import resource, sys
from weft.checkpoints import read_state_dict
from weft.errors import CheckpointError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_state_dict({str(tmp_path / "x.safetensors")!r})
except CheckpointError:
    pass
sys.exit(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 100 * 1024)
"""
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
