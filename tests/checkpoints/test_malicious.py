"""Files that would run code, were they opened by a plain unpickler: refused by name, and nothing they name runs."""

import builtins
import contextlib
import ctypes
import functools
import importlib
import io
import json
import operator
import os
import pickle
import pickletools
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from tests.helpers import examples
from weft.checkpoints import read_state_dict
from weft.cli import main
from weft.errors import CheckpointError

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3)}
HUGE = 1 << 40


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def calls(marker: str) -> dict[str, tuple[object, str]]:
    """What would leave `marker` behind or take all memory, were it called; and the name that the refusal must give."""
    touch, shell = f"open({marker!r}, 'w').close()", f"touch {marker}"
    system = Call(os.system, shell)
    module = Call(builtins.__import__, "os")
    return {
        "os.system": (system, r"(posix|nt)\.system"),
        "os.mkdir": (Call(os.mkdir, marker), r"(posix|nt)\.mkdir"),
        "os.open": (Call(os.open, marker, os.O_CREAT), r"(posix|nt)\.open"),
        "subprocess.Popen": (Call(subprocess.Popen, ["touch", marker]), r"subprocess\.Popen"),
        "subprocess.check_output": (Call(subprocess.check_output, ["touch", marker]), r"subprocess\.check_output"),
        "eval": (Call(builtins.eval, touch), r"builtins\.eval"),
        "exec": (Call(builtins.exec, touch), r"builtins\.exec"),
        "compile": (Call(builtins.exec, Call(builtins.compile, touch, "x", "exec")), r"builtins\.compile"),
        "open": (Call(builtins.open, marker, "w"), r"io\.open"),
        "import": (Call(builtins.__import__, "this"), r"builtins\.__import__"),
        "import_module": (Call(importlib.import_module, "this"), r"importlib\.import_module"),
        "getattr of a module": (Call(builtins.getattr, module, "system"), r"builtins\.__import__"),
        "a call of what getattr gave": (
            Call(builtins.map, Call(builtins.getattr, module, "mkdir"), [marker]),
            r"builtins\.getattr",
        ),
        "methodcaller": (Call(builtins.map, operator.methodcaller("mkdir"), [Path(marker)]), r"operator\.methodcaller"),
        "partial": (functools.partial(os.system, shell), r"functools\.partial"),
        "setattr": (Call(builtins.setattr, Namespace(), "a", 1), r"builtins\.setattr"),
        "path.touch": (Call(Path.touch, Path(marker)), r"builtins\.getattr"),
        "pickle.loads": (Call(pickle.loads, pickle.dumps(system)), r"pickle\.loads"),
        "torch.load": (Call(torch.load, marker), r"torch\.serialization\.load"),
        "numpy.load": (Call(np.load, marker), r"numpy\.load"),
        "numpy objects": (np.array([system, 1], dtype=object), r"(posix|nt)\.system"),
        "runpy": (Call(runpy.run_path, marker), r"runpy\.run_path"),
        "shutil": (Call(shutil.copy, __file__, marker), r"shutil\.copy"),
        "ctypes": (Call(ctypes.CDLL, "libc.so.6"), r"ctypes\.CDLL"),
        "torch.hub": (Call(torch.hub.load, marker, "x"), r"torch\.hub\.load"),
        "a whole model": (torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        "in a Namespace": (Namespace(lr=0.1, extra=system), r"(posix|nt)\.system"),
        "as a key": ({Call(os.getppid): 1}, r"(posix|nt)\.getppid"),
        "nested ten deep": (functools.reduce(lambda inner, _: [inner], range(10), system), r"(posix|nt)\.system"),
        "bytearray bomb": (Call(bytearray, HUGE), r"builtins\.bytearray"),
        "storage bomb": (Call(torch.UntypedStorage, HUGE), r"torch\.storage\.UntypedStorage"),
        "tensor bomb": (Call(torch.FloatTensor, HUGE), r"torch\.FloatTensor"),
        "tensor subclass": (
            Call(torch._tensor._rebuild_from_type_v2, builtins.eval, torch.Tensor, (touch,), {}),
            r"torch\._tensor\._rebuild_from_type_v2",
        ),
    }


def assert_refused(path, message):
    """One line with the file and the name, exit code 4, no advice to open the gates."""
    with pytest.raises(CheckpointError, match=message) as caught:
        read_state_dict(path)
    text = str(caught.value)
    assert path.name in text
    assert "\n" not in text
    assert "weights_only" not in text
    assert "safe_globals" not in text
    assert caught.value.exit_code == 4


def open_with_stand_ins(path):
    with contextlib.suppress(CheckpointError):  # what matters is what it does not do
        read_state_dict(path, import_foreign=True)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", calls("x"))
def test_calls_are_refused_by_name_and_never_made(tmp_path, kind, legacy):
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    payload, name = calls(str(marker))[kind]
    torch.save({"model": STATE, "args": payload}, path, _use_new_zipfile_serialization=not legacy)
    assert_refused(path, f"its pickle names .*{name}")
    assert torch.equal(read_state_dict(path, state_dict="model", import_foreign=True)["a.weight"], STATE["a.weight"])
    assert not marker.exists()


@pytest.mark.parametrize("place", ["top", "inside the weights"])
def test_wherever_it_stands(tmp_path, place):
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    call = Call(os.system, f"touch {marker}")
    torch.save(call if place == "top" else {**STATE, "c": call}, path)
    assert_refused(path, r"(posix|nt)\.system")
    open_with_stand_ins(path)
    assert not marker.exists()


def global_call(marker: str, opcode: str) -> bytes:
    """A pickle that calls os.system, each time by another opcode."""
    shell = f"touch {marker}".encode()
    text = b"X" + struct.pack("<I", len(shell)) + shell
    return {
        "GLOBAL": b"\x80\x02cposix\nsystem\n" + text + b"\x85R.",
        "INST": b"\x80\x02(" + text + b"iposix\nsystem\n.",
        "OBJ": b"\x80\x02(cposix\nsystem\n" + text + b"o.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + text + b"\x85R.",
        "GLOBAL, cut off after it": b"\x80\x02cposix\nsystem\n" + text + b"\x85R",
    }[opcode]


OPCODES = ["GLOBAL", "INST", "OBJ", "STACK_GLOBAL", "GLOBAL, cut off after it"]


def archive(data: bytes, *, compression: int = zipfile.ZIP_STORED, twice: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/version", "3\n")
        if twice:
            with pytest.warns(UserWarning, match="Duplicate name"):
                file.writestr("x/data.pkl", pickle.dumps({}, 2))
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", [".pth", ".bin", ".ckpt", ".pkl", ""])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("opcode", OPCODES)
def test_every_way_to_write_a_name(tmp_path, opcode, zipped, suffix):
    marker, path = tmp_path / "marker", tmp_path / f"x{suffix}"
    data = global_call(str(marker), opcode)
    path.write_bytes(archive(data) if zipped else data)
    assert_refused(path, r"posix\.system")
    open_with_stand_ins(path)
    assert not marker.exists()


def test_registered_extensions(tmp_path):
    (tmp_path / "x.pth").write_bytes(archive(b"\x80\x02\x82\x07)R."))
    assert_refused(tmp_path / "x.pth", "copyreg extension 7")


def legacy_tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as file:
        entry = tarfile.TarInfo("pickle")
        entry.size = len(data)
        file.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def changed(data: bytes, pattern: bytes) -> bytes:
    """One byte of the archive changed, its checksum not."""
    place = data.index(pattern)
    return data[:place] + b"!" + data[place + 1 :]


CONTAINERS = {
    "wrong checksum": (lambda d: changed(archive(d), b"touch"), ".pth", "Bad CRC-32 for file 'x/data.pkl'"),
    "compressed": (lambda d: archive(d, compression=zipfile.ZIP_DEFLATED), ".pth", "compressed or encrypted"),
    "two pickles of one name": (lambda d: archive(d, twice=True), ".pth", "two parts have the same name"),
    "called safetensors": (lambda d: archive(d), ".safetensors", "must be in safetensors format"),
    "tar": (legacy_tar, ".pth", "its first bytes are b'pickle"),
    "a zip behind a pickle": (lambda d: d + archive(pickle.dumps({}, 2)), ".pth", r"posix\.system"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_that_hide_a_pickle(tmp_path, kind):
    make, suffix, message = CONTAINERS[kind]
    marker, path = tmp_path / "marker", tmp_path / f"x{suffix}"
    path.write_bytes(make(global_call(str(marker), "GLOBAL")))
    assert_refused(path, message)
    open_with_stand_ins(path)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # a file of it is the point
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_programs_are_refused(tmp_path):
    module = torch.nn.Linear(2, 2)
    torch.jit.save(torch.jit.trace(module, torch.zeros(1, 2)), tmp_path / "script.pt")
    assert_refused(tmp_path / "script.pt", "holds a program .* weft runs no programs")
    torch.export.save(torch.export.export(module, (torch.zeros(1, 2),)), tmp_path / "program.pt2")
    assert_refused(tmp_path / "program.pt2", "holds a program .* weft runs no programs")


def test_the_command_line_refuses_with_exit_code_4(tmp_path, capsys):
    marker = tmp_path / "marker"
    torch.save({"model": STATE, "args": Call(os.system, f"touch {marker}")}, tmp_path / "x.pth")
    assert main(["convert", str(tmp_path / "x.pth"), str(tmp_path / "out")]) == 4
    error = capsys.readouterr().err
    assert "posix.system" in error
    assert "Nothing was loaded or run" in error
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_no_unsafe_reading_anywhere():
    sources = list(Path(weft.__file__).parent.rglob("*.py"))
    assert len(sources) > 30
    for source in sources:
        text = source.read_text()
        assert "weights_only=False" not in text, source
        if source.parts[-2] != "bench":  # a process and its parent, the same program, talk by pickles
            assert "pickle.load" not in text, source


def test_the_payloads_are_what_they_say():
    """An opcode list of a payload holds the opcode under test: a payload that does nothing would test nothing."""
    for opcode in OPCODES[:4]:
        assert opcode in [found.name for found, _, _ in pickletools.genops(global_call("x", opcode))]
    assert len(calls("x")) >= 30


def archive_of(parts: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return buffer.getvalue()


EVIL, GOOD = global_call("/tmp/never", "GLOBAL"), pickle.dumps({"epoch": 1}, 2)
DECOYS = {
    "another case": ({"x/data.pkl": GOOD, "x/DATA.PKL": EVIL}, "two parts have the same name"),
    "another case first": ({"x/DATA.PKL": EVIL, "x/data.pkl": GOOD}, "two parts have the same name"),
    "a backup first": ({"x/data.pkl.bak": GOOD, "x/data.pkl": EVIL}, r"names posix\.system"),
    "a backup of the evil one": ({"x/data.pkl.bak": EVIL, "x/data.pkl": GOOD}, r"it holds epoch \(int\)"),
    "two folders": ({"a/data.pkl": GOOD, "b/data.pkl": EVIL}, "some other zip archive"),
    "an absolute name": ({"/data.pkl": GOOD, "x/data.pkl": EVIL}, "some other zip archive"),
    "a folder above": ({"../data.pkl": GOOD, "x/data.pkl": EVIL}, "some other zip archive"),
    "a tensor of another case": (
        {"x/data.pkl": GOOD, "x/data/a": b"1", "x/data/A": b"2"},
        "two parts have the same name",
    ),
}


@pytest.mark.parametrize("kind", DECOYS)
def test_what_is_inspected_is_what_is_read(tmp_path, kind):
    parts, message = DECOYS[kind]
    (tmp_path / "x.pth").write_bytes(archive_of(parts))
    assert_refused(tmp_path / "x.pth", message)


def short(value: int) -> bytes:
    return b"\x8a\x10" + value.to_bytes(16, "little")


NESTED = b"\x80\x02}" + b")" + b"2\x86" * 200 + b"K\x01s."  # ((((), ()), ((), ())), ...): 2**200 empty tuples to hash
ZIPPED = [False, pytest.param(True, marks=pytest.mark.slow)]
EXPENSIVE = {
    "nested tuples as a key": (NESTED, None),
    "deep lists": (b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".", None),
    "deep tuples": (b"\x80\x02)" + b"\x85" * 30_000 + b".", None),
    "keys of one hash": (
        b"\x80\x02}(" + b"".join(short(i * (2**61 - 1)) + b"N" for i in range(1, 10_000)) + b"u.",
        None,
    ),
    "endless operations": (b"\x80\x02" + b"N0" * 1_000_001 + b"N.", "more than 2,000,000 operations"),
    "a huge number": (b"\x80\x02\x8b" + struct.pack("<I", 10_000_000) + b"\x7f" * 10_000_000 + b".", "holds a int"),
    "marks": (b"\x80\x02" + b"(" * 1_000_000 + b".", None),
    "sets": (b"\x80\x04" + b"\x8f" * 1_000_000 + b".", None),
    "a huge number in digits": (b"\x80\x02L" + b"9" * 10_000_000 + b"L\n.", "cannot be read to the end"),
    "a text that claims terabytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 42) + b".", "cannot be read to the end"),
    "bytes that claim terabytes": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 42) + b".", "cannot be read to the end"),
    "a dict copied a million times": (
        b"\x80\x02](" + b"h\x00" * 0 + b"K\x01K\x02\x86" * 2_000 + b"eq\x00" + b"ccollections\nOrderedDict\nq\x01"
        b"(" + b"h\x01h\x00\x85R" * 2_000 + b"l.",
        "more than 2,000,000 operations",
    ),
}


@pytest.mark.parametrize("zipped", ZIPPED)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "endless operations")) for kind in EXPENSIVE]
)
def test_the_cost_of_a_pickle_is_bounded_by_its_bytes(tmp_path, kind, zipped):
    data, message = EXPENSIVE[kind]
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    path = tmp_path / "x.pth"
    path.write_bytes(archive(data) if zipped else magic + data + pickle.dumps([], 2))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message or r"x\.pth"):
        read_state_dict(path, import_foreign=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * len(data) + (64 << 20)


SMALL = {
    "an index of the memo": b"\x80\x02Nr" + struct.pack("<I", 1 << 26) + b".",
    "an array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 30) + b".",
    "a deep tuple as a key": b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.",
}


@pytest.mark.parametrize("zipped", ZIPPED)
@pytest.mark.parametrize("kind", SMALL)
def test_a_small_file_takes_little_memory(tmp_path, kind, zipped):
    """Each takes 1 GB or ends the process in Python's unpickler in C."""
    path = tmp_path / "x.pth"
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    path.write_bytes(archive(SMALL[kind]) if zipped else magic + SMALL[kind] + pickle.dumps([], 2))
    tracemalloc.start()
    for import_foreign in (False, True):
        with pytest.raises(CheckpointError, match=r"x\.pth") as caught:
            read_state_dict(path, import_foreign=import_foreign)
        assert caught.value.exit_code == 4
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 64 << 20
    assert main(["convert", str(path), str(tmp_path / "out")]) == 4


def test_attributes_of_a_class_are_not_set(tmp_path, monkeypatch):
    """torch.load compares the source of a class with that in the file, and writes the difference to NAME.patch."""
    monkeypatch.chdir(tmp_path)
    attributes = pickle.dumps({"dump_patches": True, "__module__": "json", "__name__": "x"}, 2)[2:-1]
    data = b"\x80\x02cjson\nJSONDecoder\nq\xc8N" + attributes + b"\x86b0"
    data += b"(X\x06\x00\x00\x00moduleh\xc8X\x01\x00\x00\x00fX\x01\x00\x00\x00stQ."
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    Path("x.pth").write_bytes(magic + data + pickle.dumps([], 2))
    open_with_stand_ins(Path("x.pth"))
    assert json.JSONDecoder.__name__ == "JSONDecoder"
    assert [file.name for file in tmp_path.iterdir()] == ["x.pth"]


def test_views_that_claim_more_than_the_file(tmp_path):
    """Each lies within its storage; copied, they would fill the memory."""
    many = {f"a{i}": torch.zeros(1).expand(1 << 20, 1 << 10) for i in range(64)}
    torch.save(many, tmp_path / "x.pth")
    assert_refused(tmp_path / "x.pth", "they claim 274,877,906,944 bytes in a file of")


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_whatever_a_pickle_does_it_is_read_or_refused(tmp_path_factory, data):
    """Operations in any order: an answer or one kind of error, and nothing imported."""
    path = tmp_path_factory.mktemp("fuzzed") / "x.pth"
    body = b"".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=60)))
    path.write_bytes(archive(b"\x80\x02" + body + b"."))
    before = set(sys.modules)
    with contextlib.suppress(CheckpointError):
        read_state_dict(path, import_foreign=data.draw(st.booleans()))
    assert not {"this", "antigravity"} & (set(sys.modules) - before)


PIECES = [
    *(bytes([code.code.encode("latin-1")[0]]) for code in pickletools.opcodes if code.arg is None),
    *(b"K\x01", b"X\x01\x00\x00\x00a", b"q\x00", b"h\x00", b"G" + bytes(8), b"U\x01a", b"]", b"}", b"(", b")"),
    *(b"cthis\nd\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ithis\nd\n"),
    *(b"ctorch\nFloatStorage\n", b"X\x07\x00\x00\x00storage", b"\x82\x01", b"\x8c\x04this", b"P0\n"),
    *(b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NK\x04tQ", b"ctorch\nSize\n"),
]
