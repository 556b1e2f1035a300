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
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import warnings
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


def calls(marker: str) -> dict[str, object]:
    """What would leave `marker` behind or take all memory, were it called; by the name that the refusal must give."""
    touch, shell = f"open({marker!r}, 'w').close()", f"touch {marker}"
    system, module = Call(os.system, shell), Call(builtins.__import__, "os")
    return {
        "posix.system": system,
        "posix.system in a Namespace": Namespace(lr=0.1, extra=system),
        "posix.system in an array of objects": np.array([system, 1], dtype=object),
        "posix.system ten lists deep": functools.reduce(lambda inner, _: [inner], range(10), system),
        "posix.getppid as a key": {Call(os.getppid): 1},
        "posix.mkdir": Call(os.mkdir, marker),
        "posix.open": Call(os.open, marker, os.O_CREAT),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", marker]),
        "subprocess.check_output": Call(subprocess.check_output, ["touch", marker]),
        "builtins.eval": Call(builtins.eval, touch),
        "builtins.exec": Call(builtins.exec, touch),
        "builtins.compile": Call(builtins.exec, Call(builtins.compile, touch, "x", "exec")),
        "io.open": Call(builtins.open, marker, "w"),
        "builtins.__import__": Call(builtins.__import__, "this"),
        "builtins.__import__ for its functions": Call(builtins.getattr, module, "system"),
        "builtins.getattr of a module": Call(builtins.map, Call(builtins.getattr, module, "mkdir"), [marker]),
        "builtins.getattr of a path": Call(Path.touch, Path(marker)),
        "builtins.setattr": Call(builtins.setattr, Namespace(), "a", 1),
        "builtins.bytearray of a terabyte": Call(bytearray, HUGE),
        "importlib.import_module": Call(importlib.import_module, "this"),
        "operator.methodcaller": Call(builtins.map, operator.methodcaller("mkdir"), [Path(marker)]),
        "functools.partial": functools.partial(os.system, shell),
        "pickle.loads": Call(pickle.loads, pickle.dumps(system)),
        "runpy.run_path": Call(runpy.run_path, marker),
        "shutil.copy": Call(shutil.copy, __file__, marker),
        "ctypes.CDLL": Call(ctypes.CDLL, "libc.so.6"),
        "numpy.load": Call(np.load, marker),
        "torch.serialization.load": Call(torch.load, marker),
        "torch.hub.load": Call(torch.hub.load, marker, "x"),
        "torch.nn.modules.linear.Linear": torch.nn.Linear(2, 2),
        "torch.storage.UntypedStorage of a terabyte": Call(torch.UntypedStorage, HUGE),
        "torch.FloatTensor of a terabyte": Call(torch.FloatTensor, HUGE),
        "torch._tensor._rebuild_from_type_v2": Call(
            torch._tensor._rebuild_from_type_v2, builtins.eval, torch.Tensor, (touch,), {}
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
    payload, is_zip = calls(str(marker))[kind], not legacy
    for content in ({"model": STATE, "args": payload}, {**STATE, "c": payload}, payload):
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
        assert_refused(path, f"its pickle names .*{re.escape(kind.partition(' ')[0])}")
        open_with_stand_ins(path)
    torch.save({"model": STATE, "args": payload}, path, _use_new_zipfile_serialization=is_zip)
    assert torch.equal(read_state_dict(path, state_dict="model", import_foreign=True)["a.weight"], STATE["a.weight"])
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


def archive(data: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    return archive_of([("x/data.pkl", data), ("x/version", b"3\n")], compression)


def archive_of(parts: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file, warnings.catch_warnings(action="ignore"):
        for name, content in parts:
            file.writestr(name, content)
    return buffer.getvalue()


def legacy(data: bytes) -> bytes:
    """A file of PyTorch before 1.6."""
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(value, 2) for value in head) + data + pickle.dumps([], 2)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("opcode", OPCODES)
def test_every_way_to_write_a_name(tmp_path, opcode, zipped):
    data = global_call(str(tmp_path / "marker"), opcode)
    for suffix in (".pth", ".bin", ".ckpt", ".pkl", ""):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(archive(data) if zipped else data)
        assert_refused(path, r"posix\.system")
        open_with_stand_ins(path)
    assert not (tmp_path / "marker").exists()


def legacy_tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as file:
        entry = tarfile.TarInfo("pickle")
        entry.size = len(data)
        file.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def with_another_byte(data: bytes, pattern: bytes) -> bytes:
    """One byte of the archive changed, its checksum not."""
    place = data.index(pattern)
    return data[:place] + b"!" + data[place + 1 :]


GOOD = pickle.dumps({"epoch": 1}, 2)
TWICE, OTHER_ZIP = "two parts have the same name", "some other zip archive"
CONTAINERS = {
    "wrong checksum": (lambda evil: with_another_byte(archive(evil), b"touch"), "Bad CRC-32 for file 'x/data.pkl'"),
    "compressed": (lambda evil: archive(evil, compression=zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    "tar": (legacy_tar, "its first bytes are b'pickle"),
    "a zip behind a pickle": (lambda evil: evil + archive(GOOD), r"posix\.system"),
    "an extension of copyreg": (lambda evil: archive(b"\x80\x02\x82\x07)R."), "copyreg extension 7"),
    **{
        name: (lambda evil, parts=parts: archive_of([(file, content or evil) for file, content in parts]), message)
        for name, parts, message in [  # None stands for the evil pickle
            ("one name twice", [("x/data.pkl", None), ("x/data.pkl", GOOD)], TWICE),
            ("another case", [("x/data.pkl", GOOD), ("x/DATA.PKL", None)], TWICE),
            ("another case first", [("x/DATA.PKL", None), ("x/data.pkl", GOOD)], TWICE),
            ("a tensor of another case", [("x/data.pkl", GOOD), ("x/data/a", b"1"), ("x/data/A", b"2")], TWICE),
            ("a backup first", [("x/data.pkl.bak", GOOD), ("x/data.pkl", None)], r"names posix\.system"),
            ("a backup of the evil one", [("x/data.pkl.bak", None), ("x/data.pkl", GOOD)], r"it holds epoch \(int\)"),
            ("two folders", [("a/data.pkl", GOOD), ("b/data.pkl", None)], OTHER_ZIP),
            ("an absolute name", [("/data.pkl", GOOD), ("x/data.pkl", None)], OTHER_ZIP),
            ("a folder above", [("../data.pkl", GOOD), ("x/data.pkl", None)], OTHER_ZIP),
        ]
    },
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_inspected_is_what_is_read(tmp_path, kind):
    make, message = CONTAINERS[kind]
    (tmp_path / "x.pth").write_bytes(make(global_call(str(tmp_path / "marker"), "GLOBAL")))
    assert_refused(tmp_path / "x.pth", message)
    open_with_stand_ins(tmp_path / "x.pth")
    assert not (tmp_path / "marker").exists()


def test_a_pickle_that_is_called_safetensors_is_not_read_as_one(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(archive(global_call(str(tmp_path / "marker"), "GLOBAL")))
    assert_refused(tmp_path / "x.safetensors", "must be in safetensors format")
    assert not (tmp_path / "marker").exists()


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
        # a process and its parent, the same program, talk by pickles
        assert "pickle.load" not in text or source.parts[-2] == "bench", source


def test_the_payloads_are_what_they_say():
    """A payload that does nothing would test nothing."""
    for opcode in OPCODES[:4]:
        assert opcode in [found.name for found, _, _ in pickletools.genops(global_call("x", opcode))]


CLAIM = struct.pack("<Q", 1 << 42)  # terabytes
EXPENSIVE = {  # in Python's unpickler in C, each takes a gigabyte or more, ends the process or does not end
    "2**200 empty tuples to hash": (b"\x80\x02})" + b"2\x86" * 200 + b"K\x01s.", r"x\.pth"),
    "a deep tuple as a key": (b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.", r"x\.pth"),
    "an index of the memo": (b"\x80\x02Nr" + struct.pack("<I", 1 << 26) + b".", r"x\.pth"),
    "an array of bytes": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 30) + b".", r"x\.pth"),
    "bytes that claim terabytes": (b"\x80\x05\x96" + CLAIM + b".", "cannot be read to the end"),
    "a text that claims terabytes": (b"\x80\x04\x8d" + CLAIM + b".", "cannot be read to the end"),
    "sets": (b"\x80\x04" + b"\x8f" * 1_000 + b".", r"x\.pth"),
    "a dict copied many times": (
        b"\x80\x02](" + b"K\x01K\x02\x86" * 2_000 + b"eq\x00ccollections\nOrderedDict\nq\x01"
        b"(" + b"h\x01h\x00\x85R" * 2_000 + b"l.",
        "more than 2,000,000 operations",
    ),
    "endless operations": (b"\x80\x02" + b"N0" * 1_000_001 + b"N.", "more than 2,000,000 operations"),
}


@pytest.mark.slow_except(*(f"{kind}-False" for kind in EXPENSIVE if kind != "endless operations"))
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", EXPENSIVE)
def test_a_small_file_takes_little_memory(tmp_path, kind, zipped):
    data, message = EXPENSIVE[kind]
    path = tmp_path / "x.pth"
    path.write_bytes(archive(data) if zipped else legacy(data))
    tracemalloc.start()
    try:
        for import_foreign in (False, True):
            with pytest.raises(CheckpointError, match=message) as caught:
                read_state_dict(path, import_foreign=import_foreign)
            assert caught.value.exit_code == 4
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_attributes_of_a_class_are_not_set(tmp_path, monkeypatch):
    """torch.load compares the source of a class with that in the file, and writes the difference to NAME.patch."""
    monkeypatch.chdir(tmp_path)
    attributes = pickle.dumps({"dump_patches": True, "__module__": "json", "__name__": "x"}, 2)[2:-1]
    data = b"\x80\x02cjson\nJSONDecoder\nq\xc8N" + attributes + b"\x86b0"
    data += b"(X\x06\x00\x00\x00moduleh\xc8X\x01\x00\x00\x00fX\x01\x00\x00\x00stQ."
    Path("x.pth").write_bytes(legacy(data))
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
