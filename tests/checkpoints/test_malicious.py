"""Files that would run code, were they opened by a plain unpickler: refused by name, and nothing they name runs."""

import builtins
import contextlib
import ctypes
import functools
import importlib
import io
import operator
import os
import pickle
import pickletools
import runpy
import shutil
import struct
import subprocess
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft.checkpoints import read_state_dict
from weft.checkpoints.pickles import load_pickle
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
        load_pickle(path, import_foreign=True)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", calls("x"))
def test_calls_are_refused_by_name_and_never_made(tmp_path, kind, legacy):
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    payload, name = calls(str(marker))[kind]
    torch.save({"model": STATE, "args": payload}, path, _use_new_zipfile_serialization=not legacy)
    assert_refused(path, f"its pickle names .*{name}")
    if "bomb" not in kind:  # those are for the process with bounded memory, below
        open_with_stand_ins(path)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["top", "inside the weights"])
def test_wherever_it_stands(tmp_path, place):
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    call = Call(os.system, f"touch {marker}")
    torch.save(call if place == "top" else {**STATE, "c": call}, path)
    assert_refused(path, r"(posix|nt)\.system")
    open_with_stand_ins(path)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["subprocess.Popen", "bytearray bomb", "storage bomb", "os.system"])
def test_the_child_with_stand_ins_runs_nothing_and_stays_small(tmp_path, kind):
    """Nothing runs; and what is opened gives the same tensors."""
    marker, path = tmp_path / "marker", tmp_path / "x.pth"
    torch.save({"model": STATE, "args": calls(str(marker))[kind][0]}, path)
    if kind == "subprocess.Popen":
        assert torch.equal(read_state_dict(path, import_foreign=True)["a.weight"], STATE["a.weight"])
    else:
        with pytest.raises(CheckpointError, match=r"x\.pth"):
            read_state_dict(path, import_foreign=True)
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
    "wrong checksum": (lambda d: changed(archive(d), b"touch"), ".pth", "the checksum of 'x/data.pkl' is wrong"),
    "compressed": (lambda d: archive(d, compression=zipfile.ZIP_DEFLATED), ".pth", "compressed or encrypted"),
    "two pickles of one name": (lambda d: archive(d, twice=True), ".pth", "two parts have one name"),
    "called safetensors": (lambda d: archive(d), ".safetensors", "not in safetensors format"),
    "tar": (legacy_tar, ".pth", "it is a tar archive"),
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
        assert "pickle.load" not in text, source


def test_the_payloads_are_what_they_say():
    """An opcode list of a payload holds the opcode under test: a payload that does nothing would test nothing."""
    for opcode in OPCODES[:4]:
        assert opcode in [found.name for found, _, _ in pickletools.genops(global_call("x", opcode))]
    assert len(calls("x")) >= 30
