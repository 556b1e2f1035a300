"""Files of weights: honest old ones are read, lying and damaged ones refused in one line."""

import argparse
import collections
import io
import json
import pathlib
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weft.checkpoints import read_state_dict
from weft.errors import CheckpointError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4)}


def assert_state(read):
    assert read.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert torch.equal(read[name], tensor)


AVERAGE = {name: tensor + 1 for name, tensor in STATE.items()}


class Settings:
    """Stands for the configuration object of a library that is not installed here."""

    def __init__(self):
        self.content = {"lr": Settings.__name__}


class Attributes(dict):
    """A dict with a class of its own, as configuration libraries like them."""


def deit_style():
    """What the released CeiT and LeViT training scripts save."""
    return {
        "model": STATE,
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        "lr_scheduler": {"base_values": [1e-3], "metric": None},
        "epoch": 299,
        "model_ema": AVERAGE,
        "scaler": {"scale": 65536.0, "growth_factor": 2.0},
        "args": argparse.Namespace(lr=1e-3, output_dir=pathlib.PurePosixPath("a/b"), world_size=np.int64(8)),
    }


HONEST = {
    "plain": STATE,
    "ordered": collections.OrderedDict(STATE),
    "parameters": {name: torch.nn.Parameter(tensor) for name, tensor in STATE.items()},
    "model": {"model": STATE, "epoch": 3, "lr": 0.1},
    "state_dict": {"state_dict": STATE, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}},
    "an unusual key": {"backbone": STATE, "epoch": 3},
    "namespace": {"model": STATE, "args": argparse.Namespace(lr=0.1, name="x")},
    "numpy scalar": {"model": STATE, "best": np.float64(81.5)},
    "numpy random state": {"model": STATE, "rng": np.random.RandomState(0).get_state()},
    "path": {"model": STATE, "args": argparse.Namespace(out=pathlib.PurePosixPath("a/b"))},
    "default dict": {"model": STATE, "history": collections.defaultdict(list, loss=[1.0, 0.5])},
    "milestones": {"model": STATE, "milestones": collections.Counter([30, 60])},
    "released training scripts": deit_style(),
    "average beside it": {"model": STATE, "model_ema": AVERAGE},
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", HONEST)
def test_honest_files(tmp_path, kind, legacy):
    torch.save(HONEST[kind], tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    assert_state(read_state_dict(tmp_path / "x.pth"))


def test_the_average_when_asked_for(tmp_path):
    torch.save(HONEST["average beside it"], tmp_path / "x.pth")
    assert torch.equal(read_state_dict(tmp_path / "x.pth", state_dict="model_ema")["b.bias"], 2 * torch.ones(4))
    with pytest.raises(CheckpointError, match="'swa'"):
        read_state_dict(tmp_path / "x.pth", state_dict="swa")
    save_file(STATE, tmp_path / "x.safetensors")
    assert_state(read_state_dict(tmp_path / "x.safetensors"))
    with pytest.raises(CheckpointError, match="holds one state dict; got state_dict='model'"):
        read_state_dict(tmp_path / "x.safetensors", state_dict="model")


@pytest.mark.parametrize("legacy", [False, True])
def test_foreign_classes_on_request(tmp_path, legacy):
    """Refused by name as they are; with stand-ins the tensors are the same."""
    content = {**deit_style(), "cfg": Settings(), "path": pathlib.Path("a"), "callbacks": [Settings, Settings()]}
    content |= {"model": Attributes(STATE), "other": Attributes(lr=0.1)}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"names tests\.checkpoints\.test_files\.Attributes, .*\. Nothing was"):
        read_state_dict(tmp_path / "x.pth")
    assert_state(read_state_dict(tmp_path / "x.pth", import_foreign=True))
    averaged = read_state_dict(tmp_path / "x.pth", import_foreign=True, state_dict="model_ema")
    assert torch.equal(averaged["b.bias"], AVERAGE["b.bias"])


def test_only_the_chosen_state_is_read(tmp_path):
    """A file with an optimizer costs the memory of its weights."""
    torch.save({"model": STATE, "optimizer": {"state": {0: {"exp_avg": torch.zeros(10_000_000)}}}}, tmp_path / "x.pth")
    tracemalloc.start()
    try:
        assert_state(read_state_dict(tmp_path / "x.pth"))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_that_share_numbers_share_them_still(tmp_path, legacy):
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"a": whole, "b": whole, "c": whole.t(), "d": whole[1:, 2], "e": torch.zeros(0), "f": torch.tensor(True)}
    torch.save(state, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    read = read_state_dict(tmp_path / "x.pth")
    for name, tensor in state.items():
        assert torch.equal(read[name], tensor)
        assert read[name].stride() == tensor.stride()
    assert read["a"].data_ptr() == read["b"].data_ptr() == read["c"].data_ptr()
    odd = torch.arange(10, dtype=torch.uint8)[:8].view(torch.float32)  # of a storage of 2.5 of its values
    torch.save({"a": odd}, tmp_path / "x.pth", _use_new_zipfile_serialization=not legacy)
    assert torch.equal(read_state_dict(tmp_path / "x.pth")["a"], odd)


def test_a_count_of_values_that_is_not_the_pickles_is_refused(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.arange(6.0)}, path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    assert data[-32] == 6
    data[-32] = 5
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="a storage must have 6 values, and has 5"):
        read_state_dict(path)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("legacy", [False, True])
def test_every_dtype_and_protocol(tmp_path, legacy, protocol):
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    state = {name: (torch.randn(5, 3) * 50).to(getattr(torch, name)) for name in names}
    path = tmp_path / "x.pth"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    read = read_state_dict(path)
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


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


def integer(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little")


def pickled(size: int = 4, *, offset: int = 0, numel: int = 4) -> bytes:
    """A file of torch.save by hand: one tensor, on a storage of four numbers that says that it has `numel`."""
    storage = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += integer(numel) + b"tQ"
    view = integer(offset) + integer(size) + b"\x85" + integer(1) + b"\x85\x89ccollections\nOrderedDict\n)R"
    data = b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n" + storage + view + b"tRs."
    return zipped({"x/data.pkl": data, "x/version": b"3\n", "x/byteorder": b"little", "x/data/0": bytes(16)})


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


BEYOND = {
    "a tensor beyond its storage": pickled(1 << 40),
    "an offset beyond its storage": pickled(offset=1 << 40),
    "a storage beyond its record": pickled(numel=1 << 40),
    "a negative size": pickled((1 << 64) - 4),
}


def test_a_tensor_by_hand(tmp_path):
    """The honest twin of the files below: they fail for their lie alone."""
    (tmp_path / "x.pth").write_bytes(pickled())
    assert torch.equal(read_state_dict(tmp_path / "x.pth")["a"], torch.zeros(4))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", [*LYING, *BEYOND])
def test_files_that_lie_are_refused_in_one_line_and_little_memory(tmp_path, kind, suffix):
    """A file of a few bytes that claims terabytes costs no more than its bytes; the bound is the one users are told."""
    path = tmp_path / f"x{suffix}"
    path.write_bytes({**LYING, **BEYOND}[kind])
    before = peak_bytes(reset=True)
    message = "a tensor needs more data than the file has" if kind in BEYOND and suffix == ".pth" else "x"
    with pytest.raises(CheckpointError, match=message) as caught:
        read_state_dict(path)
    assert peak_bytes() - before < 100e6
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


CLEAR = pathlib.Path("/proc/self/clear_refs")  # of Linux; elsewhere, the peak is not measured


def peak_bytes(*, reset: bool = False) -> int:
    if not CLEAR.exists():
        return 0
    if reset:
        CLEAR.write_text("5")
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated_and_changed_files(tmp_path, keep):
    torch.save({"a": torch.randn(100, 100)}, tmp_path / "x.pth")
    data = (tmp_path / "x.pth").read_bytes()
    place = int(keep * 40_000)  # within the numbers
    for content in (data[: int(keep * len(data))], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
        (tmp_path / "x.pth").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.pth"):
            read_state_dict(tmp_path / "x.pth")


FIRST_BYTES = r"must hold weights.*its first bytes are b'"
NO_WEIGHTS = {
    "another zip archive": (zipped({"a": b"x"}), "it is some other zip archive"),
    "a zip archive of folders": (zipped({"a/b/data.pkl": b"\x80\x02}."}), "some other zip archive"),
    "a program": (zipped({"x/data.pkl": b"\x80\x02}.", "x/constants.pkl": b""}), "it holds a program"),
    "half a pickle": (zipped({"x/data.pkl": b"\x80"}), "its pickle cannot be read to the end"),
    "an empty pickle": (zipped({"x/data.pkl": b""}), "its pickle cannot be read to the end"),
    "a number of epochs": ({"epoch": 3}, r"it holds epoch \(int\)\. Save model\.state_dict\(\)"),
    "a list": ([1, 2], "it holds a list"),
    "an int": (7, "it holds a int"),
    "a text": ({"model": "x"}, r"it holds model \(str\)"),
    "nothing": ({}, "it holds nothing"),
    "one tensor": (torch.zeros(3), "it holds a Tensor"),
    "tensors and a number": ({**STATE, "epoch": 3}, r"names and tensors only; it holds .*epoch \(int\)"),
    "two state dicts": ({"one": STATE, "two": STATE}, r"state dicts: one, two\. Choose one with state_dict=KEY"),
    "a sparse tensor": ({"model": {"a": torch.zeros(2).to_sparse()}}, r"torch\._utils\._rebuild_sparse_tensor"),
    "a meta tensor": ({"model": {"a": torch.zeros(2, device="meta")}}, r"torch\._utils\._rebuild_meta_tensor"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer, .*Run `git lfs pull`"),
    "gzip": (b"\x1f\x8b\x08", rf"{FIRST_BYTES}\\x1f\\x8b\\x08'"),
    "GGUF": (b"GGUF\x03", rf"{FIRST_BYTES}GGUF"),
    "zeros": (b"\0\0\0\0", rf"{FIRST_BYTES}\\x00\\x00\\x00\\x00'"),
    "source": (b"import torch", rf"{FIRST_BYTES}import t'"),
    "a page": (b"  <html>Sign in</html>", "it is a web page, saved in place of a download. Download or copy it again"),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_what_is_no_state_dict_is_refused_with_what_it_is(tmp_path, kind):
    content, message = NO_WEIGHTS[kind]
    path = tmp_path / "x.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"x\.bin.*{message}"):
        read_state_dict(path)


def test_missing_directory_and_device(tmp_path):
    with pytest.raises(CheckpointError, match=r"Weights must be a file; there is no .*none\.pth"):
        read_state_dict(tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match=r"is a directory\. No file in it ends in \.safetensors"):
        read_state_dict(tmp_path)
    save_file(STATE, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"is a directory\. Name the file in it: .*m\.safetensors"):
        read_state_dict(tmp_path)
    with pytest.raises(CheckpointError, match="/dev/zero is a device or pipe"):
        read_state_dict("/dev/zero")
